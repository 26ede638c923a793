"""Dispatch and execute modes of the core, the namespaces ``Dispatch`` and ``Execute``, and ``@register``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from rollcast.contracts.dispatch import (
    Calls,
    DispatchMode,
    DispatchTarget,
    ExecuteMode,
    RankCall,
    RankOutputs,
    dispatch_modes,
    execute_modes,
)
from rollcast.errors import DispatchError, PluginNotFoundError, UnknownDispatchModeError
from rollcast.plugins import Registry
from rollcast.plugins.discovery import find_core_version

__all__ = [
    "Dispatch",
    "Execute",
    "Registered",
    "check_registered_methods",
    "iter_registered",
    "register",
    "register_dispatch_mode",
    "registered",
]


class ExecuteAll(ExecuteMode):
    """Execute mode in which every rank runs its call."""

    name = "all"

    def ranks(self, world_size: int) -> Sequence[int]:
        return range(world_size)


class ExecuteRankZero(ExecuteMode):
    """Execute mode in which only rank 0 runs its call."""

    name = "rank_zero"

    def ranks(self, world_size: int) -> Sequence[int]:
        return (0,)


class OneToAll(DispatchMode):
    """Dispatch mode that sends the same arguments to every rank and returns the list of outputs by rank.

    With ``Execute.RANK_ZERO``, only rank 0 runs, and its output is the result.
    """

    name = "one_to_all"
    execute_modes = frozenset({"all", "rank_zero"})

    def dispatch(self, worker_group: DispatchTarget, *args: Any, **kwargs: Any) -> Calls:
        return Calls([RankCall(args, kwargs)] * worker_group.world_size)

    def collect(self, worker_group: DispatchTarget, outputs: RankOutputs) -> Any:
        return outputs[0] if outputs.execute_mode == "rank_zero" else list(outputs)


class AllToAll(DispatchMode):
    """Dispatch mode for arguments that are lists or tuples with one value per rank; returns the list of outputs."""

    name = "all_to_all"

    def dispatch(self, worker_group: DispatchTarget, *args: Any, **kwargs: Any) -> Calls:
        size = worker_group.world_size
        named = [(f"argument {i}", value) for i, value in enumerate(args)]
        named += [(f"argument {key!r}", value) for key, value in kwargs.items()]
        for label, value in named:
            if not isinstance(value, list | tuple) or len(value) != size:
                what = f"{type(value).__name__} of length {len(value)}" if hasattr(value, "__len__") else repr(value)
                raise DispatchError(
                    f"all_to_all: {label} must be a list or tuple with one value for each of the {size} ranks, "
                    f"got {what}; use Dispatch.ONE_TO_ALL to give every rank the same value"
                )
        return Calls(
            [
                RankCall(tuple(value[rank] for value in args), {key: value[rank] for key, value in kwargs.items()})
                for rank in range(size)
            ]
        )

    def collect(self, worker_group: DispatchTarget, outputs: RankOutputs) -> Any:
        return list(outputs)


class RankZero(DispatchMode):
    """Dispatch mode that calls only rank 0 and returns its output."""

    name = "rank_zero"
    execute_modes = frozenset({"rank_zero"})
    default_execute_mode = "rank_zero"

    def dispatch(self, worker_group: DispatchTarget, *args: Any, **kwargs: Any) -> Calls:
        return Calls([RankCall(args, kwargs), *[None] * (worker_group.world_size - 1)])

    def collect(self, worker_group: DispatchTarget, outputs: RankOutputs) -> Any:
        return outputs[0]


DispatchFn = Callable[..., Any]
CollectFn = Callable[[DispatchTarget, list[Any]], Any]


class FunctionMode(DispatchMode):
    """A dispatch mode made from two functions; see :func:`register_dispatch_mode`."""

    def __init__(self, name: str, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> None:
        self.name = name  # type: ignore[misc]  # a class attribute, but one class serves many names
        self._dispatch_fn = dispatch_fn
        self._collect_fn = collect_fn

    def dispatch(self, worker_group: DispatchTarget, *args: Any, **kwargs: Any) -> Calls:
        result = self._dispatch_fn(worker_group, *args, **kwargs)
        if isinstance(result, Calls):
            return result
        try:
            lists, named = result
            by_rank = [
                RankCall(tuple(values[rank] for values in lists), {key: values[rank] for key, values in named.items()})
                for rank in range(worker_group.world_size)
            ]
        except (TypeError, ValueError, IndexError, AttributeError) as error:
            raise DispatchError(
                f"the dispatch function of {self.name!r} must return Calls, or (lists, dict of lists) with "
                f"{worker_group.world_size} values each, one for each rank: {error}"
            ) from error
        return Calls(by_rank)

    def collect(self, worker_group: DispatchTarget, outputs: RankOutputs) -> Any:
        return self._collect_fn(worker_group, outputs)


def _resolve(mode: Any, base: type, registry: Registry[Any], key: str) -> Any:
    """Return the mode object for a name, a class, an object or, for a dispatch mode, a pair of functions."""
    if base is DispatchMode and (pair := _as_pair(mode)) is not None:
        return pair
    part = _by_name(mode.lower(), base, registry, key) if isinstance(mode, str) else mode
    if isinstance(part, type) and issubclass(part, base):
        try:
            return part()
        except TypeError as error:
            raise DispatchError(
                f"mode {part.__name__} cannot be built without arguments ({error}); give @register an object of it"
            ) from error
    if isinstance(part, base):
        return part
    raise DispatchError(
        f"{key} must be {key.partition('_')[0].title()}.NAME, a {base.__name__} or a registered name, got {mode!r}; "
        f"registered: {', '.join(registry.names())}"
    )


def _by_name(name: str, base: type, registry: Registry[Any], key: str) -> Any:
    """Return the mode registered as ``name``. The core's own modes are found even if the core is not installed."""
    if name not in registry and find_core_version() is None:
        for own in (OneToAll, AllToAll, RankZero, ExecuteAll, ExecuteRankZero):
            if issubclass(own, base) and own.name == name:
                return own
    return registry.get(name, requested_by=key)


