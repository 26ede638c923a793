"""Recording of a worker group's call, its replay in this process, and the comparison of the outcomes.

A record is a folder on the controller's machine with ``record.json`` (a description), ``call.pkl`` and ``outcome.pkl``
(pickles, which are loaded only if the caller trusts them), and ``state/<role>/`` with the files that
:meth:`rollcast.Worker.record_state` wrote on the workers' nodes. Recording works on every runtime.
"""

from __future__ import annotations

import filecmp
import functools
import importlib
import importlib.util
import json
import logging
import pdb  # noqa: T100  # for --debug
import pickle
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rollcast import DataProto, ResourcePool, Worker, WorkerGroup, WorkerHost
from rollcast.contracts.dispatch import RankCall
from rollcast.contracts.files import replace_file
from rollcast.contracts.runtime import runtimes
from rollcast.contracts.worker import ClassWithInitArgs
from rollcast.errors import ColumnError, ConfigError, WorkerError

__all__ = [
    "CallOutcome",
    "CallRecord",
    "CallRecorder",
    "Finding",
    "Replay",
    "compare",
    "load_record",
    "replay",
]

logger = logging.getLogger(__name__)

#: Bytes of a file that are transferred at a time.
_PART = 64 << 20
#: In a worker: role → folder of the most recently written state.
_folders: dict[str, Path] = {}
_WANTED = re.compile(r"(?:(?P<role>[\w.-]+)\.)?(?P<method>\w+)(?::(?P<number>[1-9]\d*))?")


@dataclass(frozen=True)
class CallRecord:
    """A recorded call.

    Attributes:
        group, role, method: names of the called group, role and method.
        world_size: number of ranks of the group.
        roles: role → class with arguments, for all roles of the group.
        env: environment variables of the group's processes.
        args, kwargs: arguments from the controller, with handles fetched.
    """

    group: str
    role: str
    method: str
    world_size: int
    roles: Mapping[str, ClassWithInitArgs[Any]]
    env: Mapping[str, str]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CallOutcome:
    """The result of a call; ``error`` is the error message if the call failed."""

    result: Any = None
    error: str = ""


