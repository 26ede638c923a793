"""Sample DataProtos with columns of every kind, and a description of the difference between two."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from rollcast.protocol import DataProto

__all__ = ["batches", "find_difference", "sample_batch"]

_DTYPES = (torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.bfloat16)
_OBJECTS = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.lists(st.integers(), max_size=2)


def sample_batch(rows: int) -> DataProto:
    """Return a batch of ``rows`` rows with a column of each kind; the column ``row`` has the row numbers."""
    lengths = torch.arange(rows) % 3
    return DataProto.from_dict(
        {
            "row": torch.arange(rows),
            "dense": torch.arange(2.0 * rows).reshape(rows, 2) / 7,
            "ragged": _ragged(lengths, torch.int64),
        },
        {"uid": [f"u{row}" for row in range(rows)], "info": [{"row": [row]} for row in range(rows)]},
        {"temperature": 0.7, "stop": ["a", {"b": 1}]},
    )


def _ragged(lengths: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    values = torch.arange(int(lengths.sum())).remainder(97).to(dtype)
    return torch.nested.nested_tensor_from_jagged(values, offsets)


@st.composite
def batches(draw: st.DrawFn, max_rows: int = 11) -> DataProto:
    """Draw a batch with row numbers (``row``) and random columns of other kinds and dtypes."""
    rows = draw(st.integers(0, max_rows))
    columns: dict[str, Any] = {"row": torch.arange(rows)}
    for number, dtype in enumerate(draw(st.lists(st.sampled_from(_DTYPES), max_size=2))):
        shape = draw(st.sampled_from([(), (3,), (2, 2), (0,)]))
        values = torch.arange(rows * torch.Size(shape).numel()).remainder(97).to(dtype)
        columns[f"dense{number}"] = values.reshape(rows, *shape)
    for number, dtype in enumerate(draw(st.lists(st.sampled_from(_DTYPES), max_size=2))):
        lengths = draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows))
        columns[f"ragged{number}"] = _ragged(torch.tensor(lengths, dtype=torch.int64), dtype)
    objects: dict[str, Any] = {}
    if draw(st.booleans()):
        objects["objects"] = draw(st.lists(_OBJECTS, min_size=rows, max_size=rows))
    meta = draw(st.dictionaries(st.text(max_size=3), _OBJECTS, max_size=2))
    return DataProto.from_dict(columns, objects, meta)


def find_difference(actual: Any, wanted: Any) -> str | None:
    """Describe the difference between two DataProtos, lists of them or other values; None if they are equal."""
    if isinstance(wanted, list | tuple):
        if not isinstance(actual, list | tuple) or len(actual) != len(wanted):
            got = f"{len(actual)} values" if isinstance(actual, list | tuple) else f"a {type(actual).__name__}"
            return f"{len(wanted)} values are expected, not {got}"
        differences = (find_difference(one, other) for one, other in zip(actual, wanted, strict=True))
        return next((f"value {i}: {text}" for i, text in enumerate(differences) if text is not None), None)
    if not isinstance(wanted, DataProto):
        return None if actual == wanted else f"{wanted!r} is expected, not {actual!r}"
    if not isinstance(actual, DataProto):
        return f"a DataProto is expected, not a {type(actual).__name__}"
    if len(actual) != len(wanted):
        return f"{len(wanted)} rows are expected, not {len(actual)}"
    if sorted(actual.keys()) != sorted(wanted.keys()):
        return f"the columns are {sorted(actual.keys())}, not {sorted(wanted.keys())}"
    for key in wanted.keys():  # noqa: SIM118  # a DataProto iterates over its rows
        if not actual.select([key], []).equal(wanted.select([key], [])):
            return f"column {key!r} is {actual[key]}, not {wanted[key]}"
    return None if actual.equal(wanted) else f"meta_info is {actual.meta_info}, not {wanted.meta_info}"
