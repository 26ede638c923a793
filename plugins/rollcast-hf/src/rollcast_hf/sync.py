"""Weight sync without copies: the rollout generates with the engine's own module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from rollcast.contracts.engine import BaseEngine
from rollcast.contracts.rollout import BaseRollout, RolloutMode
from rollcast.contracts.weights import WeightReport
from rollcast.errors import CapabilityError
from rollcast_serving.contracts.weight_sync import BaseWeightSync, SyncSettings, WeightSyncCapabilities

__all__ = ["InProcessSync"]


class InProcessSync(BaseWeightSync):
    """A sync that binds a rollout to an engine in the same process, and reports each new version to it.

    Raises:
        CapabilityError: the rollout cannot generate in the trainer's process, or the engine provides no module.
    """

    capabilities: ClassVar[WeightSyncCapabilities] = WeightSyncCapabilities(
        modes=frozenset({RolloutMode.HYBRID}), same_process=True
    )

    def __init__(self, engine: BaseEngine, targets: Sequence[Any] = (), settings: SyncSettings | None = None) -> None:
        for target in targets:
            if not isinstance(target, BaseRollout) or not target.capabilities.in_process:
                raise CapabilityError(
                    f"weight_sync=in_process needs a rollout that generates in the trainer's process, "
                    f"but {type(target).__name__} does not (capabilities.in_process)"
                )
        if not engine.capabilities.in_process_module:
            raise CapabilityError(
                f"weight_sync=in_process needs an engine whose module can generate, "
                f"but {type(engine).__name__} has none (capabilities.in_process_module)"
            )
        super().__init__(engine, targets, settings)

    async def sync(self, version: int, only_adapter: bool = False) -> list[WeightReport]:  # nothing moves
        """Set the version of the engine's current weights; nothing is copied."""
        return [target.bind_engine(self.engine, version) for target in self.targets if isinstance(target, BaseRollout)]
