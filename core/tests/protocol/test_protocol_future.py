from __future__ import annotations

from collections.abc import Sequence

import pytest
from protocol_batches import sample

from rollcast.errors import DataProtoError
from rollcast.protocol import DataProto, DataProtoFuture


class Store:
    """Values by reference, and what was asked of it."""

    def __init__(self, values: dict[str, object]) -> None:
        self.values = values
        self.fetched: list[tuple[tuple[object, ...], float | None]] = []

    def fetch(self, refs: Sequence[object], timeout: float | None) -> list[object]:
        self.fetched.append((tuple(refs), timeout))
        if timeout == 0:
            raise TimeoutError("not yet")
        return [self.values[str(ref)] for ref in refs]

    def ready(self, refs: Sequence[object]) -> bool:
        return all(ref in self.values for ref in refs)


def store(rows: int = 4) -> Store:
    parts = sample(rows).chunk(2)
    return Store({"a": parts[0], "b": parts[1]})


def test_get_waits_once_and_a_timeout_can_be_repeated() -> None:
    values = store()
    future = DataProtoFuture(["a", "b"], values.fetch)
    with pytest.raises(TimeoutError):
        future.get(timeout=0)
    found = future.get(timeout=5)
    assert found.equal(sample(4))
    assert future.get() is found
    assert values.fetched == [(("a", "b"), 0), (("a", "b"), 5)]


def test_done_asks_the_runtime() -> None:
    values = store()
    assert DataProtoFuture(["a"], values.fetch, ready=values.ready).done()
    assert not DataProtoFuture(["a", "z"], values.fetch, ready=values.ready).done()
    silent = DataProtoFuture(["a"], values.fetch)
    with pytest.raises(DataProtoError, match="cannot tell"):
        silent.done()
    silent.get()
    assert silent.done()


def test_chunk_and_concat_move_nothing() -> None:
    values = store()
    future = DataProtoFuture(["a", "b"], values.fetch)
    parts = future.chunk(2)
    again = DataProtoFuture.concat(parts)
    assert again.refs == ("a", "b")
    assert values.fetched == []
    assert parts[1].get() is values.values["b"]
    assert again.get().equal(sample(4))


def test_concat_collects_each_future_in_its_own_way() -> None:
    values = store()

    def unpad(shards: list[object]) -> object:
        return DataProto.concat(shards).unpad(1)  # type: ignore[arg-type]

    padded = DataProtoFuture(["a", "b"], values.fetch, unpad)
    joined = DataProtoFuture.concat([padded, DataProtoFuture(["b"], values.fetch)])
    assert joined.get()["uid"].tolist() == ["u0", "u1", "u2", "u2", "u3"]
    with pytest.raises(DataProtoError, match="not parts of its result"):
        padded.chunk(2)


def test_errors() -> None:
    values = store()
    future = DataProtoFuture(["a", "b"], values.fetch)
    with pytest.raises(DataProtoError, match="2 shards can be cut in 2 chunks, not in 3"):
        future.chunk(3)
    with pytest.raises(DataProtoError, match="empty"):
        DataProtoFuture.concat([])
    with pytest.raises(DataProtoError, match="different ways"):
        DataProtoFuture.concat([future, DataProtoFuture(["a"], store().fetch)])
    with pytest.raises(DataProtoError, match="2 shards were fetched but 1 values"):
        DataProtoFuture(["a", "b"], lambda refs, timeout: [1]).get()
