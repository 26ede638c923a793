"""Waiting for a single file descriptor of any number; ``select`` fails above 1023."""

from __future__ import annotations

import select

__all__ = ["wait_readable"]


def wait_readable(descriptor: int, timeout_s: float) -> bool:
    """Return True if the descriptor becomes readable or is closed within the time."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(max(timeout_s, 0.0) * 1000))