class _Recording:
    """A call that is being recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def end(self, result: Any) -> None:
        """Write the call's result."""
        self._write(CallOutcome(_fetched(result)))

    def __enter__(self) -> None:
        """Start the context; an exception raised inside is recorded as the outcome."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._write(CallOutcome(error=f"{type(error).__name__}: {error}"))

    def _write(self, outcome: CallOutcome) -> None:
        _dump(outcome, self.folder / "outcome.pkl")
        logger.info("recorded in %s; `rollcast replay %s` runs the call again", self.folder, self.folder)


class CallRecorder:
    """A recorder of the first call, or of the call with a given number, of one method.

    Args:
        wanted: ``method`` or ``role.method``, optionally followed by the number of the call, such as ``:3``.
        folder: parent folder of the record.

    Raises:
        ConfigError: ``wanted`` is malformed.
    """

    def __init__(self, wanted: str, folder: Path) -> None:
        parts = _WANTED.fullmatch(wanted)
        if parts is None:
            raise ConfigError(
                f"runtime.record is {wanted!r}; it names a method, as in update_actor, actor_rollout.update_actor or "
                "update_actor:3 for its third call"
            )
        self.wanted = wanted
        self._role, self._method = parts["role"], parts["method"]
        self._number = int(parts["number"] or 1)
        self._folder = folder
        self._calls: Counter[str] = Counter()
        self.recorded: Path | None = None

    def begin(
        self, group: WorkerGroup, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> _Recording | None:
        """Start recording this call if it is the one requested; return the recording, else None.

        Raises:
            WorkerError: the group was attached to, so the arguments of its workers are unknown here.
        """
        self._calls[f"{group.role}.{method}"] += 1
        if self.recorded is not None or method != self._method or self._role not in (None, group.role):
            return None
        if self._calls[f"{group.role}.{method}"] != self._number:
            return None
        spec = group.launch_spec
        if spec is None:
            raise WorkerError(f"{group!r} was attached to; only calls of groups that this process started are recorded")
        folder = self._new_folder(f"{group.role}.{method}-{self._number}")
        self.recorded = folder
        record = CallRecord(
            spec.name,
            group.role,
            method,
            group.world_size,
            dict(spec.roles),
            dict(spec.env),
            tuple(_fetched(value) for value in args),
            {key: _fetched(value) for key, value in kwargs.items()},
        )
        _dump(record, folder / "call.pkl")
        for role in spec.roles:
            _bring_state(group, role, folder / "state" / role)
        about = {"group": spec.name, "role": group.role, "method": method, "call": self._number}
        about |= {"world_size": group.world_size, "recorded_at": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        (folder / "record.json").write_text(json.dumps(about, indent=2) + "\n")
        return _Recording(folder)

    def describe_calls(self) -> str:
        """Return text that lists the calls made so far, with their numbers."""
        return ", ".join(f"{name} ({count})" for name, count in self._calls.items()) or "none"

    def _new_folder(self, name: str) -> Path:
        attempt = 0
        while (folder := self._folder / (f"{name}.{attempt}" if attempt else name)).exists():
            attempt += 1
        folder.mkdir(parents=True)
        return folder


def load_record(folder: Path, trust_pickle: bool = False) -> tuple[CallRecord, CallOutcome | None]:
    """Load a record and its outcome, which is None if the process ended before the call did.

    Args:
        folder: a record.
        trust_pickle: True to load the record's pickles, which can execute any code of their author.

    Raises:
        ConfigError: the folder contains no record, the record is not trusted, or it cannot be loaded here.
    """
    if not (folder / "call.pkl").is_file():
        raise ConfigError(f"{folder} holds no record (call.pkl is missing); runs put theirs into RUN_DIR/records")
    if not trust_pickle:
        raise ConfigError(
            f"{folder} holds pickles (call.pkl, outcome.pkl), which can run any code when they are loaded. Add "
            "--trust-pickle (in Python trust_pickle=True) if you trust whoever recorded it"
        )
    try:
        record = pickle.loads((folder / "call.pkl").read_bytes())
        file = folder / "outcome.pkl"
        outcome = pickle.loads(file.read_bytes()) if file.exists() else None
    except (ImportError, AttributeError, EOFError, pickle.UnpicklingError) as error:
        raise ConfigError(
            f"{folder} cannot be loaded: {type(error).__name__}: {error}; install what the recorded run had installed"
        ) from error
    return record, outcome


class _Written(NamedTuple):
    """The sizes in bytes of the files that a rank wrote, by their paths in its folder."""

    folder: str
    files: dict[str, int]


def _bring_state(group: WorkerGroup, role: str, target: Path) -> None:
    """Write the state of a role on all ranks, and collect the files in ``target``.

    Raises:
        WorkerError: a worker cannot write its state, or two ranks wrote different files with the same name.
    """
    target.mkdir(parents=True)
    written: list[_Written] = group.execute_func(_record_state, role)
    try:
        for rank, (folder, files) in enumerate(written):
            for name, size in files.items():
                _bring_file(group, rank, f"{folder}/{name}", size, target / name)
    finally:
        group.execute_func(_drop_state, role)


def _bring_file(group: WorkerGroup, rank: int, source: str, size: int, target: Path) -> None:
    """Copy a file of a rank; compare it with the existing copy if another rank has written it too."""
    target.parent.mkdir(parents=True, exist_ok=True)
    file = target.with_name(f".{target.name}.rank{rank}")
    with file.open("wb") as out:
        for start in range(0, size, _PART):
            out.write(_call_on(group, rank, _read_part, source, start, _PART))
    if not target.exists():
        file.rename(target)
        return
    equal = filecmp.cmp(file, target, shallow=False)
    file.unlink()
    if not equal:
        raise WorkerError(f"record_state: rank {rank} and one before it wrote a different {target.name}")


def _call_on(group: WorkerGroup, rank: int, function: Callable[..., Any], *args: Any) -> Any:
    refs = group.send("run_function", [(rank, RankCall((function, (group.role,), *args)))])
    return group.receive("run_function", [rank], refs)[0]


def _record_state(worker: Worker, role: str) -> _Written:
    folder = Path(tempfile.mkdtemp(prefix="rollcast-record-"))
    _folders[role] = folder
    try:
        worker.colocated[role].record_state(str(folder))
    except BaseException:
        _drop_state(worker, role)
        raise
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return _Written(str(folder), {path.relative_to(folder).as_posix(): path.stat().st_size for path in files})


def _read_part(worker: Worker, file: str, start: int, count: int) -> bytes:  # noqa: ARG001  # see run_function
    with open(file, "rb") as source:
        source.seek(start)
        return source.read(count)


def _drop_state(worker: Worker, role: str) -> None:  # noqa: ARG001
    shutil.rmtree(_folders.pop(role), ignore_errors=True)


def _fetched(value: Any) -> Any:
    if type(value) in (list, tuple):  # a dispatch mode may collect a list by rank
        return type(value)(_fetched(part) for part in value)
    return value.local() if isinstance(value, DataProto) else value


def _dump(value: Any, file: Path) -> None:
    # With cloudpickle, classes defined in the script itself are pickled by value into the record.
    has_cloudpickle = importlib.util.find_spec("cloudpickle") is not None
    pickler: Any = importlib.import_module("cloudpickle") if has_cloudpickle else pickle
    replace_file(file, pickler.dumps(value))


@dataclass(frozen=True)
class Finding:
    """The comparison of one value of the results.

    Attributes:
        where: path of the value, such as ``result['old_log_probs']``.
        difference: largest absolute difference; 0 if equal, infinite if the values cannot be compared.
        detail: text that describes both values.
    """

    where: str
    difference: float
    detail: str


@dataclass(frozen=True)
class Replay:
    """The outcome of a replay.

    Attributes:
        record: the recorded call.
        recorded, replayed: outcomes of the call; ``recorded`` is None if the process ended before the call did.
        findings: comparisons, one for each value of the results.
    """

    record: CallRecord
    recorded: CallOutcome | None
    replayed: CallOutcome
    findings: tuple[Finding, ...]

    def agrees(self, atol: float) -> bool:
        """Return True if no difference is larger than ``atol``, and both calls or neither failed."""
        failed = self.recorded is not None and bool(self.recorded.error)
        return failed == bool(self.replayed.error) and all(finding.difference <= atol for finding in self.findings)


def replay(folder: Path, debug: bool = False, trust_pickle: bool = False) -> Replay:
    """Build the workers of a record in this process, restore their state, and make the call.

    Args:
        folder: a record.
        debug: True to stop in the debugger at the first line of the worker's method.
        trust_pickle: True to load the record's pickles, which can execute any code of their author.

    Raises:
        ConfigError: there is no such record, it is not trusted, or it cannot be loaded here.
        WorkerError: a worker cannot be built or cannot restore its state.
        DispatchError: the dispatch mode cannot send the call's arguments to a single rank.
    """
    record, recorded = load_record(folder, trust_pickle)
    local = runtimes.get("local", requested_by="rollcast replay")
    with local.from_config(local.config_schema(), processes=1) as runtime:
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
            replayed = CallOutcome(_fetched(result))
        except WorkerError as error:
            replayed = CallOutcome(error=f"{type(error).__name__}: {error}")
    findings: tuple[Finding, ...] = ()
    if recorded is not None and not recorded.error and not replayed.error:
        findings = tuple(compare(_one_rank(recorded.result, record.world_size), replayed.result))
    return Replay(record, recorded, replayed, findings)


def _one_rank(result: Any, world_size: int) -> Any:
    """Return the part that a single rank would have returned of a list by rank; return other results unchanged."""
    return result[:1] if isinstance(result, list) and len(result) == world_size > 1 else result


def compare(recorded: Any, replayed: Any, where: str = "result") -> Iterator[Finding]:
    """Yield a finding for each value of two results: DataProto columns, tensors, numbers, items of containers."""
    pairs: dict[Any, tuple[Any, Any]]
    if isinstance(recorded, DataProto) and isinstance(replayed, DataProto):
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


def _column(batch: Any, name: str) -> Any:
    try:
        column = batch[name]
    except ColumnError:
        return _MISSING
    return column if hasattr(column, "is_nested") else column.tolist()


def _difference(left: Any, right: Any) -> float:
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
