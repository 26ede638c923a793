"""The suite for dispatch modes: it accepts what is right and catches what is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _pytest.outcomes import Skipped

from rollcast.contracts.dispatch import Calls, DispatchMode, RankCall
from rollcast.protocol import DataProto
from rollcast_testing import DispatchSuite


class Striped(DispatchMode):
    """Right: rank r gets the rows r, r + n, r + 2n …, and they come back in order."""

    name = "striped"

    def dispatch(self, worker_group: Any, data: DataProto) -> Calls:
        size = worker_group.world_size
        stripes = [torch.arange(len(data))[rank::size] for rank in range(size)]
        return Calls.each([data.select_idxs(stripe) for stripe in stripes], state=torch.cat(stripes))

    def collect(self, worker_group: Any, outputs: Any) -> DataProto:
        return DataProto.concat(list(outputs)).reordered(outputs.state.argsort())


class Stripes(Striped):
    """Right, with another contract: the stripes come back as they are."""

    def collect(self, worker_group: Any, outputs: Any) -> Any:
        return list(outputs)


class TestStriped(DispatchSuite):
    @pytest.fixture
    def mode(self) -> DispatchMode:
        return Striped()


class TestStripes(DispatchSuite):
    @pytest.fixture
    def mode(self) -> DispatchMode:
        return Stripes()

    def expected(self, batch, world_size):
        return [batch[rank::world_size] for rank in range(world_size)]


class WrongOrder(Striped):
    def collect(self, worker_group, outputs):
        return DataProto.concat(list(outputs))


class DropsTheRest(Striped):
    def dispatch(self, worker_group, data):
        size = worker_group.world_size
        even = data[: len(data) // size * size]
        return super().dispatch(worker_group, even)


class NoEmptyBatch(Striped):
    def dispatch(self, worker_group, data):
        if not len(data):
            raise RuntimeError("no rows")
        return super().dispatch(worker_group, data)


class AnswersItself(Striped):
    def dispatch(self, worker_group, data):
        calls = super().dispatch(worker_group, data)
        return Calls(calls.per_rank, data)

    def collect(self, worker_group, outputs):
        return outputs.state


class Marks(Striped):
    def dispatch(self, worker_group, data):
        data.meta_info["seen"] = True
        return super().dispatch(worker_group, data)


class Sorts(Striped):
    def collect(self, worker_group, outputs):
        self.last.batch["row"].zero_()
        return super().collect(worker_group, outputs)

    def dispatch(self, worker_group, data):
        self.last = data
        return super().dispatch(worker_group, data)


class Remembers(Striped):
    def dispatch(self, worker_group, data):
        calls = super().dispatch(worker_group, data)
        self.order = calls.state
        return calls

    def collect(self, worker_group, outputs):
        return DataProto.concat(list(outputs)).reordered(self.order.argsort())


class TakesAnything(Striped):
    def dispatch(self, worker_group, *args, **kwargs):
        found = [value for value in (*args, *kwargs.values()) if isinstance(value, DataProto)]
        return super().dispatch(worker_group, found[0]) if found else Calls.each([None] * worker_group.world_size)


class MovesRows(Striped):
    def dispatch(self, worker_group, data):
        return super().dispatch(worker_group, data.local())


class OtherKeyword(Striped):
    def dispatch(self, worker_group, rows):
        return super().dispatch(worker_group, rows)


class HasALambda(Striped):
    def __init__(self):
        self.key = lambda: None


class Nameless(Striped):
    name = ""


class WrongExecute(Striped):
    default_execute_mode = "rank_zero"


class OverMesh(DispatchMode):
    """Right, over a mesh."""

    name = "over_mesh"

    def dispatch(self, worker_group, data):
        places = worker_group.mesh("m")
        size = max(place.dp_rank for place in places) + 1
        shards = [RankCall((data[rank::size],)) for rank in range(size)]
        order = torch.cat([torch.arange(len(data))[rank::size] for rank in range(size)])
        return Calls([shards[place.dp_rank] for place in places], order)

    def collect(self, worker_group, outputs):
        places = worker_group.mesh("m")
        pairs = [
            (places[r].dp_rank, out) for r, out in zip(outputs.ranks, outputs, strict=True) if self._counts(places[r])
        ]
        joined = DataProto.concat([out for _, out in sorted(pairs, key=lambda pair: pair[0])])
        return joined[: len(outputs.state)].reordered(outputs.state.argsort())

    def _counts(self, place):
        return place.is_collect


class TestOverMesh(DispatchSuite):
    @pytest.fixture
    def mode(self) -> DispatchMode:
        return OverMesh()


class CopiesShards(OverMesh):
    def dispatch(self, worker_group, data):
        calls = super().dispatch(worker_group, data)
        return Calls([RankCall((call.args[0].clone(),)) for call in calls.per_rank], calls.state)


class CollectsFirst(OverMesh):
    """Takes the first rank of each data-parallel rank, whichever collects."""

    def collect(self, worker_group, outputs):
        first = {
            place.dp_rank: out for place, out in zip(reversed(worker_group.mesh("m")), reversed(outputs), strict=True)
        }
        return DataProto.concat([first[rank] for rank in sorted(first)]).reordered(outputs.state.argsort())


class RankOrder(OverMesh):
    """Joins in the order of ranks, not of data-parallel ranks."""

    def collect(self, worker_group, outputs):
        kept = [out for out, place in zip(outputs, worker_group.mesh("m"), strict=True) if place.is_collect]
        return DataProto.concat(kept).reordered(outputs.state.argsort())


@pytest.mark.parametrize(
    ("mode", "law"),
    [
        (WrongOrder(), "test_identity"),
        (WrongOrder(), "test_every_batch_size"),
        (DropsTheRest(), "test_identity"),
        (DropsTheRest(), "test_every_batch_size"),
        (NoEmptyBatch(), "test_every_batch_size"),
        (AnswersItself(), "test_results_are_the_workers"),
        (WrongOrder(), "test_takes_keyword_arguments"),
        (OtherKeyword(), "test_takes_keyword_arguments"),
        (MovesRows(), "test_leaves_rows_on_workers"),
        (Marks(), "test_leaves_its_arguments_alone"),
        (Sorts(), "test_leaves_its_arguments_alone"),
        (Remembers(), "test_keeps_nothing_between_calls"),
        (TakesAnything(), "test_refuses_bad_arguments"),
        (HasALambda(), "test_pickles"),
        (Nameless(), "test_is_used_by_name"),
        (WrongExecute(), "test_is_used_by_name"),
        (NoEmptyBatch(), "test_on_a_real_group"),
        (CopiesShards(), "test_ranks_that_share_a_shard_share_one_object"),
        (CollectsFirst(), "test_ranks_that_do_not_collect_may_return_nothing"),
        (RankOrder(), "test_every_batch_size"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_broken_mode_is_caught(mode: DispatchMode, law: str) -> None:
    right = OverMesh() if isinstance(mode, OverMesh) else Striped()
    try:
        getattr(DispatchSuite(), law)(mode=right)
    except Skipped:
        assert law == "test_is_used_by_name"
    with pytest.raises(Exception) as caught:
        getattr(DispatchSuite(), law)(mode=mode)
    assert not isinstance(caught.value, Skipped)


def test_a_broken_law_is_said_in_words() -> None:
    with pytest.raises(AssertionError, match=r"failed check: 3 rows .* on 2 ranks; column 'row' is"):
        DispatchSuite()._require_call(WrongOrder(), _two_ranks(), _rows(3))
    with pytest.raises(AssertionError, match=r"; 3 rows are expected, not 2"):
        DispatchSuite()._require_call(DropsTheRest(), _two_ranks(), _rows(3))


def test_a_suite_without_a_mode_says_so() -> None:
    class Empty(DispatchSuite):
        pass

    with pytest.raises(NotImplementedError, match="Empty must set `name`"):
        Empty.mode.__wrapped__(Empty())


def _two_ranks() -> Any:
    from rollcast.contracts.dispatch import MeshInfo
    from rollcast_testing.dispatch import FakeGroup

    return FakeGroup([MeshInfo(0, True), MeshInfo(1, True)])


def _rows(count: int) -> DataProto:
    return DataProto.from_dict({"row": torch.arange(count)})
