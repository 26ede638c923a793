"""Split a call's DataProtos into equal shards, and join what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollcast.controller.dispatch import RankCall
from rollcast.errors import DispatchError
from rollcast.protocol import DataProto

__all__ = ["Padding", "join_shards", "split_call"]


@dataclass(frozen=True)
class Padding:
    """Rows of the call before padding, and the rows that were added at its end."""

    rows: int
    added: int


def split_call(
    mode: str, shards: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[RankCall], Padding]:
    """One call a shard: each DataProto is split, every other value goes to all shards as it is.

    Rows that do not divide are padded with repeated rows; the caller's batch is not touched. An
    empty batch goes to every shard empty.

    Raises:
        DispatchError: no argument is a DataProto, or their lengths differ.
    """
    lengths = {f"argument {i}": len(value) for i, value in enumerate(args) if isinstance(value, DataProto)}
    lengths |= {f"argument {key!r}": len(value) for key, value in kwargs.items() if isinstance(value, DataProto)}
    if not lengths:
        types = ", ".join(type(value).__name__ for value in (*args, *kwargs.values())) or "no argument"
        raise DispatchError(
            f"{mode} splits DataProto arguments, but the call has none (it has: {types}); "
            "use Dispatch.ONE_TO_ALL for values that every rank should get"
        )
    if len(set(lengths.values())) > 1:
        raise DispatchError(f"{mode}: the DataProto arguments differ in length: {lengths}")
    rows = next(iter(lengths.values()))
    added = -rows % shards if rows else 0

    def split(value: Any) -> list[Any]:
        if not isinstance(value, DataProto):
            return [value] * shards
        if not rows:
            return [value] * shards
        padded = value.pad_to_divisor(shards)[0] if added else value
        return padded.chunk(shards)

    by_arg = [split(value) for value in args]
    by_key = {key: split(value) for key, value in kwargs.items()}
    calls = [
        RankCall(tuple(values[i] for values in by_arg), {key: values[i] for key, values in by_key.items()})
        for i in range(shards)
    ]
    return calls, Padding(rows, added)


def join_shards(mode: str, outputs: Sequence[Any], padding: Padding) -> Any:
    """Outputs of the shards, in shard order, as one result without the padding.

    DataProtos are concatenated, and so are lists; None from every shard is None. Any number of rows may
    come back, unless the call was padded.

    Raises:
        DispatchError: the outputs are of different or other kinds; or the call was padded and a shard
            gave back another number of rows than it got.
    """
    if all(output is None for output in outputs):
        return None
    if all(isinstance(output, DataProto) for output in outputs):
        _check_padded(mode, outputs, padding)
        joined = DataProto.concat(list(outputs))
        return joined.slice(0, padding.rows) if padding.added else joined
    if all(isinstance(output, list) for output in outputs):
        _check_padded(mode, outputs, padding)
        rows = [row for output in outputs for row in output]
        return rows[: padding.rows] if padding.added else rows
    kinds = ", ".join(sorted({type(output).__name__ for output in outputs}))
    raise DispatchError(f"{mode} joins DataProtos or lists, the workers returned {kinds}")


def _check_padded(mode: str, outputs: Sequence[Any], padding: Padding) -> None:
    shards, sent = len(outputs), padding.rows + padding.added
    if padding.added and any(len(output) * shards != sent for output in outputs):
        raise DispatchError(
            f"{mode}: {padding.rows} rows were padded to {sent}, {sent // shards} for each of {shards} shards, which "
            f"returned {[len(output) for output in outputs]}: what came of the padding cannot be told. Return a row "
            f"for each row, or call with a number of rows that {shards} divides"
        )
