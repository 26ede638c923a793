"""A worker's place in a named device mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["MeshInfo"]


@dataclass(frozen=True)
class MeshInfo:
    """A worker's place in a named device mesh.

    Attributes:
        dp_rank: the data-parallel shard that it works on.
        is_collect: whether its output counts.
        coords: its place along the model-parallel dimensions, such as ``{"tp": 1, "pp": 0}``; one
            that is missing is 0.
    """

    dp_rank: int
    is_collect: bool
    coords: Mapping[str, int] = field(default_factory=dict, hash=False)
