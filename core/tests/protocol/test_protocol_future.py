"""A handle does to stored rows what a DataProto does to its own, and moves only what is read."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from protocol_batches import batches, law, sample, snapshot

from rollcast.errors import ColumnError, DataProtoError
from rollcast.protocol import DataProto, DataProtoFuture
from rollcast.protocol.future import Cut, StoredShard, promise, store_batch


class Store:
    """A store in this process that remembers what was read."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.read: list[Cut] = []

    def put(self, value: Any) -> str:
        self.values[f"ref{len(self.values)}"] = value
        return f"ref{len(self.values) - 1}"

    def fetch(self, cuts: Sequence[Cut], timeout: float | None) -> list[Any]:
        self.read += cuts
        return [cut.of(self.values[cut.ref]) for cut in cuts]

    def handle(self, data: DataProto) -> DataProtoFuture:
        return DataProtoFuture.of_shard(store_batch(data, self.put), self.fetch)

    def read_columns(self) -> set[str]:
        return {name for cut in self.read for name in cut.columns or ()}


def sharded(data: DataProto, shards: int, store: Store) -> DataProtoFuture:
    """The batch as that many workers would keep it, in parts of unequal size."""
    bounds = [round(len(data) * (number / shards) ** 2) for number in range(shards + 1)]
    parts = [data.slice(start, stop) for start, stop in pairwise(bounds)]
    return DataProtoFuture.concat([store.handle(part) for part in parts])


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """Operations on rows, as fractions so that they fit whatever length is left."""
    fraction = st.floats(0, 1)
    slices = st.tuples(st.just("slice"), fraction, fraction, st.sampled_from([1, 2, -1]))
    picks = st.tuples(st.just("pick"), st.lists(fraction, max_size=8))
    others = st.sampled_from([("repeat",), ("pad", 3), ("flip",), ("halves",)])
    return draw(st.lists(st.one_of(slices, picks, others), max_size=5))


