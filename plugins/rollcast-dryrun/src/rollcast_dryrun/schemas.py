"""Properties of operations that their schemas have."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

__all__ = ["fills_by_shape", "is_view", "leaves_of", "map_leaves", "reads_shape_only", "written_arguments"]


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves of nested lists, tuples and dicts in order: all that the arguments of an operation consist of.

    torch's own function is for any tree, and slower; this one runs several times for each operation.
    """
    if isinstance(value, list | tuple):
        found: list[Any] = []
        for item in value:
            if isinstance(item, list | tuple | dict):
                found += leaves_of(item)
            else:
                found.append(item)
        return found
    return leaves_of(list(value.values())) if isinstance(value, dict) else [value]


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return nested lists, tuples and dicts with ``function`` of their leaves."""
    if isinstance(value, list | tuple):
        items = [map_leaves(function, item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: map_leaves(function, item) for key, item in value.items()}
    return function(value)


@cache
def is_view(func: Any) -> bool:
    """Return True if an operation returns its argument's memory and computes nothing."""
    returned = [value.alias_info for value in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)


@cache
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the positions and names of the arguments that an operation writes in place."""
    arguments = enumerate(func._schema.arguments)
    return tuple(
        (place, argument.name)
        for place, argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@cache
def reads_shape_only(func: Any) -> bool:
    """Return True for factories that take a tensor for its shape, dtype or device."""
    name: str = func._schema.name.rpartition("::")[2]
    return name.startswith("new_") or name.endswith("_like")


@cache
def fills_by_shape(func: Any) -> bool:
    """Return True for those of them whose values the shape decides, unlike uninitialized memory and random numbers."""
    name: str = func._schema.name.rpartition("::")[2]
    return reads_shape_only(func) and not ("empty" in name or "rand" in name)
