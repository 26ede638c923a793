"""Marks that profilers show: what a trainer's loop does, and what runs on the workers.

Example::

    with mark("advantage"):
        ...
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

__all__ = ["mark"]


@contextmanager
def mark(name: str) -> Iterator[None]:
    """Name a block in the traces of a torch profiler, and as an NVTX range where CUDA is in use.

    Without a profiler it costs a microsecond or two.
    """
    torch = sys.modules.get("torch")  # a process that has not imported it has nothing to profile
    if torch is None or not hasattr(torch, "autograd"):
        yield
        return
    with ExitStack() as marks:
        # A record_function costs ten times as much as this look at torch's own flag.
        if getattr(torch.autograd.profiler, "_is_profiler_enabled", True):
            marks.enter_context(torch.autograd.profiler.record_function(name))
        if torch.cuda.is_initialized():
            torch.cuda.nvtx.range_push(name)
            marks.callback(torch.cuda.nvtx.range_pop)
        yield
