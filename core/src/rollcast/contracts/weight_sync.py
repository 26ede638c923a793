"""The contract of weight synchronisation: how an engine's weights reach rollouts.

Example::

    reports = await sync.sync(version=3)
    reports[0].tensors, reports[0].seconds
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from rollcast.contracts.rollout import RolloutMode
from rollcast.contracts.weights import WeightBucket, WeightReport
from rollcast.plugins import Registry, subclass_of

if TYPE_CHECKING:
    from rollcast.contracts.engine import BaseEngine
    from rollcast.contracts.rollout import BaseRollout

__all__ = ["BaseWeightSync", "RemoteRollout", "SyncSettings", "WeightSyncCapabilities", "weight_syncs"]


@dataclass(frozen=True)
class WeightSyncCapabilities:
    """Which placements a sync can serve.

    Attributes:
        modes: of the rollout.
        same_process: both ends have to live in one process.
        same_node: both ends have to live on one node.
    """

    modes: frozenset[RolloutMode] = frozenset()
    same_process: bool = False
    same_node: bool = False


@dataclass(frozen=True)
class SyncSettings:
    """How weights travel.

    Attributes:
        bucket_bytes: largest part that is under way at once; a tensor that is larger goes alone.
        timeout_s: until one part has to be taken.
        folder: that both ends see, for syncs that go through files.
    """

    bucket_bytes: int = 64 << 20
    timeout_s: float = 600.0
    folder: str | None = None


class RemoteRollout(Protocol):
    """A rollout in another process, as a sync sees it.

    Attributes:
        node: address of the node on which it runs.
    """

    node: str

    def receive_weights(self, sync: str, source: Mapping[str, Any], version: int) -> WeightReport:
        """Have it load what ``weight_syncs.get(sync).open(source)`` gives there; blocks until it has.

        Raises:
            WeightSyncError: it could not.
        """
        ...


class BaseWeightSync(ABC):
    """Carries weights from one engine to rollouts.

    Every rank of the engine has one and calls :meth:`sync`, because gathering the weights is a
    collective; each rank's serves its own targets.

    Args:
        engine: this rank's.
        targets: the rollout in this process, or remote ones; may be replaced between two calls.
        settings: sizes and deadlines.
    """

    capabilities: ClassVar[WeightSyncCapabilities] = WeightSyncCapabilities()

    def __init__(
        self,
        engine: BaseEngine,
        targets: Sequence[BaseRollout | RemoteRollout] = (),
        settings: SyncSettings | None = None,
    ) -> None:
        self.engine = engine
        self.targets = targets
        self.settings = settings or SyncSettings()

    @abstractmethod
    async def sync(self, version: int, only_adapter: bool = False) -> list[WeightReport]:
        """Make the targets generate with the engine's present weights, as ``version``.

        Args:
            version: of the weights.
            only_adapter: every target has the base model, so of an engine that trains an adapter only
                that has to travel. The same on all ranks.

        Returns:
            A report for each target, in their order; of the adapter, if there is one.

        Raises:
            WeightSyncError: a target's report does not match what was sent; names the tensor.
        """

    @classmethod
    def open(cls, source: Mapping[str, Any]) -> Iterable[WeightBucket]:
        """The receiving end, in a target's process: what :meth:`sync` sends there, to go through once.

        Args:
            source: JSON-like description that the sender gave to :meth:`RemoteRollout.receive_weights`.

        Raises:
            CapabilityError: the sync has no receiving end, because both ends share a process.
        """
        from rollcast.errors import CapabilityError

        raise CapabilityError(f"{cls.__name__} sends nothing to other processes, and cannot open {source}")

    def close(self) -> None:
        """Give back what was kept between calls."""
        return


weight_syncs: Registry[type[BaseWeightSync]] = Registry(
    "rollcast.weight_syncs",
    subclass_of(BaseWeightSync),
    "rollout.weight_sync",
    description="transports of weights from the engine to the rollout",
)
