"""Things that tests share, in modules that pickle finds by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollcast import DataProto
from rollcast.contracts.dispatch import MeshInfo


def doubled(worker, data: DataProto) -> DataProto:
    """A function that a controller hands to workers."""
    return data.with_columns({"x": data["x"] * 2, "rank": data["x"] * 0 + worker.rank})


def numbered(rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows)}, {"id": [f"r{row}" for row in range(rows)]}, {"t": [1]})


def grid(dp: int, pp: int, tp: int, order: Sequence[str] = ("tp", "dp", "pp"), answers=None) -> list[MeshInfo]:
    """Places of ``dp * pp * tp`` ranks; ``order`` names the dimensions, the fastest first.

    ``answers`` tells of coordinates whether the rank collects; by default the first of the last stage.
    """
    sizes = {"dp": dp, "pp": pp, "tp": tp}
    places = []
    for rank in range(dp * pp * tp):
        at = {}
        for name in order:
            rank, at[name] = divmod(rank, sizes[name])
        collects = answers(at) if answers else at["tp"] == 0 and at["pp"] == pp - 1
        places.append(MeshInfo(at["dp"], collects, {"tp": at["tp"], "pp": at["pp"]}))
    return places
