"""The contract of weight synchronisation: how an engine's weights reach a rollout.

Example::

    report = await sync.sync(version=3)
    report.tensors, report.seconds
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rollcast.contracts.rollout import RolloutMode
from rollcast.contracts.weights import WeightReport
from rollcast.plugins.registry import Registry, subclass_of

if TYPE_CHECKING:
    from rollcast.contracts.engine import BaseEngine
    from rollcast.contracts.rollout import BaseRollout

__all__ = ["BaseWeightSync", "WeightSyncCapabilities", "weight_syncs"]


@dataclass(frozen=True)
class WeightSyncCapabilities:
    """Which placements a sync can serve, and whether it needs both ends in one process."""

    modes: frozenset[RolloutMode] = frozenset()
    same_process: bool = False


class BaseWeightSync(ABC):
    """Carries weights from one engine to one rollout; called by all ranks of the engine."""

    capabilities: ClassVar[WeightSyncCapabilities] = WeightSyncCapabilities()

    def __init__(self, engine: BaseEngine, rollout: BaseRollout) -> None:
        self.engine = engine
        self.rollout = rollout

    @abstractmethod
    async def sync(self, version: int) -> WeightReport:
        """Make the rollout generate with the engine's present weights, as ``version``.

        Raises:
            RollcastError: the rollout's report does not match what was sent; names the tensor.
        """


weight_syncs: Registry[type[BaseWeightSync]] = Registry(
    "rollcast.weight_syncs", subclass_of(BaseWeightSync), "rollout.weight_sync"
)
