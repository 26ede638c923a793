"""Ray's object store as used by controller and workers, and the error message when it is full."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollcast.contracts.runtime import Store
from rollcast.errors import ResourceError, WorkerError

if TYPE_CHECKING:
    from rollcast.protocol import Cut

__all__ = ["FULL", "NodeRef", "ObjectStore", "explain_full", "get_rows", "get_values"]

#: Errors that Ray raises if both the store and the disk to which it spills are full.
FULL = (ObjectStoreFullError, OutOfDiskError)


class NodeRef(NamedTuple):
    """A reference to an object, and the id of the node that stores it."""

    ref: Any
    node: str


class ObjectStore(Store):
    """The store in which workers keep results that they do not send to the controller."""

    def put(self, value: Any) -> Any:
        """Store a value; the returned reference is valid in every process of the cluster.

        Raises:
            ResourceError: the store and the disk to which it spills are full.
        """
        try:
            return NodeRef(ray.put(value), ray.get_runtime_context().get_node_id())
        except FULL as error:
            raise ResourceError(explain_full("a result that is to be kept", value)) from error

    def fetch(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        """Return the values of the references.

        Raises:
            WorkerError: the call that a reference stands for has failed.
        """
        with _explaining_failure():
            return get_values(refs, timeout)

    def fetch_rows(self, cuts: Sequence[Cut], timeout: float | None) -> list[Any]:
        """Return rows of stored batches; rows on other nodes are cut there, so that only they are transferred.

        Raises:
            WorkerError: the call that a reference stands for has failed.
        """
        with _explaining_failure():
            return get_rows(cuts, timeout)


@contextmanager
def _explaining_failure() -> Iterator[None]:
    """Convert the failure of the call behind a handle to a worker error."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        raise WorkerError(f"the call of a handle among the arguments has failed: {error.cause}") from error


#: A function that waits for plain references for at most the given seconds and returns their values.
Get = Callable[[list[Any], "float | None"], list[Any]]


def _get(refs: list[Any], timeout: float | None) -> list[Any]:
    return list(ray.get(refs, timeout=timeout))


def get_values(refs: Sequence[Any], timeout: float | None, get: Get = _get) -> list[Any]:
    """Return the values of references, with or without a node."""
    return get([ref.ref if isinstance(ref, NodeRef) else ref for ref in refs], timeout)


def get_rows(cuts: Sequence[Cut], timeout: float | None, get: Get = _get) -> list[Any]:
    """Return the rows that the cuts describe; a task cuts partial objects on the node that stores them."""
    here = ray.get_runtime_context().get_node_id()
    away = [isinstance(cut.ref, NodeRef) and cut.ref.node != here and cut.columns is not None for cut in cuts]
    by_node: dict[str, list[int]] = {}
    for number, (cut, is_away) in enumerate(zip(cuts, away, strict=True)):
        if is_away:
            by_node.setdefault(cut.ref.node, []).append(number)
    cut_values: list[Any] = [None] * len(cuts)
    parts: dict[int, Any] = {}
    for node, numbers in by_node.items():
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        call = _cutter().options(scheduling_strategy=place, num_returns=len(numbers))
        wanted = [cuts[number]._replace(ref=None) for number in numbers]
        refs = call.remote(wanted, *[cuts[number].ref.ref for number in numbers])
        parts |= dict(zip(numbers, [refs] if len(numbers) == 1 else refs, strict=True))
    order = [parts.get(number, cut.ref) for number, cut in enumerate(cuts)]
    unique = {id(ref): ref for ref in order}
    values = dict(zip(unique, get_values(list(unique.values()), timeout, get), strict=True))
    for number, (cut, ref, is_away) in enumerate(zip(cuts, order, away, strict=True)):
        value = values[id(ref)]
        cut_values[number] = value if is_away else cut.of(value)
    return cut_values


@functools.cache
def _cutter() -> Any:
    """Return the Ray task that cuts rows on the node that stores the objects."""
    # The task reserves no CPU, because the workers reserve all of them.
    return ray.remote(num_cpus=0, max_retries=2)(_cut_rows)


def _cut_rows(cuts: Sequence[Cut], *stored: Any) -> Any:
    rows = [cut.of(value) for cut, value in zip(cuts, stored, strict=True)]
    return rows[0] if len(rows) == 1 else tuple(rows)


def explain_full(what: str, value: Any = None) -> str:
    """Return the message for a value that could not be stored, with advice.

    Args:
        what: description of the value for the message.
        value: the value, whose ``nbytes`` is shown if it has one.
    """
    size = getattr(value, "nbytes", 0)
    amount = f" ({_megabytes(size)})" if size else ""
    stores = {
        node["NodeManagerAddress"]: _megabytes(node["Resources"].get("object_store_memory", 0.0))
        for node in ray.nodes()
        if node["Alive"]
    }
    sizes = ", ".join(f"{address}: {store}" for address, store in stores.items())
    return (
        f"{what}{amount} does not fit into Ray's object store ({sizes}), and the disk to which it spills is full. Free "
        "disk space, let go of handles that are not needed, send less at once, or give the store more memory: "
        "runtime.object_store_memory for a Ray of this run's own, `ray start --object-store-memory` for a cluster"
    )


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"
