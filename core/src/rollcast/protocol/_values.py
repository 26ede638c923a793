"""Copying and comparing of Python values: meta entries and the objects in object columns."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rollcast.errors import DataProtoError
from rollcast.protocol._meta import MetaRules


def copy_value(value: Any) -> Any:
    """Copy dicts, lists, sets and tuples, including nested ones; share everything else.

    A deep copy would also copy tensors and clients in a meta dict; after a shallow copy, an ``append`` to a list
    in one batch would appear in another.
    """
    kind = type(value)
    if kind is dict:
        return {key: copy_value(item) for key, item in value.items()}
    if kind is list:
        return [copy_value(item) for item in value]
    if kind is tuple:
        return tuple(copy_value(item) for item in value)
    if kind is set:
        return set(value)
    return value


def copy_meta(meta: Mapping[str, Any] | None) -> dict[str, Any]:
    """Copy a meta dict including its containers; return an empty dict for ``None``.

    Raises:
        DataProtoError: a container contains itself; names the key.
    """
    copied: dict[str, Any] = {}
    for key, item in (meta or {}).items():
        try:
            copied[key] = copy_value(item)
        except RecursionError:
            raise endless(f"meta_info key {key!r}", item) from None
    return copied


def endless(where: str, value: Any) -> DataProtoError:
    """Build the error for a value whose nesting exceeds Python's recursion limit."""
    return DataProtoError(
        f"{where} holds a {type(value).__name__} that contains itself or is nested more than"
        f" {sys.getrecursionlimit()} levels deep; a batch takes values that end: break the cycle, or send an id instead"
    )


def same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return True if two dense tensors agree in dtype, shape and values; NaN equals NaN."""
    if left is right:
        return True
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if right.device != left.device:
        right = right.to(left.device)
    if torch.equal(left, right):
        return True
    if not (left.is_floating_point() or left.is_complex()):
        return False
    return bool(((left == right) | ((left != left) & (right != right))).all())


def _same_array(left: np.ndarray, right: np.ndarray) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.dtype == object:
        pairs = zip(left.ravel().tolist(), right.ravel().tolist(), strict=True)
        return all(_same(a, b) for a, b in pairs)
    return bool(np.array_equal(left, right, equal_nan=left.dtype.kind in "fc"))


def same_value(left: Any, right: Any) -> bool:
    """Return True if two values are equal, including nested arrays, tensors and NaN.

    Raises:
        DataProtoError: both values contain themselves, so that the comparison would not end.
    """
    try:
        return _same(left, right)
    except RecursionError:
        raise endless("a comparison", left) from None


def _same(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        both = isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)
        return both and same_tensor(left, right)
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        both = isinstance(left, np.ndarray) and isinstance(right, np.ndarray)
        return both and _same_array(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)) and type(left) is type(right):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, float) and isinstance(right, float) and left != left:
        return right != right
    return bool(left == right)


def merge_meta(
    metas: Sequence[Mapping[str, Any]], operation: str, *, overwrite: bool = False, rules: MetaRules | None = None
) -> dict[str, Any]:
    """Merge meta dicts into one.

    Args:
        metas: meta dicts in the order of their batches.
        operation: name of the operation, for messages.
        overwrite: True to keep the last value of a key.
        rules: rules for merging differing values of a key.

    Raises:
        DataProtoError: a key has different values and no rule, and ``overwrite`` is False.
    """
    merged: dict[str, Any] = {}
    differing: dict[str, None] = {}
    for meta in metas:
        for key, item in meta.items():
            if key in merged and not overwrite and not same_value(merged[key], item):
                if rules is None or rules.find(key) is None:
                    raise DataProtoError(
                        f"{operation}: meta_info key {key!r} is {merged[key]!r:.100} in one DataProto"
                        f" and {item!r:.100} in another; make them equal or delete the key first"
                        + ("" if rules is None else ", or give the key a rule: rollcast.protocol.meta_rules")
                    )
                differing[key] = None
                continue
            merged[key] = item
    for key in differing:
        rule = rules.find(key) if rules is not None else None
        if rule is not None:
            merged[key] = rule([meta[key] for meta in metas if key in meta])
    return copy_meta(merged)
