"""A process that ends what an embedded Ray leaves behind when its owner was killed.

Run as ``python _reaper.py <process ids of Ray>``; it records their descendants until its parent is gone, and then kills
those that do not end by themselves. Ray's own agents would live for a minute.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator, Sequence

import psutil  # type: ignore[import-untyped]

#: Seconds between two records of the descendants.
_LOOK_S = 1.0
#: Seconds for Ray's processes to end by themselves.
_GRACE_S = 2.0


def _family(pid: int) -> Iterator[psutil.Process]:
    try:
        process = psutil.Process(pid)
        yield process
        yield from process.children(recursive=True)
    except psutil.Error:  # it has ended
        return


def main(pids: Sequence[int]) -> None:
    """Wait for the end of the owner; kill Ray's processes and their descendants."""
    owner = os.getppid()
    # An entry has the process's start time too, so that a later process with its id is not taken for it.
    processes: set[psutil.Process] = set()
    # The owner's end closes the standard input, unless another process has inherited it.
    while os.getppid() == owner and not select.select([0], [], [], _LOOK_S)[0]:
        processes = {process for process in processes if process.is_running()}.union(*map(_family, pids))
    time.sleep(_GRACE_S)
    for process in processes:
        try:
            process.kill()
        except psutil.Error:
            continue


if __name__ == "__main__":
    main([int(pid) for pid in sys.argv[1:]])
