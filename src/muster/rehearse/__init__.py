"""A manifest's pods as containers on the Engine, with faults if asked, to a Verdict."""
