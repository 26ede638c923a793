"""Contract of dispatch modes, which split a call over ranks and join the outputs, and of execute modes.

Example of a mode, registered in the entry-point group ``rollcast.dispatch_modes``::

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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from rollcast.errors import DispatchError, RollcastError
from rollcast.plugins import Registry, any_of, instance_of, subclass_of

__all__ = [
    "BatchType",
    "Calls",
    "DispatchMode",
    "DispatchTarget",
    "ExecuteMode",
    "Expected",
    "MeshInfo",
    "RankCall",
    "RankOutputs",
    "batch_types",
    "dispatch_modes",
    "execute_modes",
    "find_batch_type",
]


@dataclass(frozen=True)
class MeshInfo:
    """A worker's coordinates in a named device mesh.

    Attributes:
        dp_rank: index of the data-parallel shard that the worker computes.
        is_collect: True if the worker's output is part of the result.
        coords: coordinates along the model-parallel dimensions, such as ``{"tp": 1, "pp": 0}``; 0 if missing.
    """

    dp_rank: int
    is_collect: bool
    coords: Mapping[str, int] = field(default_factory=dict, hash=False)


class DispatchTarget(Protocol):
    """A worker group as a dispatch mode sees it."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    def mesh(self, mesh_name: str) -> Sequence[MeshInfo]:
        """Return each rank's place in a mesh, by rank; the workers are queried only once."""
        ...


