"""Batches with remote columns: what is fetched and awaited, and what moves nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rollcast.errors import DataProtoError
from rollcast.protocol import Cut, DataProto, DataProtoFuture, Jagged, store_batch
from rollcast.protocol.future import promise


class Store:
    """Keeps batches, and counts what is read of them; a call that has not ended cannot be read."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.ended: dict[str, Any] = {}

    def fetch(self, cuts: Sequence[Cut], timeout: float | None) -> list[Any]:
        found = []
        for cut in cuts:
            if isinstance(cut.ref, str):
                assert cut.ref in self.ended, f"waited for {cut.ref}"
                found.append(self.ended[cut.ref])
            else:
                self.read += cut.columns or ()
                found.append(cut.of(cut.ref))
        return found

    def keep(self, **columns: torch.Tensor) -> DataProto:
        return store_batch(DataProto(columns), lambda value: value).bound(self.fetch)

    def started(self, call: str, rows: int) -> DataProtoFuture:
        def resolve(timeout: float | None) -> DataProto:
            assert call in self.ended, f"waited for {call}"
            return self.ended[call].bound(self.fetch)

        return DataProtoFuture(resolve, lambda: call in self.ended, rows=promise([call], [rows], rows, self.fetch))

    def end(self, call: str, **columns: torch.Tensor) -> None:
        self.ended[call] = store_batch(DataProto(columns), lambda value: value)


def ids(*lengths: int) -> torch.Tensor:
    sizes = torch.tensor(lengths)
    return Jagged.from_lengths(torch.arange(int(sizes.sum()), dtype=torch.int32), sizes).column()


@pytest.fixture
def store() -> Store:
    return Store()


def test_a_column_is_fetched_when_it_is_read_and_once(store: Store) -> None:
    batch = store.keep(a=torch.arange(4), b=torch.arange(4) * 2)
    later = batch.with_columns({"c": torch.zeros(4)}).rename({"a": "d"})
    assert later.keys() == ["d", "b", "c"]
    assert store.read == []
    assert later["d"].tolist() == [0, 1, 2, 3] == batch["a"].tolist()
    assert store.read == ["a"]


def test_rows_of_a_column_that_is_here_are_not_fetched(store: Store) -> None:
    batch = store.keep(a=torch.arange(4), b=torch.arange(4) * 2)
    assert batch["a"].tolist() == [0, 1, 2, 3]
    picked = batch.select_idxs([3, 1])[[1]]
    assert picked["a"].tolist() == [1]
    assert store.read == ["a"]
    assert picked["b"].tolist() == [2]
    assert store.read == ["a", "b"]


def test_local_reads_in_one_go_and_keeps_nothing(store: Store) -> None:
    column = ids(1, 2)
    batch = store.keep(a=column, b=column * 2, c=ids(3, 3))
    read = batch.local(["a", "b"])
    assert type(read) is DataProto
    assert (read["a"] + read["b"]).values().tolist() == [0, 3, 6]
    batch.local(["a"])
    assert store.read == ["a", "b", "a"]


def test_jagged_columns_that_are_read_one_by_one_can_be_computed_with_each_other(store: Store) -> None:
    column = ids(1, 2)
    batch = store.keep(a=column, b=column * 2)
    assert (batch["a"] + batch["b"]).values().tolist() == [0, 3, 6]


def test_reading_one_call_waits_for_no_other(store: Store) -> None:
    values = store.started("values", 3).select("values")
    reference = store.started("reference", 3).select("ref_log_prob")
    batch = DataProto({"uid": torch.arange(3)}).joined(values).joined(reference)
    assert "ref_log_prob" in batch
    store.end("values", values=torch.ones(3))
    assert batch.select_idxs([2, 0]).local(["values", "uid"])["values"].tolist() == [1, 1]
    store.end("reference", ref_log_prob=torch.arange(3.0))
    assert batch[[2, 0]]["ref_log_prob"].tolist() == [2, 0]


def test_a_batch_that_is_sent_carries_the_columns_of_both(store: Store) -> None:
    stored = store.keep(a=torch.arange(4), b=ids(1, 2, 3, 4))
    twice = stored.joined(stored.select("a").rename({"a": "again"})).with_columns({"c": torch.arange(4) + 10})
    sent = twice.select(["c", "again", "b", "a"])[[2, 3]].bound(store.fetch)
    assert store.read == []
    assert sent.keys() == ["c", "again", "b", "a"]
    assert [sent[name].tolist() for name in ("c", "again", "a")] == [[12, 13], [2, 3], [2, 3]]
    assert Jagged.of(sent["b"]).values.tolist() == list(range(3, 10))


def test_batches_are_joined_by_rows_where_they_lie(store: Store) -> None:
    first = store.keep(a=torch.arange(2), b=torch.arange(2)).with_columns({"uid": torch.zeros(2)})
    second = store.keep(a=torch.arange(2) + 5, b=torch.arange(2)).with_columns({"uid": torch.ones(2)})
    joined = DataProto.concat([first, second])
    assert store.read == []
    assert (joined["a"].tolist(), joined["uid"].tolist()) == ([0, 1, 5, 6], [0, 0, 1, 1])
    mixed = DataProto.concat([first.select(["a"]), DataProto({"a": torch.tensor([9])})])
    assert mixed["a"].tolist() == [0, 1, 9] == mixed["a"].tolist()
    renamed = DataProto.concat([store.keep(x=torch.arange(2)).rename({"x": "y"}), store.keep(y=torch.arange(3))])
    store.read.clear()
    assert renamed["y"].tolist() == [0, 1, 0, 1, 2]
    assert renamed["y"][-1] == 2
    assert store.read == ["x", "y"]


def test_pieces_are_cut_where_they_lie(store: Store) -> None:
    batch = store.keep(a=torch.arange(4), b=torch.arange(4)).with_columns({"c": torch.arange(4)})
    pieces = [*batch.chunk(2), *batch.split(3)]
    assert store.read == []
    assert [piece["a"].tolist() for piece in pieces] == [[0, 1], [2, 3], [0, 1, 2], [3]]
    assert [piece["c"].tolist() for piece in pieces] == [[0, 1], [2, 3], [0, 1, 2], [3]]


def test_values_that_are_here_are_not_fetched(store: Store) -> None:
    batch = store.started("generate", 2).select("prompts").with_cached(prompts=torch.tensor([3, 4]))
    assert batch[[1]]["prompts"].tolist() == [4]


def test_what_lies_elsewhere_is_not_compared(store: Store) -> None:
    batch = store.keep(a=torch.arange(2))
    assert batch.joined(batch).keys() == ["a"]
    with pytest.raises(DataProtoError, match="'a' is in both, and whether the values are equal"):
        DataProto({"a": torch.arange(2)}).joined(batch)
    assert store.read == []