def apply(batch: Any, step: tuple[Any, ...]) -> Any:
    size = len(batch)
    match step:
        case ("slice", start, stop, stride):
            return batch[int(start * size) : int(stop * size) : stride]
        case ("pick", fractions):
            return batch.select_idxs([min(int(f * size), size - 1) for f in fractions] if size else [])
        case ("repeat",):
            return batch.repeat(2, interleave=size % 2 == 0)
        case ("pad", divisor):
            return batch.pad_to_divisor(divisor)[0]
        case ("flip",):
            return batch.reordered(list(range(size))[::-1])
        case _:
            parts = batch.split(max(size // 2, 1))
            return type(batch).concat(parts[::-1])


@law
@given(batches(min_columns=1), st.integers(1, 4), steps(), st.booleans())
def test_rows_are_those_of_a_batch(data: DataProto, shards: int, path: list[Any], travels: bool) -> None:
    store = Store()
    handle: DataProtoFuture = sharded(data, shards, store)
    for step in path:
        data, handle = apply(data, step), apply(handle, step)
        assert len(handle) == len(data)
    assert store.read == []
    if travels:
        handle = pickle.loads(pickle.dumps(handle)).bind(store.fetch)
    assert snapshot(handle.get()) == snapshot(data)


@law
@given(batches(min_columns=2), st.integers(1, 3))
def test_columns_are_those_of_a_batch(data: DataProto, shards: int) -> None:
    store = Store()
    handle = sharded(data, shards, store)
    first, *others = data.keys()
    assert handle.keys() == data.keys()
    assert handle.dtypes() == data.dtypes()
    for mine, theirs in (
        (data.select([first]), handle.select([first])),
        (data.drop([first]), handle.drop([first])),
        (data.rename({first: "new"}), handle.rename({first: "new"})),
        (data.select(others).joined(data.select([first])), handle.select(others).joined(handle.select([first]))),
        (data.drop([first]).joined(data.select([first])), handle.drop([first]).joined(data.select([first]))),
    ):
        assert snapshot(theirs.get()) == snapshot(mine)


def test_only_what_is_read_moves() -> None:
    store = Store()
    handle = sharded(sample(6), 2, store).rename({"ids": "input_ids"})
    assert handle["input_ids"].tolist() == sample(6)["ids"].tolist()
    assert store.read_columns() == {"ids"}
    store.read.clear()
    handle.slice(0, 1).select(["uid"]).get()
    assert len(store.read) == 1


def test_columns_that_share_ragged_offsets_still_do() -> None:
    ragged = sample(4)["ragged"]
    store = Store()
    twice = store.handle(DataProto({"a": ragged, "b": ragged * 2})).select_idxs([2, 1, 3]).get()
    assert [row.tolist() for row in (twice["a"] + twice["b"]).unbind()] == [
        (row * 3).tolist() for row in (ragged[i] for i in (2, 1, 3))
    ]


def test_a_batch_at_hand_travels_cut_to_its_rows() -> None:
    handle = DataProtoFuture.of_batch(DataProto({"x": torch.zeros(1000, 1000)}))
    part = pickle.dumps(handle.slice(0, 2))
    assert len(part) < 100_000
    assert pickle.loads(part).get()["x"].shape == (2, 1000)


def test_waits_once_and_a_timeout_can_be_repeated() -> None:
    asked: list[float | None] = []
    store = Store()

    def resolve(timeout: float | None) -> StoredShard:
        asked.append(timeout)
        if timeout == 0:
            raise TimeoutError("not yet")
        return store_batch(sample(4), store.put)

    future = DataProtoFuture(resolve, store.fetch, ready=lambda: False)
    assert not future.done()
    with pytest.raises(TimeoutError):
        future.get(timeout=0)
    assert len(future) == 4
    assert future.done()
    assert future.get() is future.get(timeout=5)
    assert asked == [0, None]


def test_results_of_other_kinds() -> None:
    assert DataProtoFuture(lambda _: {"loss": 1.0}).get() == {"loss": 1.0}
    store = Store()
    both = DataProtoFuture(lambda _: [store.handle(sample(1)), store.handle(sample(2))])
    assert [len(each) for each in both.get()] == [1, 2]
    with pytest.raises(DataProtoError, match="returned a list, not a DataProto"):
        len(both)


def test_errors() -> None:
    store = Store()
    handle = store.handle(sample(4))
    with pytest.raises(ColumnError, match="no column 'nope'"):
        handle.select(["nope"])
    with pytest.raises(DataProtoError, match="cannot be told without moving"):
        handle.joined(store.handle(sample(4)))
    with pytest.raises(DataProtoError, match="4 rows here but 3"):
        handle.joined(sample(3).rename({"ids": "a", "ragged": "b", "uid": "c"}))
    with pytest.raises(DataProtoError, match="4 rows cannot be cut in 3"):
        handle.chunk(3)
    with pytest.raises(DataProtoError, match="empty"):
        DataProtoFuture.concat([])
    with pytest.raises(DataProtoError, match="dtypes"):
        DataProtoFuture.concat(
            [DataProtoFuture.of_batch(DataProto({"x": x})) for x in (torch.zeros(2), torch.arange(2))]
        )
    with pytest.raises(DataProtoError, match="not connected"):
        pickle.loads(pickle.dumps(handle)).get()
    with pytest.raises(DataProtoError, match="returned a NoneType where a DataProto was put"):
        handle.bind(lambda cuts, _: [None] * len(cuts)).get()
    with pytest.raises(DataProtoError, match="joined: a int is neither"):
        handle.joined(3)
    with pytest.raises(DataProtoError, match="no permutation"):
        handle.reordered([0, 0, 1, 2])


def test_what_is_made_of_a_call_in_flight_has_a_length_and_waits_for_nothing() -> None:
    store, ended = Store(), False
    store.values["answer"] = store_batch(sample(6), store.put)

    def resolve(timeout: float | None) -> Any:
        assert ended, "somebody waits for the call"
        return store.values["answer"]

    call = DataProtoFuture(resolve, store.fetch, lambda: ended, refs=["answer"], deferred=promise(["answer"], [6], 6))
    names = sorted(sample(6).keys())[:2]
    part = call.select(names).rename({names[0]: "renamed"}).slice(1, 5)
    made = part.joined(call.select([names[0]]).slice(1, 5)).drop([names[1]])
    whole = DataProtoFuture.concat([call, call])
    assert (len(part), len(made), len(whole), [len(each) for each in part.chunk(2)]) == (4, 4, 12, [2, 2])
    assert not (part.done() or made.done() or whole.done() or store.read)
    ended = True
    assert sorted(made.get().keys()) == sorted([names[0], "renamed"])
    assert snapshot(whole.get()) == snapshot(DataProto.concat([sample(6), sample(6)]))
