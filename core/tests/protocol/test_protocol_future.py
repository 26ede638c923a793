"""A batch with remote columns does to stored rows what it does to its own, and moves only what is read."""

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
from rollcast.protocol import Cut, DataProto, DataProtoFuture, store_batch
from rollcast.protocol.future import promise


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

    def keep(self, data: DataProto) -> DataProto:
        return store_batch(data, self.put).bound(self.fetch)

    def read_columns(self) -> set[str]:
        return {name for cut in self.read for name in cut.columns or ()}


def sharded(data: DataProto, shards: int, store: Store) -> DataProto:
    """The batch as that many workers would keep it, in parts of unequal size."""
    bounds = [round(len(data) * (number / shards) ** 2) for number in range(shards + 1)]
    parts = [data.slice(start, stop) for start, stop in pairwise(bounds)]
    return DataProto.concat([store.keep(part) for part in parts])


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
    kept = sharded(data, shards, store)
    for step in path:
        data, kept = apply(data, step), apply(kept, step)
        assert len(kept) == len(data)
    assert store.read == []
    if travels:
        kept = pickle.loads(pickle.dumps(kept)).bound(store.fetch)
    assert snapshot(kept.local()) == snapshot(data)


@law
@given(batches(min_columns=2), st.integers(1, 3))
def test_columns_are_those_of_a_batch(data: DataProto, shards: int) -> None:
    store = Store()
    kept = sharded(data, shards, store)
    first, *others = data.keys()
    assert kept.keys() == data.keys()
    assert kept.dtypes() == data.dtypes()
    for mine, theirs in (
        (data.select([first]), kept.select([first])),
        (data.drop([first]), kept.drop([first])),
        (data.rename({first: "new"}), kept.rename({first: "new"})),
        (data.select(others).joined(data.select([first])), kept.select(others).joined(kept.select([first]))),
        (data.drop([first]).joined(data.select([first])), kept.drop([first]).joined(data.select([first]))),
    ):
        assert snapshot(theirs.local()) == snapshot(mine)


def test_only_what_is_read_moves() -> None:
    store = Store()
    kept = sharded(sample(6), 2, store).rename({"ids": "input_ids"})
    assert kept["input_ids"].tolist() == sample(6)["ids"].tolist()
    assert store.read_columns() == {"ids"}
    store.read.clear()
    kept.slice(0, 1).local(["uid"])
    assert len(store.read) == 1


def test_columns_that_share_ragged_offsets_still_do() -> None:
    ragged = sample(4)["ragged"]
    store = Store()
    twice = store.keep(DataProto({"a": ragged, "b": ragged * 2})).select_idxs([2, 1, 3]).local()
    assert [row.tolist() for row in (twice["a"] + twice["b"]).unbind()] == [
        (row * 3).tolist() for row in (ragged[i] for i in (2, 1, 3))
    ]


def test_local_rows_among_remote_ones_travel_cut_to_what_is_used() -> None:
    store = Store()
    local = DataProto({"x": torch.zeros(1000, 1000)})
    mixed = DataProto.concat([store.keep(DataProto({"x": torch.ones(2, 1000)})), local])
    part = pickle.dumps(mixed.slice(1, 3))
    assert len(part) < 100_000
    assert pickle.loads(part).bound(store.fetch)["x"][:, 0].tolist() == [1, 0]


def test_waits_once_and_a_timeout_can_be_repeated() -> None:
    asked: list[float | None] = []
    store = Store()

    def resolve(timeout: float | None) -> DataProto:
        asked.append(timeout)
        if timeout == 0:
            raise TimeoutError("not yet")
        return store.keep(sample(4))

    future = DataProtoFuture(resolve, ready=lambda: False)
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
    both = DataProtoFuture(lambda _: [store.keep(sample(1)), store.keep(sample(2))])
    assert [snapshot(part) for part in both.get()] == [snapshot(sample(1)), snapshot(sample(2))]
    with pytest.raises(DataProtoError, match="returned a list, not a DataProto"):
        len(both)


def test_errors() -> None:
    store = Store()
    kept = store.keep(sample(4))
    with pytest.raises(ColumnError, match="no column 'nope'"):
        kept.select(["nope"])
    with pytest.raises(DataProtoError, match="cannot be told without moving"):
        kept.joined(store.keep(sample(4)))
    with pytest.raises(DataProtoError, match="4 rows here but 3"):
        kept.joined(sample(3).rename({"ids": "a", "ragged": "b", "uid": "c"}))
    with pytest.raises(DataProtoError, match="4 rows cannot be cut in 3"):
        kept.chunk(3)
    with pytest.raises(DataProtoError, match="empty"):
        DataProtoFuture.concat([])
    with pytest.raises(DataProtoError, match="dtypes"):
        DataProto.concat([store.keep(DataProto({"x": x})) for x in (torch.zeros(2), torch.arange(2))])
    with pytest.raises(DataProtoError, match="not connected to a store"):
        pickle.loads(pickle.dumps(kept)).local()
    with pytest.raises(DataProtoError, match="returned a NoneType where a DataProto was put"):
        kept.bound(lambda cuts, _: [None] * len(cuts)).local()
    with pytest.raises(DataProtoError, match="joined: a DataProtoFuture is not a DataProto"):
        kept.joined(DataProtoFuture(lambda _: kept))  # type: ignore[arg-type]
    with pytest.raises(DataProtoError, match="no permutation"):
        kept.reordered([0, 0, 1, 2])


