"""Shards of a call: splitting and joining of batches, the shard of each rank, and the rank that answers for a shard."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollcast.contracts.dispatch import (
    BatchType,
    Calls,
    DispatchMode,
    DispatchTarget,
    Expected,
    RankCall,
    RankOutputs,
    find_batch_type,
)
from rollcast.errors import DispatchError
from rollcast.protocol import DataProto

__all__ = [
    "BatchesOverMesh",
    "Layout",
    "OverMesh",
    "Padding",
    "check_batches",
    "expect_rows",
    "flat_layout",
    "is_batch",
    "join_shards",
    "make_calls",
    "mesh_layout",
    "split_call",
    "split_lists",
    "wrong_kinds",
]


@dataclass(frozen=True)
class Layout:
    """An assignment of shards to the ranks of a group.

    Attributes:
        shard_of_rank: index of each rank's shard, by rank.
        answering: rank whose output is used, by shard.
    """

    shard_of_rank: tuple[int, ...]
    answering: tuple[int, ...]

    @property
    def shards(self) -> int:
        """Number of shards."""
        return len(self.answering)

    def spread(self, calls: Sequence[RankCall]) -> list[RankCall]:
        """Convert calls by shard to calls by rank; the ranks of a shard share one call object."""
        return [calls[shard] for shard in self.shard_of_rank]

    def answers(self, outputs: RankOutputs) -> list[Any]:
        """Select the output of each shard from the outputs of the ranks."""
        by_rank = dict(zip(outputs.ranks, outputs, strict=True))
        return [by_rank[rank] for rank in self.answering]


def flat_layout(ranks: int) -> Layout:
    """Return a layout with one shard per rank."""
    return Layout(tuple(range(ranks)), tuple(range(ranks)))


def mesh_layout(worker_group: DispatchTarget, mesh_name: str) -> Layout:
    """Return a layout with one shard per data-parallel rank of a mesh; the collecting rank answers for the shard.

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


@dataclass(frozen=True)
class Padding:
    """The number of rows of a call before padding, and the number of rows appended."""

    rows: int
    added: int


def is_batch(value: Any) -> bool:
    """Return True if ``value`` has rows to split."""
    return isinstance(value, DataProto)


def check_batches(
    mode: str, args: Sequence[Any], kwargs: Mapping[str, Any], foreign: Mapping[int, BatchType | None] | None = None
) -> int:
    """Check that a call's batches have equal lengths, and return the number of rows.

    Args:
        mode: name of the dispatch mode, for messages.
        args, kwargs: arguments of the call.
        foreign: batch types of arguments of other frameworks, by the ``id`` of the argument.

    Raises:
        DispatchError: no argument is a batch, or their lengths differ.
    """
    named = {f"argument {i}": value for i, value in enumerate(args)}
    named |= {f"argument {key!r}": value for key, value in kwargs.items()}
    lengths = {label: len(value) for label, value in named.items() if is_batch(value)}
    for label, value in named.items():
        if (kind := (foreign or {}).get(id(value))) is not None:
            lengths[label] = kind.length(value)
    if not lengths:
        types = ", ".join(type(value).__name__ for value in (*args, *kwargs.values())) or "no argument"
        raise DispatchError(
            f"{mode} splits DataProto arguments, but the call has none (it has: {types}); "
            "use Dispatch.ONE_TO_ALL for values that every rank should get"
        )
    if len(set(lengths.values())) > 1:
        raise DispatchError(f"{mode}: the DataProto arguments differ in length: {lengths}")
    return next(iter(lengths.values()))


def make_calls(shards: int, by_arg: Sequence[Sequence[Any]], by_key: Mapping[str, Sequence[Any]]) -> list[RankCall]:
    """Build one call per shard from each argument's values by shard."""
    return [
        RankCall(tuple(values[i] for values in by_arg), {key: values[i] for key, values in by_key.items()})
        for i in range(shards)
    ]


def split_call(
    mode: str, shards: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[RankCall], Padding]:
    """Build one call per shard: split each batch, and send every other value unchanged to all shards.

    If the number of shards does not divide the rows, repeated rows are appended; the caller's batch is not changed. All
    shards of an empty batch are empty.

    Raises:
        DispatchError: no argument is a batch, or their lengths differ.
    """
    foreign = {id(value): find_batch_type(value) for value in (*args, *kwargs.values()) if not is_batch(value)}
    rows = check_batches(mode, args, kwargs, foreign)
    added = -rows % shards

    def split(value: Any) -> Sequence[Any]:
        kind = foreign.get(id(value))
        if kind is not None and rows:
            numbers = [*range(rows), *[rows - 1] * added]
            size = len(numbers) // shards
            return [kind.take(value, numbers[start : start + size]) for start in range(0, len(numbers), size)]
        if not is_batch(value) or not rows:
            return [value] * shards
        padded = value.pad_to_divisor(shards)[0] if added else value
        chunks: Sequence[Any] = padded.chunk(shards)
        return chunks

    calls = make_calls(shards, [split(value) for value in args], {key: split(value) for key, value in kwargs.items()})
    return calls, Padding(rows, added)


