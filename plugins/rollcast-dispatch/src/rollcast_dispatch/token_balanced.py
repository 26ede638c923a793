"""TOKEN_BALANCED, a dispatch mode that balances the shards' numbers of tokens."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from rollcast.contracts.dispatch import Calls, DispatchMode, DispatchTarget, Expected, RankOutputs
from rollcast.errors import DispatchError
from rollcast.protocol import DataProto
from rollcast_dispatch.balance import Shard, plan_shards
from rollcast_dispatch.sharding import (
    Layout,
    check_batches,
    expect_rows,
    flat_layout,
    is_batch,
    make_calls,
    mesh_layout,
    wrong_kinds,
)

__all__ = ["ROW_TOKENS", "TokenBalanced", "make_token_balanced_dispatch_fn"]


#: Column of lengths for a caller that knows them or chooses them: equal ones leave consecutive rows together.
ROW_TOKENS: Final = "row_tokens"
#: Default columns from which lengths are read; the first entry whose columns all exist is used.
_LENGTH_KEYS: Final = ((ROW_TOKENS,), ("attention_mask",), ("prompts", "responses"), ("input_ids",))


@dataclass(frozen=True)
class _State:
    layout: Layout
    shards: list[Shard]
    rows: int


class TokenBalanced(DispatchMode):
    """Dispatch mode that assigns rows to shards with nearly equal numbers of tokens; results keep the row order.

    Rows are assigned by Karmarkar and Karp's largest differencing method. If shards must have equal sizes, rows of the
    heaviest and the lightest shard are then exchanged. The heaviest shard exceeds the mean number of tokens by at most
    the longest row (or the heaviest group) and, with ``equal_size``, is never heavier than with DP_COMPUTE_PROTO. If
    consecutive rows are equally balanced, they stay in order and are sent as views. With groups, these guarantees hold
    only if no padding is needed.

    Workers must return one row (of a DataProto or a list) per input row, or all None. All shards of an empty batch are
    empty.

    Args:
        mesh_name: mesh whose data-parallel ranks get the shards; None for one shard per rank.
        length_key: column from which the rows' lengths are read: a mask ``[rows, tokens]``, whose nonzero entries are
            counted; a jagged column, whose row lengths are used; or integers ``[rows]``, which are the lengths. None,
            the default, uses ``row_tokens`` or ``attention_mask`` if a batch has it, else the tokens of ``prompts`` and
            ``responses``, or of ``input_ids``. The first batch with the column is used. Of remote columns, only these
            are read.
        group_key: column whose equal values keep rows together on one shard, such as ``uid``.
        equal_size: True for the same number of rows in every shard. Missing rows are padded with copies of the shortest
            row, or of another shard's shortest row if there are groups; their results are removed. False allows shards
            of different sizes, including empty ones.
    """

    name = "token_balanced"

    def __init__(
        self,
        mesh_name: str | None = None,
        *,
        length_key: str | None = None,
        group_key: str | None = None,
        equal_size: bool = True,
    ) -> None:
        self.mesh_name = mesh_name
        self.length_key = length_key
        self.group_key = group_key
        self.equal_size = equal_size

    def _label(self) -> str:
        return self.name if self.mesh_name is None else f"{self.name}({self.mesh_name!r})"

    def dispatch(self, worker_group: DispatchTarget, *args: Any, **kwargs: Any) -> Calls:
        if self.mesh_name is None:
            layout = flat_layout(worker_group.world_size)
        else:
            layout = mesh_layout(worker_group, self.mesh_name)
        rows = check_batches(self._label(), args, kwargs)
        shards = self._plan(layout.shards, args, kwargs)

        def deal(value: Any) -> Sequence[Any]:
            return [_pick(value, shard) for shard in shards] if is_batch(value) and rows else [value] * layout.shards

        calls = make_calls(layout.shards, [deal(v) for v in args], {key: deal(v) for key, v in kwargs.items()})
        return Calls(layout.spread(calls), _State(layout, shards, rows), layout.answering)

    def collect(self, worker_group: DispatchTarget, outputs: RankOutputs) -> Any:
        state: _State = outputs.state
        answers = state.layout.answers(outputs)
        if all(answer is None for answer in answers):
            return None
        batches = all(is_batch(answer) for answer in answers)
        if not batches and not all(isinstance(answer, list) for answer in answers):
            raise wrong_kinds(self._label(), answers)
        sent = [len(shard.rows) + len(shard.padding) for shard in state.shards]
        got = [len(answer) for answer in answers]
        if got != sent:
            raise DispatchError(
                f"{self._label()}: the shards got {sent} rows and returned {got}: the order cannot be restored. "
                "Return a row for each row, or use Dispatch.DP_COMPUTE_PROTO or DP_COMPUTE_METRIC"
            )
        order = _where_rows_are(state.shards, state.rows)
        if batches:
            joined = DataProto.concat(answers)
            return joined.slice(0, state.rows) if order == list(range(state.rows)) else joined.select_idxs(order)
        values = [value for answer in answers for value in answer]
        return [values[position] for position in order]

    def expect(self, worker_group: DispatchTarget, calls: Calls) -> Expected | None:
        state: _State = calls.state
        order = _where_rows_are(state.shards, state.rows)
        return expect_rows(calls, state.layout.answering, state.rows if order == list(range(state.rows)) else order)

    def _plan(self, shards: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Shard]:
        keys = self._length_keys(args, kwargs)
        columns = [self._column(key, "length_key", args, kwargs) for key in keys]
        lengths_by_column = [row_lengths(column, self._label(), key) for key, column in zip(keys, columns, strict=True)]
        lengths = [sum(row) for row in zip(*lengths_by_column, strict=True)]
        groups = None
        if self.group_key is not None:
            groups = _group(self._column(self.group_key, "group_key", args, kwargs), self._label(), self.group_key)
        return plan_shards(lengths, shards, groups, self.equal_size)

    def _length_keys(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the columns whose lengths add up to a row's length.

        Raises:
            DispatchError: ``length_key`` is not set, and the batches have none of the default columns.
        """
        if self.length_key is not None:
            return (self.length_key,)
        names = {key for value in (*args, *kwargs.values()) if is_batch(value) for key in value.keys()}  # noqa: SIM118
        for keys in _LENGTH_KEYS:
            if names.issuperset(keys):
                return keys
        usual = ", ".join(" with ".join(keys) for keys in _LENGTH_KEYS)
        raise DispatchError(
            f"{self._label()} finds no column that tells rows' lengths: the call's batches have {sorted(names)}, and "
            f"none of {usual}; name one as length_key, or use Dispatch.DP_COMPUTE_PROTO"
        )

    def _column(self, key: str, option: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        batches = [value for value in (*args, *kwargs.values()) if is_batch(value)]
        for batch in batches:
            if key in batch.keys():  # noqa: SIM118  # a batch iterates over its rows
                return batch[key]
        columns = " and ".join(str(batch.keys()) for batch in batches)
        raise DispatchError(
            f"{self._label()} needs the column {key!r} ({option}), but the call's batches have {columns}; "
            f"add it, name another as {option}, or use Dispatch.DP_COMPUTE_PROTO"
        )


def make_token_balanced_dispatch_fn(
    mesh_name: str,
    *,
    length_key: str | None = None,
    group_key: str | None = None,
    equal_size: bool = True,
) -> TokenBalanced:
    """Return the dispatch mode for methods that run on the mesh ``mesh_name``, for ``@register``.

    The other arguments are those of :class:`TokenBalanced`.
    """
    return TokenBalanced(mesh_name, length_key=length_key, group_key=group_key, equal_size=equal_size)


def row_lengths(column: Any, mode: str, key: str) -> list[int]:
    """Return the tokens of each row, from a mask ``[rows, tokens]``, a jagged column or integers ``[rows]``.

    Raises:
        DispatchError: the column has another kind, or a length is negative.
    """
    if isinstance(column, torch.Tensor) and column.is_nested:
        lengths = column.offsets().diff()  # type: ignore[attr-defined]
    elif isinstance(column, torch.Tensor) and column.dim() == 2:
        lengths = column.count_nonzero(1)
    elif isinstance(column, torch.Tensor) and column.dim() == 1 and not column.is_floating_point():
        lengths = column.to(torch.int64)
        if bool((lengths < 0).any()):
            raise DispatchError(f"{mode}: column {key!r} has negative lengths, the least is {int(lengths.min())}")
    else:
        what = f"{column.dtype} {list(column.shape)}" if isinstance(column, torch.Tensor) else type(column).__name__
        raise DispatchError(
            f"{mode}: column {key!r} (length_key) tells no lengths: it must be a mask [rows, tokens], a jagged "
            f"column or integers [rows], and is {what}"
        )
    sizes: list[int] = lengths.tolist()
    return sizes


def _group(column: Any, mode: str, key: str) -> list[list[int]]:
    if isinstance(column, torch.Tensor) and (column.is_nested or column.dim() != 1):
        raise DispatchError(f"{mode}: column {key!r} (group_key) must have one value a row")
    groups: dict[Hashable, list[int]] = {}
    for row, value in enumerate(column.tolist()):
        try:
            groups.setdefault(value, []).append(row)
        except TypeError as error:
            raise DispatchError(
                f"{mode}: column {key!r} (group_key) has values that cannot be compared, such as a "
                f"{type(value).__name__} in row {row}: {error}"
            ) from error
    return list(groups.values())


def _pick(batch: Any, shard: Shard) -> Any:
    rows = shard.rows
    if rows and not shard.padding and rows[-1] - rows[0] + 1 == len(rows):
        return batch.slice(rows[0], rows[-1] + 1)
    return batch.select_idxs([*rows, *shard.padding])


def _where_rows_are(shards: Sequence[Shard], rows: int) -> list[int]:
    """Return the position of each row of the call among the concatenated rows of the shards."""
    places = [0] * rows
    start = 0
    for shard in shards:
        for offset, row in enumerate(shard.rows):
            places[row] = start + offset
        start += len(shard.rows) + len(shard.padding)
    return places