class Calls:
    """A store in which the result of a call appears when the call ends."""

    def __init__(self) -> None:
        self.store = Store()
        self.ended = False

    def start(self, name: str, result: DataProto, rows: int | None = None) -> DataProtoFuture:
        self.store.values[name] = store_batch(result, self.store.put)

        def resolve(timeout: float | None) -> Any:
            assert self.ended, "somebody waits for the call"
            return self.store.values[name].bound(self.store.fetch)

        count = len(result) if rows is None else rows
        promised = promise([name], [count], count, self.store.fetch)
        return DataProtoFuture(resolve, lambda: self.ended, refs=[name], rows=promised)


def test_what_is_made_of_a_call_in_flight_has_a_length_and_waits_for_nothing() -> None:
    calls = Calls()
    call = calls.start("answer", sample(6))
    names = sorted(sample(6).keys())[:2]
    part = call.select(names).rename({names[0]: "renamed"}).slice(1, 5)
    made = part.joined(call.select(names[0]).slice(1, 5)).drop([names[1]])
    whole = DataProtoFuture.concat([call, call])
    assert (len(part), len(made), len(whole), [len(piece) for piece in part.chunk(2)]) == (4, 4, 12, [2, 2])
    assert not (call.done() or calls.store.read)
    calls.ended = True
    assert sorted(made.local().keys()) == sorted([names[0], "renamed"])
    assert snapshot(made.local([names[0]])) == snapshot(sample(6).select([names[0]], []).slice(1, 5))
    assert snapshot(whole.local()) == snapshot(DataProto.concat([sample(6), sample(6)]))


def test_names_and_metadata_of_a_call_in_flight_wait_for_it() -> None:
    calls = Calls()
    result = DataProto({"x": torch.arange(4)}, meta_info={"step": 3})
    first, second = calls.start("answer", result).chunk(2)
    calls.ended = True
    assert (first.keys(), first.meta_info) == (["x"], {"step": 3})
    assert "x" in second
    assert second["x"].tolist() == [2, 3]


def test_columns_beside_those_of_a_call_in_flight() -> None:
    calls = Calls()
    both = calls.start("answer", DataProto({"x": torch.arange(3)})).select().with_columns(y=torch.ones(3))
    some = both.select(["y", "x"])
    assert some["y"].tolist() == [1, 1, 1]
    calls.ended = True
    assert (some["x"].tolist(), both.keys()) == ([0, 1, 2], ["x", "y"])


def test_results_of_an_awaited_call_are_referred_to_where_they_are_stored() -> None:
    calls = Calls()
    call = calls.start("answer", sample(6))
    named = call.select("ids")
    assert "answer" in {str(piece.ref.ref) for piece in named.settled().remote_columns()["ids"].rows.pieces}
    calls.ended = True
    assert "answer" in {str(piece.ref.ref) for piece in named.settled().remote_columns()["ids"].rows.pieces}
    assert len(named["ids"]) == 6  # waits for the call
    refs = {piece.ref for piece in named.settled().remote_columns()["ids"].rows.pieces}
    assert refs == {"ref0"}
    assert call.chunk(2)[0].settled().keys() == sample(6).keys()


def test_rows_of_a_call_in_flight_travel() -> None:
    calls = Calls()
    call = calls.start("answer", sample(6))
    there = pickle.loads(pickle.dumps([call, call.select("ids")[[4, 1]]]))
    there = [batch.bound(calls.store.fetch) for batch in there]
    assert [len(batch) for batch in there] == [6, 2]
    calls.ended = True
    assert snapshot(there[0].local()) == snapshot(sample(6))
    assert there[1]["ids"].tolist() == sample(6)["ids"][[4, 1]].tolist()


def test_a_missing_column_of_a_call_in_flight_is_told_when_it_is_read() -> None:
    calls = Calls()
    named = calls.start("answer", sample(6)).select("nope")
    calls.ended = True
    with pytest.raises(ColumnError, match="no column 'nope'; there are"):
        named["nope"]


def test_a_call_that_returns_another_number_of_rows_is_told() -> None:
    calls = Calls()
    call = calls.start("answer", sample(6), rows=5)
    calls.ended = True
    for part in (call.select("ids"), call.select()):
        with pytest.raises(DataProtoError, match="should return 5 rows and returned 6"):
            part.local()


def test_ranks_that_return_the_right_number_of_rows_only_together_are_told() -> None:
    store = Store()
    results = [store_batch(part, store.put) for part in (sample(3), sample(1))]
    with pytest.raises(DataProtoError, match="should return 2 rows and returned 3"):
        promise(["first", "second"], [2, 2], 4, store.fetch).take_results(["first", "second"], results)