def expect_rows(calls: Calls, answering: Sequence[int], per_rank: int | Sequence[int]) -> Expected:
    """Return the layout of the joined result if each rank returns one row per input row."""
    rows = []
    for rank in answering:
        call = calls.per_rank[rank]
        values = (*call.args, *call.kwargs.values()) if call is not None else ()
        rows.append(next((len(value) for value in values if is_batch(value)), 0))
    return Expected(tuple(answering), tuple(rows), per_rank)


def split_lists(mode: str, shards: int, unit: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[RankCall]:
    """Build one call per shard from arguments that are lists or tuples with one value per shard.

    Args:
        unit: name of a shard in errors, such as ``ranks``.

    Raises:
        DispatchError: an argument is not a list or tuple, or has a different number of values.
    """
    named = [(f"argument {i}", value) for i, value in enumerate(args)]
    named += [(f"argument {key!r}", value) for key, value in kwargs.items()]
    for label, value in named:
        if not isinstance(value, list | tuple) or len(value) != shards:
            number = f" of {len(value)} values" if isinstance(value, list | tuple) else ""
            raise DispatchError(
                f"{mode}: {label} must be a list or tuple with one value for each of the {shards} {unit}, got "
                f"a {type(value).__name__}{number}; use Dispatch.ONE_TO_ALL to give every rank the same value"
            )
    return make_calls(shards, args, kwargs)


def join_shards(mode: str, outputs: Sequence[Any], padding: Padding) -> Any:
    """Join the outputs of the shards, in shard order, and remove the padding.

    Batches and lists are concatenated; None from every shard is None. Unless the call was padded, shards may return any
    number of rows.

    Raises:
        DispatchError: the outputs have different or unsupported types, or the call was padded and a shard returned a
            different number of rows than it received.
    """
    if all(output is None for output in outputs):
        return None
    if all(is_batch(output) for output in outputs):
        _check_padded(mode, outputs, padding)
        joined = DataProto.concat(list(outputs))
        return joined.slice(0, padding.rows) if padding.added else joined
    if all(isinstance(output, list) for output in outputs):
        _check_padded(mode, outputs, padding)
        rows = [row for output in outputs for row in output]
        return rows[: padding.rows] if padding.added else rows
    kind = find_batch_type(outputs[0])
    if kind is not None and all(isinstance(output, kind.kind) for output in outputs):
        _check_padded(mode, outputs, padding, kind.length)
        merged = kind.concat(outputs)
        return kind.take(merged, range(padding.rows)) if padding.added else merged
    raise wrong_kinds(mode, outputs)


def wrong_kinds(mode: str, outputs: Sequence[Any]) -> DispatchError:
    """Build the error for outputs that cannot be joined."""
    kinds = ", ".join(sorted({type(output).__name__ for output in outputs}))
    return DispatchError(f"{mode} joins DataProtos or lists, the workers returned {kinds}")


def _check_padded(mode: str, outputs: Sequence[Any], padding: Padding, length: Callable[[Any], int] = len) -> None:
    shards, sent = len(outputs), padding.rows + padding.added
    if padding.added and any(length(output) * shards != sent for output in outputs):
        raise DispatchError(
            f"{mode}: {padding.rows} rows were padded to {sent}, {sent // shards} for each of {shards} shards, which "
            f"returned {[length(output) for output in outputs]}: padding cannot be told from rows. Return a row "
            f"for each row, or call with a number of rows that {shards} divides"
        )


class OverMesh(DispatchMode):
    """Base class of dispatch modes over the ranks of a named mesh.

    Args:
        mesh_name: name of the mesh, as passed to ``register_mesh``.
    """

    def __init__(self, mesh_name: str = "default") -> None:
        self.mesh_name = mesh_name

    def _label(self) -> str:
        return f"{self.name}({self.mesh_name!r})"


class BatchesOverMesh(OverMesh):
    """Base class of dispatch modes that split batches over a layout of the mesh and join the shards' outputs."""

    @abstractmethod
    def _layout(self, worker_group: DispatchTarget) -> Layout: ...

    def dispatch(self, worker_group: DispatchTarget, *args: Any, **kwargs: Any) -> Calls:
        layout = self._layout(worker_group)
        calls, padding = split_call(self._label(), layout.shards, args, kwargs)
        return Calls(layout.spread(calls), (layout, padding), layout.answering)

    def collect(self, worker_group: DispatchTarget, outputs: RankOutputs) -> Any:
        layout, padding = outputs.state
        return join_shards(self._label(), layout.answers(outputs), padding)

    def expect(self, worker_group: DispatchTarget, calls: Calls) -> Expected | None:
        layout, padding = calls.state
        return expect_rows(calls, layout.answering, padding.rows)
