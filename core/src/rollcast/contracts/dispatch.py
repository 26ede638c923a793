"""The contract of dispatch and execute modes: one call becomes a call per rank, many outputs one result.

Example of a mode, announced in the group ``rollcast.dispatch_modes``::

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
    """A worker's place in a named device mesh.

    Attributes:
        dp_rank: data-parallel shard that the worker computes.
        is_collect: True if the worker's output counts.
        coords: place along the model-parallel dimensions, such as ``{"tp": 1, "pp": 0}``; a missing one is 0.
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
        """Return each rank's place in a mesh, by rank; the workers are asked once."""
        ...


@dataclass(frozen=True)
class RankCall:
    """The arguments of one rank's call."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Calls:
    """A call for each rank, None for a rank that is left out. An object that several ranks get is stored once.

    Attributes:
        per_rank: calls by rank.
        state: value that ``collect`` finds in ``outputs.state``.
        answering: ranks whose outputs ``collect`` reads, all by default. The outputs of the others do not
            travel; ``collect`` finds None in their place.
    """

    per_rank: Sequence[RankCall | None]
    state: Any = None
    answering: Collection[int] | None = None

    @classmethod
    def each(cls, values: Sequence[Any], state: Any = None) -> Calls:
        """Return calls with one positional argument each."""
        return cls([RankCall((value,)) for value in values], state)


@dataclass(frozen=True)
class Expected:
    """The joined result of a method that returns a row for each row, before the calls have ended.

    Attributes:
        ranks: ranks whose outputs are joined, in this order.
        rows: rows of each of these outputs.
        taken: rows of the joined outputs that are the result: the number of the first ones, or their numbers.
    """

    ranks: Sequence[int]
    rows: Sequence[int]
    taken: int | Sequence[int]


class RankOutputs(list[Any]):
    """Outputs of the ranks that were called, in rank order.

    Attributes:
        ranks: rank of each output.
        state: ``Calls.state`` of the dispatch.
        execute_mode: name of the execute mode that chose the ranks.
    """

    def __init__(
        self, outputs: Sequence[Any], ranks: Sequence[int], state: Any = None, execute_mode: str = "all"
    ) -> None:
        super().__init__(outputs)
        self.ranks, self.state, self.execute_mode = tuple(ranks), state, execute_mode


class BatchType(ABC):
    """How dispatch modes split and join the batches of another framework, which workers get and return as they are.

    Example, announced in the group ``rollcast.batch_types``::

        class Frames(BatchType):
            kind = pandas.DataFrame

            def length(self, value):
                return len(value)

            def take(self, value, rows):
                return value.iloc[list(rows)]

            def concat(self, values):
                return pandas.concat(values, ignore_index=True)
    """

    #: The class of the batches, subclasses included.
    kind: ClassVar[type]

    @abstractmethod
    def length(self, value: Any) -> int:
        """Return the number of rows."""

    @abstractmethod
    def take(self, value: Any, rows: Sequence[int]) -> Any:
        """Return a batch of these rows, in this order; a row may come several times. ``value`` is not changed."""

    @abstractmethod
    def concat(self, values: Sequence[Any]) -> Any:
        """Return the rows of all batches, in order."""


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
        """Return one call for each rank.

        Raises:
            DispatchError: the arguments do not fit this mode.
        """

    @abstractmethod
    def collect(self, worker_group: DispatchTarget, outputs: RankOutputs) -> Any:
        """Return the result of the whole call."""

    def expect(self, worker_group: DispatchTarget, calls: Calls) -> Expected | None:
        """Return the rows of the result if each rank returns a row for each row that it gets.

        Called for methods that are registered with ``rows="same"``. None, the default, means that the result is not
        the ranks' outputs one after the other; handles then know their length when the call has ended.
        """
        return None

    def distribute(self, worker_group: DispatchTarget, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Calls:
        """Return :meth:`dispatch`'s calls, checked; worker groups call this.

        Raises:
            DispatchError: the mode fails on the arguments (the cause is chained) or returns anything but
                ``Calls`` with one entry for each rank.
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
        """Return :meth:`collect`'s result; worker groups call this.

        Raises:
            DispatchError: the mode fails on the outputs; the cause is chained.
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
    """Chooses the ranks that run a call."""

    name: ClassVar[str] = ""

    @abstractmethod
    def ranks(self, world_size: int) -> Sequence[int]:
        """Return the ranks that run, in order."""


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
batch_types: Registry[BatchType | type[BatchType]] = Registry(
    "rollcast.batch_types",
    any_of(instance_of(BatchType), subclass_of(BatchType)),
    description="batches of other frameworks that dispatch modes split and join",
)


def find_batch_type(value: Any) -> BatchType | None:
    """Return how the batch of another framework is split and joined; None if no plugin knows its class."""
    for name in batch_types.names():
        plugin = batch_types.get(name)
        found = plugin() if isinstance(plugin, type) else plugin
        if isinstance(value, found.kind):
            return found
    return None
