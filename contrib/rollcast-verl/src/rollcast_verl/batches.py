"""Conversion of verl's DataProto and TensorDict to rollcast's DataProto and back.

Tensor columns share their storage; numeric NumPy columns become tensor columns. What rollcast's batch has no place for
(class of the batch, NumPy columns, layout of jagged columns, metadata of each rank) is kept under the meta key ``verl``
while a batch is on its way between a group and its workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensordict
import torch
import verl

from rollcast import DataProto
from rollcast.errors import DataProtoError
from rollcast.protocol import meta_rules

__all__ = ["from_verl", "is_convertible", "join_entries", "to_verl"]

#: Meta key of the entries of :class:`_Entry`, one per rank that contributed rows.
_KEY = "verl"
_NUMERIC = "biufc"


@dataclass(frozen=True)
class _Entry:
    """The part of a batch of verl that has no place in rollcast's.

    Attributes:
        rank: rank that returned the batch; -1 for the controller.
        kind: ``DataProto`` or ``TensorDict``.
        meta: verl's ``meta_info``, or the values of a TensorDict that belong to the whole batch.
        arrays: name and dtype of each NumPy column that is not an object column.
        ragged: jagged columns whose ragged dimension is not 1, with this dimension.
        is_single: True for a TensorDict without rows.
        has_tensors: False for a DataProto whose ``batch`` is None.
    """

    rank: int
    kind: str
    meta: Mapping[str, Any]
    arrays: Mapping[str, str]
    ragged: Mapping[str, int]
    is_single: bool = False
    has_tensors: bool = True


def join_entries(values: Sequence[Sequence[_Entry]]) -> list[_Entry]:
    """Join the entries of several batches; this is the rule of the meta key ``verl``."""
    return [entry for entries in values for entry in entries]


def is_convertible(value: object) -> bool:
    """Return True if ``value`` is a DataProto of verl or a TensorDict."""
    return isinstance(value, verl.DataProto | tensordict.TensorDict)


def from_verl(batch: Any, rank: int | None = None) -> DataProto:
    """Convert a DataProto of verl or a TensorDict; tensors are shared.

    Args:
        batch: batch of verl.
        rank: rank that the batch comes from, to keep everything that :func:`to_verl` needs for an equal batch; None
            for a batch that only code of rollcast reads, whose ``meta_info`` is verl's.

    Raises:
        DataProtoError: a column cannot be converted.
    """
    columns, entry = _from_dataproto(batch) if isinstance(batch, verl.DataProto) else _from_tensordict(batch)
    length = 0 if entry.is_single else len(batch)
    meta = dict(entry.meta) if rank is None else {_KEY: [replace(entry, rank=rank)]}
    return DataProto(columns, None, meta, length=length if not columns else None)


def to_verl(batch: DataProto) -> Any:
    """Convert a batch to verl's DataProto, or to the TensorDict that it was made from; tensors are shared.

    The metadata of several ranks are joined as ``verl.DataProto.concat`` does: ``metrics`` become lists, other values
    have to be equal.

    Raises:
        DataProtoError: ranks returned different values for a key of the metadata.
    """
    local = batch.local()
    plain = _Entry(-1, "DataProto", {k: v for k, v in local.meta_info.items() if k != _KEY}, {}, {})
    entries: list[_Entry] = local.meta_info.get(_KEY, [plain])
    first = entries[0]
    columns = {name: _restored(local[name], name, first) for name in local.keys()}  # noqa: SIM118  # columns, not rows
    if first.kind == "TensorDict":
        return _to_tensordict(len(local), columns, first)
    tensors = {name: column for name, column in columns.items() if isinstance(column, torch.Tensor)}
    others = {name: column for name, column in columns.items() if name not in tensors}
    tensor_dict = tensordict.TensorDict(tensors, batch_size=[len(local)]) if tensors or first.has_tensors else None
    return verl.DataProto(batch=tensor_dict, non_tensor_batch=others, meta_info=_joined(entries))


def _from_dataproto(batch: Any) -> tuple[dict[str, Any], _Entry]:
    columns = dict(batch.batch.items()) if batch.batch is not None else {}
    arrays = {}
    for name, column in batch.non_tensor_batch.items():
        if column.dtype != object:
            arrays[name] = column.dtype.str
        columns[name] = column if column.dtype.kind in _NUMERIC else list(column)
    columns, ragged = _canonical(columns)
    entry = _Entry(-1, "DataProto", batch.meta_info, arrays, ragged, has_tensors=batch.batch is not None)
    return columns, entry


def _from_tensordict(batch: Any) -> tuple[dict[str, Any], _Entry]:
    columns: dict[str, Any] = {}
    meta: dict[str, Any] = {}
    for name in batch.keys():  # noqa: SIM118  # a TensorDict iterates over its rows
        value = batch.get(name)
        if isinstance(value, tensordict.NonTensorData):
            meta[name] = value.data
        elif isinstance(value, tensordict.NonTensorStack):
            columns[name] = [item.data if isinstance(item, tensordict.NonTensorData) else item for item in value]
        elif isinstance(value, torch.Tensor):
            columns[name] = value
        else:
            raise DataProtoError(f"key {name!r} of the TensorDict is a {type(value).__name__}; flatten_keys() first")
    columns, ragged = _canonical(columns)
    return columns, _Entry(-1, "TensorDict", meta, {}, ragged, is_single=not batch.batch_dims)


def _canonical(columns: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """Move the ragged dimension of jagged columns to 1, as rollcast stores them; return it for each moved column."""
    columns_by_name, ragged = dict(columns), {}
    for name, column in columns.items():
        if not isinstance(column, torch.Tensor) or not column.is_nested:
            continue
        nested: Any = column
        dim = int(nested._ragged_idx)
        if dim != 1:
            values = nested.values().movedim(dim - 1, 0).contiguous()
            columns_by_name[name] = torch.nested.nested_tensor_from_jagged(values, nested.offsets())
            ragged[name] = dim
    return columns_by_name, ragged


def _restored(column: Any, name: str, entry: _Entry) -> Any:
    if name in entry.ragged:
        dim = entry.ragged[name]
        values = column.values().movedim(0, dim - 1).contiguous()
        return torch.nested.nested_tensor_from_jagged(values, column.offsets(), jagged_dim=dim)
    if isinstance(column, torch.Tensor):
        return column.numpy() if name in entry.arrays else column
    if name in entry.arrays:
        return np.array(column.tolist(), dtype=entry.arrays[name])
    return column.copy()  # rollcast's are read-only


def _to_tensordict(length: int, columns: Mapping[str, Any], entry: _Entry) -> Any:
    entry_dict = tensordict.TensorDict({}, batch_size=[] if entry.is_single else [length])
    for name, column in columns.items():
        entry_dict[name] = column if isinstance(column, torch.Tensor) else _stack(column)
    for name, value in entry.meta.items():
        entry_dict[name] = tensordict.NonTensorData(value)
    return entry_dict


def _stack(column: np.ndarray) -> Any:
    items: list[Any] = [tensordict.NonTensorData(item) for item in column]
    return tensordict.NonTensorStack.from_list(items)


def _joined(entries: Sequence[_Entry]) -> dict[str, Any]:
    """Join the metadata of ranks as verl does."""
    if len(entries) == 1:
        return dict(entries[0].meta)
    meta: dict[str, Any] = {}
    metrics: list[Any] = []
    for entry in entries:
        for name, value in entry.meta.items():
            if name == "metrics":
                metrics += value if isinstance(value, list) else [] if value is None else [value]
            elif name in meta and not _equal(meta[name], value):
                raise DataProtoError(
                    f"ranks {entries[0].rank} and {entry.rank} returned different values for meta_info key {name!r}: "
                    f"{meta[name]!r:.80} and {value!r:.80}; return them as metrics, or as a column"
                )
            else:
                meta[name] = value
    if metrics:
        meta["metrics"] = {
            name: [row[name] for row in metrics if name in row]
            for name in dict.fromkeys(name for row in metrics for name in row)
        }
    return meta


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(np.all(one == other))
    except (TypeError, ValueError, RuntimeError):
        return False


def install_meta_rule() -> None:
    """Let rollcast join batches of verl; called by :mod:`rollcast_verl.hook`."""
    if meta_rules.find(_KEY) is None:
        meta_rules.register(_KEY, join_entries)