@dataclass(frozen=True)
class RankCall:
    """The arguments of one rank's call."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Calls:
    """One call per rank, or None for a rank that is not called. An object sent to several ranks is stored once.

    Attributes:
        per_rank: calls by rank.
        state: value passed to ``collect`` as ``outputs.state``.
        answering: ranks whose outputs ``collect`` reads; all by default. The outputs of other ranks are not
            transferred and are None in ``collect``.
    """

    per_rank: Sequence[RankCall | None]
    state: Any = None
    answering: Collection[int] | None = None

    @classmethod
    def each(cls, values: Sequence[Any], state: Any = None) -> Calls:
        """Return one call per value, with the value as its only positional argument."""
        return cls([RankCall((value,)) for value in values], state)


@dataclass(frozen=True)
class Expected:
    """The layout of a result that is known before the calls end, for a method that returns a row for each row.

    Attributes:
        ranks: ranks whose outputs are concatenated, in this order.
        rows: number of rows of each of these outputs.
        taken: rows of the concatenated outputs that form the result: a count from the start, or row numbers.
    """

    ranks: Sequence[int]
    rows: Sequence[int]
    taken: int | Sequence[int]


class RankOutputs(list[Any]):
    """Outputs of the called ranks, in rank order.

    Attributes:
        ranks: rank of each output.
        state: ``Calls.state`` of the dispatch.
        execute_mode: name of the execute mode that selected the ranks.
    """

    def __init__(
        self, outputs: Sequence[Any], ranks: Sequence[int], state: Any = None, execute_mode: str = "all"
    ) -> None:
        super().__init__(outputs)
        self.ranks, self.state, self.execute_mode = tuple(ranks), state, execute_mode


class BatchType(ABC):
    """A batch class of another framework that dispatch modes can split and join; workers receive it unchanged.

    Example, registered in the entry-point group ``rollcast.batch_types``::

        class Frames(BatchType):
            kind = pandas.DataFrame

            def length(self, value):
                return len(value)

            def take(self, value, rows):
                return value.iloc[list(rows)]

            def concat(self, values):
                return pandas.concat(values, ignore_index=True)
    """

    #: Class of the batches; subclasses match too.
    kind: ClassVar[type]

    @abstractmethod
    def length(self, value: Any) -> int:
        """Return the number of rows."""

    @abstractmethod
    def take(self, value: Any, rows: Sequence[int]) -> Any:
        """Return a batch of these rows, in this order; rows may repeat. Does not change ``value``."""

    @abstractmethod
    def concat(self, values: Sequence[Any]) -> Any:
        """Return one batch with the rows of all batches, in order."""


class DispatchMode(ABC):
    """Base class of dispatch modes, which split a call's arguments over ranks and join the outputs.

    A mode keeps no state between calls: pass such values as padding from ``dispatch`` to ``collect`` in
    ``Calls.state``. A mode must not change the caller's arguments.
    """

    name: ClassVar[str] = ""
    #: Names of the execute modes that this mode can be combined with.
    execute_modes: ClassVar[frozenset[str]] = frozenset({"all"})
    default_execute_mode: ClassVar[str] = "all"

    @abstractmethod
    def dispatch(self, worker_group: DispatchTarget, *args: Any, **kwargs: Any) -> Calls:
        """Split a call into one call per rank.

        Raises:
            DispatchError: this mode cannot split the arguments.
        """

    @abstractmethod
    def collect(self, worker_group: DispatchTarget, outputs: RankOutputs) -> Any:
        """Join the outputs into the result of the call."""

    def expect(self, worker_group: DispatchTarget, calls: Calls) -> Expected | None:
        """Return the layout of the result if each rank returns one row per input row.

        Called for methods registered with ``rows="same"``. None, the default, means that the layout is unknown; the
        length of a future is then known only after the call has ended.
        """
        return None

    def distribute(self, worker_group: DispatchTarget, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Calls:
        """Call :meth:`dispatch` and check the calls that it returns; worker groups call this method.

        Raises:
            DispatchError: :meth:`dispatch` raised an error (chained as the cause), or did not return ``Calls`` with
                one entry per rank.
        """
        try:
            calls = self.dispatch(worker_group, *args, **kwargs)
        except RollcastError:
            raise
        except Exception as error:
            kinds = [type(value).__name__ for value in args]
            kinds += [f"{key}={type(value).__name__}" for key, value in kwargs.items()]
            raise DispatchError(
                f"dispatch mode {self.name!r} cannot distribute the arguments ({', '.join(kinds)}): "
                f"{type(error).__name__}: {error}"
            ) from error
        size = worker_group.world_size
        if not isinstance(calls, Calls) or len(calls.per_rank) != size:
            got = f"{len(calls.per_rank)} calls" if isinstance(calls, Calls) else type(calls).__name__
            raise DispatchError(
                f"dispatch mode {self.name!r} must return Calls with one entry for each of the {size} ranks, got {got}"
            )
        return calls

    def join(self, worker_group: DispatchTarget, outputs: RankOutputs) -> Any:
        """Call :meth:`collect` and return its result; worker groups call this method.

        Raises:
            DispatchError: :meth:`collect` raised an error, which is chained as the cause.
        """
        try:
            return self.collect(worker_group, outputs)
        except RollcastError:
            raise
        except Exception as error:
            kinds = ", ".join(type(output).__name__ for output in outputs)
            raise DispatchError(
                f"dispatch mode {self.name!r} cannot collect the outputs ({kinds}): {type(error).__name__}: {error}"
            ) from error


class ExecuteMode(ABC):
    """Base class of execute modes, which select the ranks that run a call."""

    name: ClassVar[str] = ""

    @abstractmethod
    def ranks(self, world_size: int) -> Sequence[int]:
        """Return the ranks that run, in order."""


dispatch_modes: Registry[DispatchMode | type[DispatchMode]] = Registry(
    "rollcast.dispatch_modes",
    any_of(instance_of(DispatchMode), subclass_of(DispatchMode)),
    "dispatch_mode",
    description="how a call is split over ranks and its results are collected",
)
execute_modes: Registry[ExecuteMode | type[ExecuteMode]] = Registry(
    "rollcast.execute_modes",
    any_of(instance_of(ExecuteMode), subclass_of(ExecuteMode)),
    "execute_mode",
    description="ranks that run a call",
)
batch_types: Registry[BatchType | type[BatchType]] = Registry(
    "rollcast.batch_types",
    any_of(instance_of(BatchType), subclass_of(BatchType)),
    description="batch classes of other frameworks that dispatch modes split and join",
)


def find_batch_type(value: Any) -> BatchType | None:
    """Return the batch type of another framework's batch; None if no plugin registers its class."""
    for name in batch_types.names():
        plugin = batch_types.get(name)
        mode = plugin() if isinstance(plugin, type) else plugin
        if isinstance(value, mode.kind):
            return mode
    return None
