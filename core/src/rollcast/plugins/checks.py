"""Checks of the objects in a group. A check returns None, or a complaint that completes the sentence "it …"."""

from __future__ import annotations

import inspect
from collections.abc import Callable

__all__ = ["Check", "any_of", "instance_of", "is_callable", "is_class", "subclass_of"]

Check = Callable[[object], str | None]
"""A function that returns None if a loaded object is valid, else a complaint such as ``is not a class``."""


def subclass_of(base: type) -> Check:
    """Return a check for concrete classes derived from ``base``.

    If ``base`` is a Protocol, a class with all its methods passes too. Data members are not checked, because they are
    often set only in ``__init__``.
    """

    def check(obj: object) -> str | None:
        if not isinstance(obj, type) or not (_is_protocol(base) or issubclass(obj, base)):
            return f"is {_describe(obj)}, not a subclass of {base.__qualname__}"
        lacks = (
            _missing_members(obj, base, methods_only=True) if base not in obj.__mro__ and _is_protocol(base) else None
        )
        missing = sorted(getattr(obj, "__abstractmethods__", ()))
        return lacks or (f"is abstract: it does not implement {', '.join(missing)}" if missing else None)

    return check


def instance_of(base: type) -> Check:
    """Return a check for instances of ``base``; if ``base`` is a Protocol, for objects with all of its members."""

    def check(obj: object) -> str | None:
        is_class = isinstance(obj, type) and not isinstance(obj, base)
        if _is_protocol(base) and not is_class:
            return _missing_members(obj, base, methods_only=False)
        return None if isinstance(obj, base) else f"is {_describe(obj)}, not an instance of {base.__qualname__}"

    return check


def is_callable(min_positional: int = 0, *, exact: bool = False) -> Check:
    """Return a check for callables that take at least ``min_positional`` positional arguments.

    Args:
        min_positional: number of positional arguments of a call.
        exact: the call has no other arguments, so that the callable may require none.
    """

    def check(obj: object) -> str | None:
        if not callable(obj):
            return f"is {_describe(obj)}, which cannot be called"
        try:
            parameters = inspect.signature(obj).parameters.values()
        except (TypeError, ValueError):
            return None  # builtins may have no signature; a wrong call fails later
        positional = [
            parameter
            for parameter in parameters
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        has_more = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
        if len(positional) < min_positional and not has_more:
            return f"takes {len(positional)} positional arguments, but is called with {min_positional}"
        keywords = [parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
        required = [
            parameter.name
            for parameter in (*positional[min_positional:], *keywords)
            if parameter.default is parameter.empty
        ]
        if exact and required:
            return f"requires the argument {required[0]!r}, but is called with {min_positional} positional ones alone"
        return None

    return check


def is_class(obj: object) -> str | None:
    """Check that the object is a class of any kind."""
    return None if isinstance(obj, type) else f"is {_describe(obj)}, not a class"


def any_of(*checks: Check) -> Check:
    """Return a check for objects that at least one of ``checks`` accepts."""

    def check(obj: object) -> str | None:
        complaints = [complaint for find_fault in checks if (complaint := find_fault(obj)) is not None]
        if len(complaints) < len(checks):
            return None
        return " and ".join(complaints) or "fits no check, because the group has none"

    return check


def _describe(obj: object) -> str:
    if isinstance(obj, type):
        return f"the class {obj.__qualname__}"
    if inspect.ismodule(obj):
        return f"the module {obj.__name__}"
    return (
        f"the function {obj.__qualname__}" if inspect.isroutine(obj) else f"an object of type {type(obj).__qualname__}"
    )


def _is_protocol(base: type) -> bool:
    return bool(getattr(base, "_is_protocol", False))


def _missing_members(obj: object, base: type, methods_only: bool) -> str | None:
    wanted: set[str] = set()
    for cls in base.__mro__:
        if _is_protocol(cls) and cls.__module__ != "typing":
            wanted |= {name for name, value in vars(cls).items() if inspect.isroutine(value)}
            if not methods_only:
                wanted |= {name for name, value in vars(cls).items() if isinstance(value, property)}
                wanted |= set(inspect.get_annotations(cls))
    missing = [n for n in sorted(wanted) if (not n.startswith("_") or n == "__call__") and not _has(obj, n)]
    return f"is {_describe(obj)}, which lacks {', '.join(missing)} of {base.__qualname__}" if missing else None


def _has(obj: object, name: str) -> bool:
    if isinstance(obj, type):  # hasattr would also find attributes of the metaclass, such as __call__
        return any(name in vars(cls) for cls in obj.__mro__)
    return hasattr(obj, name)
