"""Random states of worlds that draw from the process's global generators."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from rollcast_agents.threads import in_thread

__all__ = ["OwnRandom"]

T = TypeVar("T")

#: One call at a time, for there is one global generator. A call that never returns blocks the others of its process.
_TURN = threading.Lock()


class OwnRandom:
    """Gives calls the global generators of Python and NumPy in a state of their own.

    Episodes then do not disturb each other, nor the process: the same seed begins the same episode, whatever else runs,
    and each episode goes on where its last call left the generators. A thread that draws from the global generators
    during a call is not protected.

    Args:
        seed: of both generators, not negative.
    """

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()  # noqa: S311  # games, no secrets
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
