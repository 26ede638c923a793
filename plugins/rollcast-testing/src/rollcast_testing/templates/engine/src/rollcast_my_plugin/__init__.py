"""A training engine for rollcast: plain PyTorch on one rank."""
