"""Separate random states for environments that draw from the process's global generators."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from rollcast_agents.threads import in_thread

__all__ = ["OwnRandom"]

T = TypeVar("T")

#: One call at a time, since the generators are global. A call that never returns blocks the others in its process.
_TURN = threading.Lock()


class OwnRandom:
    """A separate state of Python's and NumPy's global generators, for calls of one episode.

    Episodes then do not disturb each other or the process: the same seed starts the same episode, whatever else runs,
    and each call continues from the state after the episode's previous call. A thread that draws from the global
    generators during a call is not protected.

    Args:
        seed: seed of both generators, not negative.
    """

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()  # noqa: S311  # games need no cryptographic randomness
        self._numpy = np.random.RandomState(seed % 2**32).get_state()

    async def run(self, function: Callable[[], T]) -> T:
        """Return the result of a call, made in a thread."""
        return await in_thread(self._run, function)

    def _run(self, function: Callable[[], T]) -> T:
        with _TURN:
            before = random.getstate(), np.random.get_state()
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            try:
                return function()
            finally:
                self._python, self._numpy = random.getstate(), np.random.get_state()
                random.setstate(before[0])
                np.random.set_state(before[1])