def _as_pair(mode: Any) -> FunctionMode | None:
    """Build a mode from a pair ``(dispatch, collect)`` or a mapping with ``dispatch_fn`` and ``collect_fn``."""
    if isinstance(mode, Mapping) and mode.keys() == {"dispatch_fn", "collect_fn"}:
        mode = (mode["dispatch_fn"], mode["collect_fn"])
    if not isinstance(mode, tuple):
        return None
    if len(mode) != 2 or not all(callable(function) and not isinstance(function, type) for function in mode):
        raise DispatchError(f"dispatch_mode as a tuple is a pair of functions (dispatch, collect), got {mode!r:.200}")
    dispatch_fn, collect_fn = mode
    name = "+".join(getattr(function, "__name__", type(function).__name__) for function in mode)
    return FunctionMode(name, dispatch_fn, collect_fn)


class _Namespace(type):
    _base: Any
    _registry: Registry[Any]
    _key: str

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return _resolve(name, cls._base, cls._registry, cls._key)
        except PluginNotFoundError as error:
            raise UnknownDispatchModeError(f"{cls.__name__}.{name}: {error}") from error

    def __dir__(cls) -> list[str]:
        return [name.upper() for name in cls._registry.names()]

    def __iter__(cls) -> Iterator[str]:
        return iter(dir(cls))


class Dispatch(metaclass=_Namespace):
    """Namespace ``Dispatch.NAME`` of all installed dispatch modes, by name in upper case."""

    _base, _registry, _key = DispatchMode, dispatch_modes, "dispatch_mode"


class Execute(metaclass=_Namespace):
    """Namespace ``Execute.NAME`` of all installed execute modes, by name in upper case."""

    _base, _registry, _key = ExecuteMode, execute_modes, "execute_mode"


