"""Which shard each rank works on, and which rank answers for each shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollcast.contracts.dispatch import DispatchTarget, RankCall, RankOutputs
from rollcast.errors import DispatchError

__all__ = ["Layout", "flat_layout", "mesh_layout"]


@dataclass(frozen=True)
class Layout:
    """How shards lie on the ranks of a group.

    Attributes:
        shard_of_rank: number of the shard that each rank works on, by rank.
        answering: the rank whose output counts, by shard.
    """

    shard_of_rank: tuple[int, ...]
    answering: tuple[int, ...]

    @property
    def shards(self) -> int:
        """Number of shards."""
        return len(self.answering)

    def spread(self, calls: Sequence[RankCall]) -> list[RankCall]:
        """The call of each rank, from the call of each shard; ranks of a shard share one object."""
        return [calls[shard] for shard in self.shard_of_rank]

    def answers(self, outputs: RankOutputs) -> list[Any]:
        """The output of each shard, from the outputs of the ranks."""
        by_rank = dict(zip(outputs.ranks, outputs, strict=True))
        return [by_rank[rank] for rank in self.answering]


def flat_layout(ranks: int) -> Layout:
    """A shard for each rank."""
    return Layout(tuple(range(ranks)), tuple(range(ranks)))


def mesh_layout(worker_group: DispatchTarget, mesh_name: str) -> Layout:
    """A shard for each data-parallel rank of a mesh; the rank that collects answers for it.

    Raises:
        DispatchError: the data-parallel ranks have gaps, or not exactly one rank of each collects.
    """
    places = worker_group.mesh(mesh_name)
    present = sorted({place.dp_rank for place in places})
    if present != list(range(len(present))):
        raise DispatchError(
            f"mesh {mesh_name!r}: the workers registered the data-parallel ranks {present}; "
            f"they must be 0 to {len(present) - 1} without gaps"
        )
    collecting = sorted((place.dp_rank, rank) for rank, place in enumerate(places) if place.is_collect)
    if [dp_rank for dp_rank, _ in collecting] != present:
        raise DispatchError(
            f"mesh {mesh_name!r}: exactly one rank of each data-parallel rank must collect, but those that do "
            f"are of the data-parallel ranks {[dp_rank for dp_rank, _ in collecting]} (all: {present})"
        )
    return Layout(tuple(place.dp_rank for place in places), tuple(rank for _, rank in collecting))
