"""Muster: pinned images, a smoke suite and a verdict for distributed PyTorch training."""

__version__ = "0.1.0"
