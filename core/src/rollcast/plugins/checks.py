"""Checks of the objects in a group: each returns None, or a complaint that completes "it …"."""

from __future__ import annotations

import inspect
from collections.abc import Callable

Check = Callable[[object], str | None]
"""Looks at a loaded object; None if it fits, else a complaint such as ``is not a class``."""

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def subclass_of(base: type) -> Check:
    """A concrete class derived from ``base``.

    If ``base`` is a Protocol, a class that has all of its methods fits too: data members are
    often set only in ``__init__``, so they cannot be asked of a class.
    """

    def check(obj: object) -> str | None:
        if not isinstance(obj, type):
            return f"is {_describe(obj)}, not a subclass of {base.__qualname__}"
        complaint = _lacks(obj, base, methods_only=True)
        if complaint:
            return complaint
        missing = sorted(getattr(obj, "__abstractmethods__", ()))
        if missing:
            return f"is abstract: it does not implement {', '.join(missing)}"
        return None

    return check


def instance_of(base: type) -> Check:
    """An instance of ``base``; if ``base`` is a Protocol, an object with all of its members."""

    def check(obj: object) -> str | None:
        if isinstance(obj, type) and not isinstance(obj, base):
            return f"is {_describe(obj)}, not an instance of {base.__qualname__}"
        if _is_protocol(base):
            return _missing_members(obj, base, methods_only=False)
        if isinstance(obj, base):
            return None
        return f"is {_describe(obj)}, not an instance of {base.__qualname__}"

    return check


def is_callable(min_positional: int = 0) -> Check:
    """Something that can be called with at least ``min_positional`` positional arguments."""

    def check(obj: object) -> str | None:
        if not callable(obj):
            return f"is {_describe(obj)}, which cannot be called"
        try:
            parameters = inspect.signature(obj).parameters.values()
        except (TypeError, ValueError):
            return None  # builtins may have no signature; the call itself will tell
        if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
            return None
        count = sum(parameter.kind in _POSITIONAL for parameter in parameters)
        if count < min_positional:
            return f"takes {count} positional arguments, but is called with {min_positional}"
        return None

    return check


def any_of(*checks: Check) -> Check:
    """Whatever at least one of the checks accepts."""

    def check(obj: object) -> str | None:
        complaints = [complaint for each in checks if (complaint := each(obj)) is not None]
        if len(complaints) < len(checks):
            return None
        return " and ".join(complaints) or "fits no check, because the group has none"

    return check


def _describe(obj: object) -> str:
    if isinstance(obj, type):
        return f"the class {obj.__qualname__}"
    if inspect.ismodule(obj):
        return f"the module {obj.__name__}"
    if inspect.isroutine(obj):
        return f"the function {obj.__qualname__}"
    return f"an object of type {type(obj).__qualname__}"


def _is_protocol(base: type) -> bool:
    return bool(getattr(base, "_is_protocol", False))


def _lacks(obj: type, base: type, methods_only: bool) -> str | None:
    if base in obj.__mro__:
        return None
    if _is_protocol(base):
        return _missing_members(obj, base, methods_only)
    if issubclass(obj, base):  # registered virtual subclasses
        return None
    return f"is {_describe(obj)}, not a subclass of {base.__qualname__}"


def _missing_members(obj: object, base: type, methods_only: bool) -> str | None:
    wanted: set[str] = set()
    for cls in base.__mro__:
        if not _is_protocol(cls) or cls.__module__ == "typing":
            continue
        names = {name for name, value in vars(cls).items() if inspect.isroutine(value)}
        if not methods_only:
            names |= {name for name, value in vars(cls).items() if isinstance(value, property)}
            names |= set(inspect.get_annotations(cls))
        wanted |= {name for name in names if not name.startswith("_") or name == "__call__"}
    missing = sorted(name for name in wanted if not _has(obj, name))
    if missing:
        return f"is {_describe(obj)}, which lacks {', '.join(missing)} of {base.__qualname__}"
    return None


def _has(obj: object, name: str) -> bool:
    if isinstance(obj, type):  # hasattr would also find what the metaclass has, such as __call__
        return any(name in vars(cls) for cls in obj.__mro__)
    return hasattr(obj, name)
