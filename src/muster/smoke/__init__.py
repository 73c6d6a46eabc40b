"""The smoke suite, tests/smoke: started on one node or on several, and gathered into a Dossier."""
