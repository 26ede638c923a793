"""Health checks of the engine behind a rollout: a replica with a dead engine is dead."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rollcast.contracts.rollout import BaseRollout
from rollcast.errors import CapabilityError, RequestError, RollcastError

__all__ = ["EngineWatch"]

logger = logging.getLogger(__name__)


class EngineWatch:
    """Health check of an engine; at most one check runs at a time.

    Args:
        rollout: rollout with the engine.
        on_death: called once, when the engine is found dead.
    """

    def __init__(self, rollout: BaseRollout, on_death: Callable[[], None]) -> None:
        self._rollout, self._on_death = rollout, on_death
        self._check: asyncio.Task[None] | None = None
        #: Cause of the engine's death; empty while it lives.
        self.death = ""

    async def look(self) -> str:
        """Check the engine, or wait for the check in flight; return :attr:`death`."""
        self.start()
        if self._check is not None:
            await asyncio.shield(self._check)
        return self.death

    def start(self) -> None:
        """Start a check unless one is in flight or the engine is known to be dead."""
        if not self.death and (self._check is None or self._check.done()):
            self._check = asyncio.ensure_future(self._run())

    async def blame(self, error: Exception) -> str:
        """Return the engine's death if it explains the error, else an empty text."""
        if isinstance(error, (RequestError, CapabilityError)):
            return ""
        return await self.look()

    async def _run(self) -> None:
        try:
            await self._rollout.check_health()
        except Exception as error:
            if not isinstance(error, RollcastError):
                logger.exception("the health check failed")
            self.mark_dead(str(error) or type(error).__name__)

    def mark_dead(self, death: str) -> None:
        """Record the engine's death, unless it is recorded already."""
        if not self.death:
            self.death = death
            logger.error("the engine is dead, so this replica is too: %s", death)
            self._on_death()
