"""Contract of weight syncs, which transport an engine's weights to rollouts.

Example::

    reports = await sync.sync(version=3)
    reports[0].tensors, reports[0].seconds
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from rollcast.contracts.rollout import RolloutMode
from rollcast.contracts.weights import WeightBucket, WeightReport
from rollcast.errors import CapabilityError, RolloutError
from rollcast.plugins import Registry, subclass_of

if TYPE_CHECKING:
    from rollcast.contracts.engine import BaseEngine
    from rollcast.contracts.rollout import BaseRollout
    from rollcast_serving.casting import WeightCast

__all__ = [
    "BaseWeightSync",
    "Delivery",
    "RemoteRollout",
    "SyncInterruptedError",
    "SyncOutcome",
    "SyncSettings",
    "WeightSyncCapabilities",
    "weight_syncs",
]


class SyncInterruptedError(RolloutError):
    """A living target received no weights because another one died and broke the shared transport; send again."""


#: Result of a sync for one target: its report, or an error.
Delivery = WeightReport | RolloutError


@dataclass(frozen=True)
class SyncOutcome:
    """Result of a sync by one rank of the engine to its replicas.

    Attributes:
        metrics: metrics of the rank; empty on a rank that sent nothing.
        failed: errors of replicas without the new weights, by number.
        served: numbers of the replicas that this rank had to send to.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[int, RolloutError] = field(default_factory=dict)
    served: frozenset[int] = frozenset()


@dataclass(frozen=True)
class WeightSyncCapabilities:
    """Placements that a sync supports.

    Attributes:
        modes: modes of the rollout.
        same_process: True if both ends must run in one process.
        same_node: True if both ends must run on one node.
        own_devices: True if each end needs an accelerator that the other does not use.
        shared_devices: True if both ends need the same accelerator.
    """

    modes: frozenset[RolloutMode] = frozenset()
    same_process: bool = False
    same_node: bool = False
    own_devices: bool = False
    shared_devices: bool = False


@dataclass(frozen=True)
class SyncSettings:
    """Sizes and deadlines of a sync.

    Attributes:
        bucket_bytes: maximum size of a bucket in bytes; a larger tensor is sent alone.
        timeout_s: deadline for the receiver to take a bucket, in seconds.
        folder: folder that both ends see, for syncs through files.
        cast: conversion of the model's weights before they are sent; None sends them in the engine's dtype. Adapters
            are never converted.
    """

    bucket_bytes: int = 64 << 20
    timeout_s: float = 600.0
    folder: str | None = None
    cast: WeightCast | None = None


class RemoteRollout(Protocol):
    """A rollout in another process, as a sync sees it.

    Attributes:
        node: address of its node.
    """

    node: str

    def receive_weights(self, sync: str, source: Mapping[str, Any], version: int) -> WeightReport:
        """Load the buckets of ``weight_syncs.get(sync).open(source)`` in its process; block until done.

        Raises:
            WeightSyncError: loading failed.
            RolloutError: the rollout is dead.
        """
        ...


class BaseWeightSync(ABC):
    """A transport of weights from one engine to rollouts.

    Gathering the weights is a collective, so every rank of the engine has a sync, calls :meth:`sync`, and serves its
    own targets.

    Args:
        engine: engine of this rank.
        targets: rollout in this process, or remote ones; may be replaced between two calls.
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
    async def sync(self, version: int, only_adapter: bool = False) -> Sequence[Delivery]:
        """Send the engine's current weights to the targets, as ``version``.

        A dead target does not affect the others, unless they share a connection.

        Args:
            version: version of the weights.
            only_adapter: send only the trained adapter, because every target has the base model; the same on all ranks.

        Returns:
            For each target, in order: its report (of the adapter if there is one), the error of a dead target, or
                :class:`SyncInterruptedError`.

        Raises:
            WeightSyncError: a living target refused the weights, or its report does not match; the message names the
                tensor.
        """

    @classmethod
    def open(cls, source: Mapping[str, Any]) -> Iterable[WeightBucket]:
        """Return the buckets that :meth:`sync` sends, in a target's process; they can be read once.

        Args:
            source: JSON-like description that the sender passed to :meth:`RemoteRollout.receive_weights`.

        Raises:
            CapabilityError: the sync has no receiving end, because both ends share a process.
        """
        raise CapabilityError(f"{cls.__name__} sends nothing to other processes, and cannot open {source}")

    def close(self) -> None:
        """Release resources that were kept between calls."""
        return


weight_syncs: Registry[type[BaseWeightSync]] = Registry(
    "rollcast.weight_syncs",
    subclass_of(BaseWeightSync),
    "rollout.weight_sync",
    description="transports of weights from the engine to the rollout",
)
