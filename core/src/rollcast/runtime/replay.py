"""Runs a recorded call again, in this process, and compares what comes out."""

from __future__ import annotations

import functools
import pdb  # noqa: T100  # for --debug
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollcast.controller.hosting import WorkerHost, is_handle
from rollcast.controller.recording import CallOutcome, CallRecord, load_record
from rollcast.controller.resource_pool import ResourcePool
from rollcast.controller.worker_group import WorkerGroup
from rollcast.errors import ColumnError, WorkerError
from rollcast.runtime.local import LocalRuntime

__all__ = ["Finding", "Replay", "compare", "replay"]


@dataclass(frozen=True)
class Finding:
    """How one value of the result compares.

    Attributes:
        where: such as ``result['old_log_probs']``.
        difference: largest absolute difference; 0 if equal, infinite if the values cannot be compared.
        detail: what they are.
    """

    where: str
    difference: float
    detail: str


@dataclass(frozen=True)
class Replay:
    """A call that was run again.

    Attributes:
        record: the recorded call.
        recorded, replayed: the outcomes; ``recorded`` is None where the process ended before the call did.
        findings: one for each value of the results.
    """

    record: CallRecord
    recorded: CallOutcome | None
    replayed: CallOutcome
    findings: tuple[Finding, ...]

    def agrees(self, atol: float) -> bool:
        """Whether no difference is larger than ``atol``, and both failed or neither."""
        failed = self.recorded is not None and bool(self.recorded.error)
        return failed == bool(self.replayed.error) and all(found.difference <= atol for found in self.findings)


def replay(folder: Path, debug: bool = False) -> Replay:
    """Build the workers of a record in this process, give them their state, and make the call.

    Args:
        folder: a record; see :mod:`rollcast.controller.recording`. It is unpickled: trust it.
        debug: stop in the debugger at the first line of the worker's method.

    Raises:
        ConfigError: there is no such record, or it cannot be loaded here.
        WorkerError: a worker cannot be built or take its state.
        DispatchError: the dispatch mode cannot give the call's arguments to one rank.
    """
    record, recorded = load_record(folder)
    with LocalRuntime() as runtime:
        group = WorkerGroup(ResourcePool([1]), record.roles, runtime=runtime, name=record.group, env=record.env)
        host: WorkerHost = group.workers[0].handle
        for role, worker in host.workers.items():
            worker.replay_state(str((folder / "state" / role).absolute()))
        worker = host.workers[record.role]
        if debug:
            setattr(worker, record.method, functools.partial(pdb.runcall, getattr(worker, record.method)))
        method = getattr(group.spawn([record.role])[record.role], record.method)
        try:
            result = method(*record.args, **record.kwargs)
            replayed = CallOutcome(result.get() if is_handle(result) else result)
        except WorkerError as error:
            replayed = CallOutcome(error=f"{type(error).__name__}: {error}")
    findings: tuple[Finding, ...] = ()
    if recorded is not None and not recorded.error and not replayed.error:
        findings = tuple(compare(_one_rank(recorded.result, record.world_size), replayed.result))
    return Replay(record, recorded, replayed, findings)


def _one_rank(result: Any, world_size: int) -> Any:
    """Where the result is a list by rank, what one rank would have given."""
    return result[:1] if isinstance(result, list) and len(result) == world_size > 1 else result


def compare(recorded: Any, replayed: Any, where: str = "result") -> Iterator[Finding]:
    """Compare two results, value by value: columns of DataProtos, tensors, numbers, items of containers."""
    if _is_batch(recorded) and _is_batch(replayed):
        names = {*recorded.keys(), *replayed.keys()}
        pairs = {name: (_column(recorded, name), _column(replayed, name)) for name in names}
        if recorded.meta_info or replayed.meta_info:
            yield from compare(recorded.meta_info, replayed.meta_info, f"{where}.meta_info")
    elif isinstance(recorded, Mapping) and isinstance(replayed, Mapping):
        pairs = {key: (recorded.get(key, _MISSING), replayed.get(key, _MISSING)) for key in {*recorded, *replayed}}
    elif isinstance(recorded, list | tuple) and isinstance(replayed, list | tuple) and len(recorded) == len(replayed):
        pairs = dict(enumerate(zip(recorded, replayed, strict=True)))
    else:
        yield Finding(where, _difference(recorded, replayed), f"{_describe(recorded)} / {_describe(replayed)}")
        return
    for key in sorted(pairs, key=str):
        yield from compare(*pairs[key], f"{where}[{key!r}]")


_MISSING = object()


def _is_batch(value: Any) -> bool:
    from rollcast.protocol import DataProto

    return isinstance(value, DataProto)


def _column(batch: Any, name: str) -> Any:
    try:
        column = batch[name]
    except ColumnError:
        return _MISSING
    return column if hasattr(column, "is_nested") else column.tolist()


def _difference(left: Any, right: Any) -> float:
    import torch

    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.is_nested and right.is_nested:
            left, right = left.values(), right.values()
        if left.shape != right.shape or left.dtype != right.dtype:
            return float("inf")
        if torch.equal(left, right) or not left.numel():
            return 0.0
        gap = (left.double() - right.double()).abs().masked_fill(left.isnan() & right.isnan(), 0.0)
        return float(gap.nan_to_num(float("inf")).max())
    if isinstance(left, int | float) and isinstance(right, int | float):
        return 0.0 if left == right or (left != left and right != right) else abs(float(left) - float(right))
    return 0.0 if type(left) is type(right) and bool(left == right) else float("inf")


def _describe(value: Any) -> str:
    if value is _MISSING:
        return "missing"
    if hasattr(value, "is_nested"):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {'ragged' if value.is_nested else list(value.shape)}"
    return f"{value!r:.40}"
