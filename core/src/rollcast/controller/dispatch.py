"""Dispatch and execute modes: how one call becomes a call per rank, and many outputs one result.

Example of a mode of one's own, announced in the group ``rollcast.dispatch_modes``::

    class EveryOther(DispatchMode):
        name = "every_other"

        def dispatch(self, worker_group, data):
            size = worker_group.world_size
            return Calls.each([data[rank::size] for rank in range(size)])

        def collect(self, worker_group, outputs):
            return list(outputs)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

from rollcast.controller.mesh import MeshInfo
from rollcast.errors import DispatchError, PluginNotFoundError, RollcastError, UnknownDispatchModeError
from rollcast.plugins import Registry, any_of, instance_of, subclass_of

__all__ = [
    "Calls",
    "Dispatch",
    "DispatchMode",
    "DispatchTarget",
    "Execute",
    "ExecuteMode",
    "RankCall",
    "RankOutputs",
    "dispatch_modes",
    "distribute",
    "execute_modes",
    "join",
    "register_dispatch_mode",
    "resolve_dispatch_mode",
    "resolve_execute_mode",
]


class DispatchTarget(Protocol):
    """What a dispatch mode sees of a worker group."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    def mesh(self, mesh_name: str) -> Sequence[MeshInfo]:
        """Each rank's place in a mesh, by rank; asked of the workers once, then remembered."""
        ...


