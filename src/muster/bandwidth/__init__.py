"""How fast and how right collectives are: what nccl-tests and torch measured, and the floors."""
