"""A command under NCCL's switches, one at a time, until the layer that breaks is known."""
