"""Batches for the tests, by hypothesis and by hand."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from rollcast.protocol import DataProto

# The machines of a test run differ in speed; what is tested here is not time.
law = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])

DTYPES = [
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float32,
    torch.float16,
    torch.bfloat16,
]

inner_shapes: st.SearchStrategy[tuple[int, ...]] = st.sampled_from([(), (3,), (2, 2), (0,)])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def numbered(total: int, dtype: torch.dtype) -> torch.Tensor:
    """``total`` values, neighbours of which differ."""
    return torch.arange(total).remainder(101 if dtype != torch.bool else 2).to(dtype)


def jagged(lengths: list[int], dtype: torch.dtype = torch.int64, *, inner: int = 0) -> torch.Tensor:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    values = numbered(sum(lengths) * max(inner, 1), dtype)
    if inner:
        values = values.reshape(-1, inner)
    return torch.nested.nested_tensor_from_jagged(values, offsets)


@st.composite
def batches(draw: st.DrawFn, max_rows: int = 9, min_columns: int = 0) -> DataProto:
    rows = draw(st.integers(0, max_rows))
    kinds = draw(st.lists(st.sampled_from(["dense", "jagged", "object"]), min_size=min_columns, max_size=4))
    data: dict[str, Any] = {}
    for number, kind in enumerate(kinds):
        dtype = draw(st.sampled_from(DTYPES))
        if kind == "dense":
            inner: tuple[int, ...] = draw(inner_shapes)
            width = int(torch.tensor(inner).prod()) if inner else 1
            value: Any = numbered(rows * width, dtype).reshape(rows, *inner)
            flipped: bool = draw(st.booleans())
            if inner and flipped:
                value = value.transpose(0, -1).contiguous().transpose(0, -1)
        elif kind == "jagged":
            lengths = draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows))
            value = jagged(lengths, dtype, inner=draw(st.sampled_from([0, 2])))
        else:
            value = draw(st.lists(json_values, min_size=rows, max_size=rows))
        data[f"{kind}{number}"] = value
    meta = draw(st.dictionaries(st.text(max_size=3), json_values, max_size=2))
    return DataProto(data, meta_info=meta, length=rows)


def sample(rows: int = 4) -> DataProto:
    """One column of each kind, and a meta dict with a container in it."""
    return DataProto.from_dict(
        tensors={
            "ids": torch.arange(rows * 3).reshape(rows, 3),
            "ragged": jagged([i % 3 for i in range(rows)], torch.float32),
        },
        non_tensors={"uid": [f"u{i}" for i in range(rows)]},
        meta_info={"steps": [1, 2], "temperature": 1.0},
    )


def snapshot(dp: DataProto) -> dict[str, Any]:
    """Everything of a DataProto as plain Python values, independent of its own ``equal``."""
    found: dict[str, Any] = {}
    for key in dp.keys():  # noqa: SIM118
        column = dp[key]
        if isinstance(column, torch.Tensor) and column.is_nested:
            found[key] = ("jagged", column.dtype, [row.tolist() for row in column.unbind()])
        elif isinstance(column, torch.Tensor):
            found[key] = ("dense", column.dtype, column.tolist())
        else:
            found[key] = ("object", object, [repr(item) for item in column])
    return {"rows": len(dp), "columns": found, "order": dp.keys(), "meta": repr(dp.meta_info)}


def rows_of(dp: DataProto) -> list[tuple[Any, ...]]:
    """The rows as tuples of plain values, column by column."""
    columns = [values for _, _, values in snapshot(dp)["columns"].values()]
    return list(zip(*columns, strict=True)) if columns else [()] * len(dp)
