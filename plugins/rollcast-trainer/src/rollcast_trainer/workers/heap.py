"""Keeps Python's garbage collector off the objects that stay for the whole run.

The imported libraries make some 400,000 of them. A full collection looks at each, which takes 0.2 s;
a step makes enough objects of its own to cause one every ten steps or so.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["freeze_heap", "frozen_heap", "unfreeze_heap"]


def freeze_heap() -> None:
    """Collect once, and leave everything that is alive out of later collections."""
    gc.collect()
    gc.freeze()


def unfreeze_heap() -> None:
    """Let collections look at everything again."""
    gc.unfreeze()


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Freeze the heap for a block; a heap that was frozen before stays so."""
    was_frozen = gc.get_freeze_count() > 0
    freeze_heap()
    try:
        yield
    finally:
        if not was_frozen:
            unfreeze_heap()
