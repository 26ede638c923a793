"""The FSDP engine's step against plain PyTorch that does the same work, on one rank."""

from __future__ import annotations

from _engine_step import compare_steps

if __name__ == "__main__":
    compare_steps("fsdp", "FSDP engine (ours) against plain PyTorch (other)", at_most=1.05)
