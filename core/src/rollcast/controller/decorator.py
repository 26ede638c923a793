"""``@register``: say how calls of a worker method are distributed over its group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from rollcast.controller.dispatch import (
    DispatchMode,
    ExecuteMode,
    resolve_dispatch_mode,
    resolve_execute_mode,
)
from rollcast.errors import DispatchError

__all__ = ["Registered", "check_registered_methods", "iter_registered", "register", "registered"]

F = TypeVar("F", bound=Callable[..., Any])
_ATTRIBUTE = "__rollcast_registered__"
#: What a worker group is asked by these names is about the group itself.
RESERVED_NAMES = frozenset(
    {
        "attach",
        "contexts",
        "execute_all",
        "execute_all_async",
        "execute_all_sync",
        "execute_func",
        "execute_func_rank_zero",
        "execute_rank_zero",
        "execute_rank_zero_async",
        "execute_rank_zero_sync",
        "fuse",
        "launch_spec",
        "lost_ranks",
        "mesh",
        "name",
        "receive",
        "role",
        "roles",
        "runtime",
        "send",
        "shutdown",
        "spawn",
        "with_timeout",
        "workers",
        "world_size",
    }
)


@dataclass(frozen=True)
class Registered:
    """What ``@register`` says of one method."""

    dispatch_mode: DispatchMode
    execute_mode: ExecuteMode
    blocking: bool
    materialize_futures: bool


def register(
    dispatch_mode: DispatchMode | type[DispatchMode] | str = "all_to_all",
    execute_mode: ExecuteMode | type[ExecuteMode] | str | None = None,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[F], F]:
    """Mark a worker method as callable on the whole group. The function comes back unwrapped.

    Args:
        dispatch_mode: ``Dispatch.NAME``, a mode object, or a registered name.
        execute_mode: ``Execute.ALL`` or ``Execute.RANK_ZERO``; by default what the dispatch mode says.
        blocking: wait for the result; otherwise the call returns a handle at once, and what it
            computes stays with the workers until somebody reads it.
        materialize_futures: each worker fetches its part of the handles among the arguments before
            the method runs; otherwise the method gets the handles.

    Raises:
        PluginNotFoundError: no mode of that name is installed.
        DispatchError: the two modes do not go together.
    """
    dispatch = resolve_dispatch_mode(dispatch_mode)
    execute = resolve_execute_mode(dispatch.default_execute_mode if execute_mode is None else execute_mode)
    if execute.name not in dispatch.execute_modes:
        raise DispatchError(
            f"dispatch mode {dispatch.name!r} cannot run with execute mode {execute.name!r}; "
            f"it goes with {', '.join(sorted(dispatch.execute_modes))}"
        )
    entry = Registered(dispatch, execute, blocking, materialize_futures)

    def mark(function: F) -> F:
        if not callable(function):
            raise DispatchError(f"@register belongs on a method, not on {function!r}")
        setattr(function, _ATTRIBUTE, entry)
        return function

    return mark


def registered(function: object) -> Registered | None:
    """What ``@register`` said of ``function``; None if it was never registered."""
    entry = getattr(function, _ATTRIBUTE, None)
    return entry if isinstance(entry, Registered) else None


def iter_registered(cls: type) -> Iterator[tuple[str, Callable[..., Any], Registered]]:
    """Each registered method of ``cls``: name, function, entry. Properties are not evaluated."""
    for name in dir(cls):
        function = inspect.getattr_static(cls, name, None)
        entry = registered(function)
        if entry is not None and callable(function):
            yield name, function, entry


def check_registered_methods(cls: type) -> None:
    """Refuse a class whose registered methods cannot be called on a group.

    Raises:
        DispatchError: a registered method takes no ``self``, is static, a class method, a generator
            or called like something of the group's own, or an override has lost the registration of
            the method that it replaces.
    """
    for name, value in vars(cls).items():
        inner = getattr(value, "__func__", value)
        if registered(value) is not None or registered(inner) is not None:
            complaint = _complaint(name, value)
            if complaint is not None:
                raise DispatchError(f"{cls.__name__}.{name} is registered but {complaint}")
        elif inspect.isfunction(value):
            for base in cls.__mro__[1:]:
                if registered(vars(base).get(name)) is not None:
                    raise DispatchError(
                        f"{cls.__name__}.{name} replaces {base.__name__}.{name}, which is registered, without "
                        "@register; register it again so that the group still knows how to call it"
                    )


def _complaint(name: str, value: Any) -> str | None:
    if isinstance(value, staticmethod | classmethod):
        return "it is a static or class method; only instance methods run on a group"
    if not inspect.signature(value).parameters:
        return "it takes no self"
    if inspect.isgeneratorfunction(value) or inspect.isasyncgenfunction(value):
        return "it is a generator, which cannot leave its process; return a list"
    if name.startswith("_"):
        return "its name is private; a group offers public methods only"
    if name in RESERVED_NAMES:
        return f"WorkerGroup has a {name!r} of its own; choose another name"
    return None
