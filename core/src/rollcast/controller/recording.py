"""Records one call at the boundary of a worker group: what went in, the workers' state before it, what came out.

A record is a folder: ``record.json`` (what it is, for people and tools), ``call.pkl`` and
``outcome.pkl`` (pickles: load only records that you trust), and ``state/<role>/`` as the workers'
:meth:`~rollcast.controller.worker.Worker.record_state` wrote it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import pickle
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcast.controller.hosting import is_handle
from rollcast.controller.worker import ClassWithInitArgs, Worker
from rollcast.errors import ConfigError, WorkerError
from rollcast.files import replace_file

if TYPE_CHECKING:
    from rollcast.controller.calls_by_name import CallsByName

__all__ = ["CallOutcome", "CallRecord", "CallRecorder", "load_record"]

logger = logging.getLogger(__name__)

_WANTED = re.compile(r"(?:(?P<role>[\w.-]+)\.)?(?P<method>\w+)(?::(?P<number>[1-9]\d*))?")


@dataclass(frozen=True)
class CallRecord:
    """A call before it was made.

    Attributes:
        group, role, method: what was called.
        world_size: ranks of the group.
        roles: role → class with arguments, of all roles of the group.
        env: environment variables of its processes.
        args, kwargs: as the controller gave them; handles were fetched.
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
    """What a call gave back; ``error`` is its message if it failed."""

    result: Any = None
    error: str = ""


class _Recording:
    """A call that is being recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def end(self, result: Any) -> None:
        """The call is over."""
        self._write(CallOutcome(_fetched(result)))

    def __enter__(self) -> None:
        """What fails inside is the call's outcome."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._write(CallOutcome(error=f"{type(error).__name__}: {error}"))

    def _write(self, outcome: CallOutcome) -> None:
        _dump(outcome, self.folder / "outcome.pkl")
        logger.info("recorded in %s; `rollcast replay %s` runs the call again", self.folder, self.folder)


class CallRecorder:
    """Records the first call of a method, or the one of a given number.

    Args:
        wanted: ``method``, ``role.method``, and with ``:3`` the third call.
        folder: the record becomes a folder in it.

    Raises:
        ConfigError: ``wanted`` has another form.
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
        self, group: CallsByName, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> _Recording | None:
        """To be called before each call; gives what has to hear of its end, if it is the one.

        Raises:
            WorkerError: the group was attached to, so nobody here knows how its workers are built.
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
            state = folder / "state" / role
            state.mkdir(parents=True)
            group.execute_func(_record_state, role, str(state.absolute()))
        about = {"group": spec.name, "role": group.role, "method": method, "call": self._number}
        about |= {"world_size": group.world_size, "recorded_at": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        (folder / "record.json").write_text(json.dumps(about, indent=2) + "\n")
        return _Recording(folder)

    def describe_calls(self) -> str:
        """The calls that were made, with their numbers."""
        return ", ".join(f"{name} ({count})" for name, count in self._calls.items()) or "none"

    def _new_folder(self, name: str) -> Path:
        taken = 0
        while (folder := self._folder / (f"{name}.{taken}" if taken else name)).exists():
            taken += 1
        folder.mkdir(parents=True)
        return folder


def load_record(folder: Path) -> tuple[CallRecord, CallOutcome | None]:
    """A record, and its outcome unless the process ended before the call did.

    Raises:
        ConfigError: the folder holds no record, or something in it cannot be loaded here.
    """
    if not (folder / "call.pkl").is_file():
        raise ConfigError(f"{folder} holds no record (call.pkl is missing); runs put theirs into RUN_DIR/records")
    try:
        record = pickle.loads((folder / "call.pkl").read_bytes())
        file = folder / "outcome.pkl"
        outcome = pickle.loads(file.read_bytes()) if file.exists() else None
    except (ImportError, AttributeError, EOFError, pickle.UnpicklingError) as error:
        raise ConfigError(
            f"{folder} cannot be loaded: {type(error).__name__}: {error}; install what the recorded run had installed"
        ) from error
    return record, outcome


def _record_state(worker: Worker, role: str, folder: str) -> None:
    worker.colocated[role].record_state(folder)


def _fetched(value: Any) -> Any:
    return value.get() if is_handle(value) else value


def _dump(value: Any, file: Path) -> None:
    # What was defined in the script itself travels with the record where cloudpickle is there.
    found = importlib.util.find_spec("cloudpickle") is not None
    pickler: Any = importlib.import_module("cloudpickle") if found else pickle
    replace_file(file, pickler.dumps(value))