@dataclass(frozen=True)
class RankCall:
    """The arguments of one rank's call."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Calls:
    """A call for each rank (None for a rank that is left out), and what ``collect`` must know.

    Ranks that get the same object share one stored copy of it.

    Attributes:
        per_rank: the calls, by rank.
        state: handed to ``collect`` as it is.
        answering: ranks whose outputs ``collect`` reads, all by default. The others' outputs do not
            travel; ``collect`` finds None in their place.
    """

    per_rank: Sequence[RankCall | None]
    state: Any = None
    answering: Collection[int] | None = None

    @classmethod
    def each(cls, values: Sequence[Any], state: Any = None) -> Calls:
        """One positional argument a rank."""
        return cls([RankCall((value,)) for value in values], state)


class RankOutputs(list[Any]):
    """Outputs of the ranks that were called, in rank order.

    Attributes:
        ranks: the rank of each output.
        state: what ``dispatch`` left for ``collect``.
        execute_mode: name of the execute mode that chose the ranks.
    """

    def __init__(
        self, outputs: Sequence[Any], ranks: Sequence[int], state: Any = None, execute_mode: str = "all"
    ) -> None:
        super().__init__(outputs)
        self.ranks = tuple(ranks)
        self.state = state
        self.execute_mode = execute_mode


class DispatchMode(ABC):
    """Splits the arguments of a call over the ranks and joins their outputs.

    A mode holds no state of a call: padding and the like go from ``dispatch`` to ``collect`` by
    ``Calls.state``. The caller's arguments are never changed.
    """

    name: ClassVar[str] = ""
    #: Names of the execute modes that make sense with this mode.
    execute_modes: ClassVar[frozenset[str]] = frozenset({"all"})
    default_execute_mode: ClassVar[str] = "all"

    @abstractmethod
    def dispatch(self, worker_group: DispatchTarget, *args: Any, **kwargs: Any) -> Calls:
        """One call for each rank.

        Raises:
            DispatchError: the arguments do not fit this mode.
        """

    @abstractmethod
    def collect(self, worker_group: DispatchTarget, outputs: RankOutputs) -> Any:
        """The result of the whole call."""


class ExecuteMode(ABC):
    """Chooses the ranks that run a call."""

    name: ClassVar[str] = ""

    @abstractmethod
    def ranks(self, world_size: int) -> Sequence[int]:
        """The ranks that run, in order."""


class ExecuteAll(ExecuteMode):
    """Every rank runs its call."""

    name = "all"

    def ranks(self, world_size: int) -> Sequence[int]:
        return range(world_size)


class ExecuteRankZero(ExecuteMode):
    """Only rank 0 runs its call."""

    name = "rank_zero"

    def ranks(self, world_size: int) -> Sequence[int]:
        return (0,)


class OneToAll(DispatchMode):
    """Every rank gets the same arguments; the result is the list of outputs by rank.

    With ``Execute.RANK_ZERO`` only rank 0 runs, and its output is the result.
    """

    name = "one_to_all"
    execute_modes = frozenset({"all", "rank_zero"})

    def dispatch(self, worker_group: DispatchTarget, *args: Any, **kwargs: Any) -> Calls:
        return Calls([RankCall(args, kwargs)] * worker_group.world_size)

    def collect(self, worker_group: DispatchTarget, outputs: RankOutputs) -> Any:
        return outputs[0] if outputs.execute_mode == "rank_zero" else list(outputs)


class AllToAll(DispatchMode):
    """Every argument is a list or tuple with one value for each rank; the result is the list of outputs."""

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
    """Only rank 0 gets the arguments and runs; its output is the result."""

    name = "rank_zero"
    execute_modes = frozenset({"rank_zero"})
    default_execute_mode = "rank_zero"

    def dispatch(self, worker_group: DispatchTarget, *args: Any, **kwargs: Any) -> Calls:
        return Calls([RankCall(args, kwargs), *[None] * (worker_group.world_size - 1)])

    def collect(self, worker_group: DispatchTarget, outputs: RankOutputs) -> Any:
        return outputs[0]


def distribute(
    mode: DispatchMode, worker_group: DispatchTarget, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Calls:
    """The calls that ``mode`` makes of a call's arguments, one entry for each rank.

    Raises:
        DispatchError: the mode refuses the arguments or fails on them (the cause is chained), or what
            it gives is not a call for each rank.
    """
    try:
        calls = mode.dispatch(worker_group, *args, **kwargs)
    except RollcastError:
        raise
    except Exception as error:
        kinds = [type(value).__name__ for value in args]
        kinds += [f"{key}={type(value).__name__}" for key, value in kwargs.items()]
        raise DispatchError(
            f"dispatch mode {mode.name!r} cannot distribute the arguments ({', '.join(kinds)}): "
            f"{type(error).__name__}: {error}"
        ) from error
    size = worker_group.world_size
    if not isinstance(calls, Calls) or len(calls.per_rank) != size:
        got = f"{len(calls.per_rank)} calls" if isinstance(calls, Calls) else type(calls).__name__
        raise DispatchError(
            f"dispatch mode {mode.name!r} must give Calls with one entry for each of the {size} ranks, it gave {got}"
        )
    return calls


def join(mode: DispatchMode, worker_group: DispatchTarget, outputs: RankOutputs) -> Any:
    """The result that ``mode`` makes of the outputs.

    Raises:
        DispatchError: the mode fails on them; the cause is chained.
    """
    try:
        return mode.collect(worker_group, outputs)
    except RollcastError:
        raise
    except Exception as error:
        kinds = ", ".join(type(output).__name__ for output in outputs)
        raise DispatchError(
            f"dispatch mode {mode.name!r} cannot collect the outputs ({kinds}): {type(error).__name__}: {error}"
        ) from error


DispatchFn = Callable[..., Any]
CollectFn = Callable[[DispatchTarget, list[Any]], Any]


class FunctionMode(DispatchMode):
    """A mode made of two functions; see :func:`register_dispatch_mode`."""

    def __init__(self, name: str, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> None:
        self.name = name  # type: ignore[misc]  # one class serves many names
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


dispatch_modes: Registry[DispatchMode | type[DispatchMode]] = Registry(
    "rollcast.dispatch_modes",
    any_of(instance_of(DispatchMode), subclass_of(DispatchMode)),
    "dispatch_mode",
    description="how a call is split over ranks, and its results are collected",
)
execute_modes: Registry[ExecuteMode | type[ExecuteMode]] = Registry(
    "rollcast.execute_modes",
    any_of(instance_of(ExecuteMode), subclass_of(ExecuteMode)),
    "execute_mode",
    description="the ranks that a call runs on",
)

_Mode = TypeVar("_Mode", DispatchMode, ExecuteMode)


def _build(cls: type[_Mode]) -> _Mode:
    try:
        return cls()
    except TypeError as error:
        raise DispatchError(
            f"mode {cls.__name__} cannot be built without arguments ({error}); give @register an object of it"
        ) from error


def resolve_dispatch_mode(mode: DispatchMode | type[DispatchMode] | str) -> DispatchMode:
    """The mode object behind a name, a class or an object."""
    part = dispatch_modes.get(mode.lower(), requested_by="dispatch_mode") if isinstance(mode, str) else mode
    if isinstance(part, type) and issubclass(part, DispatchMode):
        return _build(part)
    if isinstance(part, DispatchMode):
        return part
    raise DispatchError(
        f"dispatch_mode must be Dispatch.NAME, a DispatchMode or a registered name, got {mode!r}; "
        f"registered: {', '.join(dispatch_modes.names())}"
    )


def resolve_execute_mode(mode: ExecuteMode | type[ExecuteMode] | str) -> ExecuteMode:
    """The mode object behind a name, a class or an object."""
    part = execute_modes.get(mode.lower(), requested_by="execute_mode") if isinstance(mode, str) else mode
    if isinstance(part, type) and issubclass(part, ExecuteMode):
        return _build(part)
    if isinstance(part, ExecuteMode):
        return part
    raise DispatchError(
        f"execute_mode must be Execute.NAME, an ExecuteMode or a registered name, got {mode!r}; "
        f"registered: {', '.join(execute_modes.names())}"
    )


class _DispatchNamespace(type):
    def __getattr__(cls, name: str) -> DispatchMode:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return resolve_dispatch_mode(name)
        except PluginNotFoundError as error:
            raise UnknownDispatchModeError(f"Dispatch.{name}: {error}") from error

    def __dir__(cls) -> list[str]:
        return [name.upper() for name in dispatch_modes.names()]

    def __iter__(cls) -> Iterator[str]:
        return iter(dir(cls))


class Dispatch(metaclass=_DispatchNamespace):
    """``Dispatch.NAME``: every installed dispatch mode, by its name in upper case."""


class _ExecuteNamespace(type):
    def __getattr__(cls, name: str) -> ExecuteMode:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return resolve_execute_mode(name)
        except PluginNotFoundError as error:
            raise UnknownDispatchModeError(f"Execute.{name}: {error}") from error

    def __dir__(cls) -> list[str]:
        return [name.upper() for name in execute_modes.names()]


class Execute(metaclass=_ExecuteNamespace):
    """``Execute.NAME``: every installed execute mode, by its name in upper case."""


def register_dispatch_mode(dispatch_mode_name: str, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> DispatchMode:
    """Add a mode made of two functions, in this process; it travels to the workers with the group.

    Args:
        dispatch_mode_name: available as ``Dispatch.<NAME>`` from now on.
        dispatch_fn: called with the group and the call's arguments; returns :class:`Calls`, or a
            tuple of lists and a dict of lists, each with one value for each rank.
        collect_fn: called with the group and the list of outputs; returns the result.

    Raises:
        PluginConflictError: the name is taken.
    """
    mode = FunctionMode(dispatch_mode_name.lower(), dispatch_fn, collect_fn)
    dispatch_modes.register(mode.name, mode)
    return mode