def register_dispatch_mode(dispatch_mode_name: str, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> DispatchMode:
    """Register a dispatch mode made from two functions in this process; groups send it to their workers.

    Args:
        dispatch_mode_name: name of the mode, available as ``Dispatch.<NAME>``.
        dispatch_fn: function of the group and the call's arguments that returns :class:`Calls`, or a tuple of lists
            and a dict of lists, each with one value per rank.
        collect_fn: function of the group and the list of outputs that returns the result.

    Raises:
        PluginConflictError: the name is taken.
    """
    mode = FunctionMode(dispatch_mode_name.lower(), dispatch_fn, collect_fn)
    dispatch_modes.register(mode.name, mode)
    return mode


F = TypeVar("F", bound=Callable[..., Any])
Rows = Literal["same"] | None
_ATTRIBUTE = "__rollcast_registered__"
_OF_GROUPS = (
    "attach contexts entries execute_all execute_all_async execute_all_sync execute_func execute_func_rank_zero "
    "execute_rank_zero execute_rank_zero_async execute_rank_zero_sync from_attached fuse launch_spec lost_ranks "
    "mesh meshes name poisoned receive register_mesh restart role roles runtime send shutdown spawn submit "
    "with_timeout workers world_size"
)
#: Attributes of worker groups, which are not allowed as names of registered methods.
RESERVED_NAMES = frozenset(_OF_GROUPS.split())


@dataclass(frozen=True)
class Registered:
    """The arguments of ``@register`` for one method."""

    dispatch_mode: DispatchMode
    execute_mode: ExecuteMode
    blocking: bool
    materialize_futures: bool
    mutates: bool | frozenset[str] = False
    rows: Rows = None

    def may_write(self, *names: str) -> bool:
        """Return True if the method may write in place to a column or argument with one of these names."""
        return self.mutates is True or (self.mutates is not False and not self.mutates.isdisjoint(names))


def register(
    dispatch_mode: DispatchMode
    | type[DispatchMode]
    | str
    | tuple[DispatchFn, CollectFn]
    | Mapping[str, Callable[..., Any]] = "all_to_all",
    execute_mode: ExecuteMode | type[ExecuteMode] | str | None = None,
    blocking: bool = True,
    materialize_futures: bool = True,
    mutates: bool | Iterable[str] = False,
    rows: Rows = None,
) -> Callable[[F], F]:
    """Register a worker method, so that it can be called on a whole worker group; the decorator does not wrap it.

    Args:
        dispatch_mode: ``Dispatch.NAME``, a mode object, a registered name, or a pair ``(dispatch, collect)`` of
            functions as for :func:`register_dispatch_mode`, also as
            ``{"dispatch_fn": dispatch, "collect_fn": collect}``; a pair has no name and is not registered.
        execute_mode: ``Execute.ALL`` or ``Execute.RANK_ZERO``; by default that of the dispatch mode.
        blocking: True to wait for the result; False to return a future at once, while the result stays on the workers
            until it is read.
        materialize_futures: True if each worker reads the remote columns of its arguments before the method runs;
            False to pass them to the method, which reads those that it looks at.
        mutates: names of columns and arguments that the method writes to in place, or True for all. The method gets
            its own copies of these. A write to any other argument raises an error after the call, because other
            ranks and readers may share the memory.
        rows: ``"same"`` if the method returns a DataProto with one row per input row. The future of such a call
            knows its length at once, so the next call can be made before this one has ended.

    Raises:
        PluginNotFoundError: no mode with this name is installed.
        DispatchError: the two modes cannot be combined, or an option has an invalid value.
    """
    dispatch: DispatchMode = _resolve(dispatch_mode, DispatchMode, dispatch_modes, "dispatch_mode")
    chosen = dispatch.default_execute_mode if execute_mode is None else execute_mode
    execute: ExecuteMode = _resolve(chosen, ExecuteMode, execute_modes, "execute_mode")
    if execute.name not in dispatch.execute_modes:
        raise DispatchError(
            f"dispatch mode {dispatch.name!r} cannot run with execute mode {execute.name!r}; "
            f"valid: {', '.join(sorted(dispatch.execute_modes))}"
        )
    if isinstance(mutates, str) or rows not in (None, "same"):
        what = f"mutates={mutates!r}" if isinstance(mutates, str) else f"rows={rows!r}"
        raise DispatchError(
            f"@register({what}): mutates is True or a tuple of names such as ('x',), and rows is 'same' or None"
        )
    written = mutates if isinstance(mutates, bool) else frozenset(mutates)
    entry = Registered(dispatch, execute, blocking, materialize_futures, written, rows)

    def mark(function: F) -> F:
        if not callable(function):
            raise DispatchError(f"@register belongs on a method, not on {function!r}")
        setattr(function, _ATTRIBUTE, entry)
        return function

    return mark


def registered(function: object) -> Registered | None:
    """Return the registration of ``function``; None if it is not registered."""
    entry = getattr(function, _ATTRIBUTE, None)
    return entry if isinstance(entry, Registered) else None


def iter_registered(cls: type) -> Iterator[tuple[str, Callable[..., Any], Registered]]:
    """Yield the name, function and registration of each registered method, without evaluating properties."""
    for name in dir(cls):
        function = inspect.getattr_static(cls, name, None)
        entry = registered(function)
        if entry is not None and callable(function):
            yield name, function, entry


def check_registered_methods(cls: type) -> None:
    """Check that the registered methods of a class can be called on a group.

    Raises:
        DispatchError: a registered method takes no ``self``, is a static or class method or a generator, has the
            name of a group attribute, or is overridden by a method that is not registered.
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
