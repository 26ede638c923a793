"""TOKEN_BALANCED: shards of nearly equal numbers of tokens instead of rows in their order."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from rollcast.contracts.dispatch import Calls, DispatchMode, DispatchTarget, Expected, RankOutputs
from rollcast.errors import DispatchError
from rollcast_dispatch.balance import Shard, plan_shards
from rollcast_dispatch.sharding import (
    Layout,
    check_batches,
    concat_batches,
    expect_rows,
    flat_layout,
    is_batch,
    make_calls,
    mesh_layout,
    wrong_kinds,
)

__all__ = ["TokenBalanced", "make_token_balanced_dispatch_fn"]


#: Columns that tell lengths if none was chosen; the first of which all are there.
_LENGTH_KEYS: Final = (("attention_mask",), ("prompts", "responses"), ("input_ids",))


@dataclass(frozen=True)
class _State:
    layout: Layout
    shards: list[Shard]
    rows: int


class TokenBalanced(DispatchMode):
    """Rows go where they make the shards' numbers of tokens most equal; results come back in order.

    Rows are dealt out by Karmarkar and Karp's largest differencing method; where shards must have
    one size, rows of the heaviest and the lightest are then exchanged. In tokens the heaviest shard
    exceeds the mean by the longest row at most (or the heaviest group) and, with ``equal_size``, is
    never heavier than with DP_COMPUTE_PROTO. Where consecutive rows are as good, they stay in order
    and are sent as views. Of groups all this is said as far as no padding is needed.

    Workers return a row (of a DataProto or a list) for each row that they got, or all None. An
    empty batch goes to every shard empty.

    Args:
        mesh_name: the mesh whose data-parallel ranks get the shards; None for a shard a rank.
        length_key: the column that tells the rows' lengths: a mask ``[rows, tokens]``, of which the
            entries that are not 0 are counted; a jagged column, whose rows are measured; or
            integers ``[rows]``, which are the lengths. None, the default, is ``attention_mask`` where a batch has it,
            else the tokens of ``prompts`` and ``responses``, or those of ``input_ids``. Of several batches the first
            that has the column counts. Of a handle only these columns are fetched.
        group_key: a column whose equal values keep rows together on one shard, such as ``uid``.
        equal_size: give every shard the same number of rows, padded where rows or groups do not
            come out even: with copies of the shortest row; of another shard's shortest row if there
            are groups. What came of them is taken off. Without ``equal_size`` shards may differ in
            rows, and have none.
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
            joined = concat_batches(answers)
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
        each = [row_lengths(column, self._label(), key) for key, column in zip(keys, columns, strict=True)]
        lengths = [sum(row) for row in zip(*each, strict=True)]
        groups = None
        if self.group_key is not None:
            groups = _group(self._column(self.group_key, "group_key", args, kwargs), self._label(), self.group_key)
        return plan_shards(lengths, shards, groups, self.equal_size)

    def _length_keys(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the columns whose lengths add up to a row's.

        Raises:
            DispatchError: no key was chosen, and the batches have none of the usual columns.
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
    """The mode for ``@register(dispatch_mode=...)`` of methods that run on the mesh ``mesh_name``.

    The other arguments are those of :class:`TokenBalanced`.
    """
    return TokenBalanced(mesh_name, length_key=length_key, group_key=group_key, equal_size=equal_size)


def row_lengths(column: Any, mode: str, key: str) -> list[int]:
    """Tokens of each row, from a mask ``[rows, tokens]``, a jagged column or integers ``[rows]``.

    Raises:
        DispatchError: the column is of another kind, or a length is negative.
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
    found: list[int] = lengths.tolist()
    return found


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
    """For each row of the call its place among the joined rows of the shards."""
    places = [0] * rows
    start = 0
    for shard in shards:
        for offset, row in enumerate(shard.rows):
            places[row] = start + offset
        start += len(shard.rows) + len(shard.padding)
    return places
