"""The state of every plugin, from metadata or by importing it, as shown by ``rollcast plugins``."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from rollcast.errors import PluginConflictError, PluginError, PluginTypeError, PluginVersionError
from rollcast.plugins import inprocess
from rollcast.plugins.discovery import (
    PluginInfo,
    describe_groups,
    find_claims,
    find_groups,
    find_metadata_complaint,
    find_plugins,
    find_version_complaint,
    load_plugin,
)
from rollcast.plugins.registry import explain_conflict, find_registries

__all__ = ["PluginReport", "State", "end_with_parent", "report", "run_child"]

State = Literal["ok", "in-process", "broken", "conflict", "incompatible"]

_log = logging.getLogger("rollcast.plugins")

_POLL = 0.05  # seconds between reads of the child's answers
_PARENT_POLL = 0.5  # seconds between a child's checks of its parent

# Set sys.path first, because the core may be found only through this process's path.
_BOOT = (
    "import json, sys; request = json.load(sys.stdin); sys.path[:] = request['path']; "
    "from rollcast.plugins.health import serve; serve(request)"
)


@dataclass(frozen=True)
class PluginReport:
    """One plugin and its state.

    Attributes:
        group, name: entry-point group and name.
        distribution, version: providing distribution and its version; empty for an in-process plugin.
        value: value of the entry point, or definition of an in-process plugin.
        state: ``ok``; ``in-process``; ``broken`` (it cannot be imported, or does not pass the check
            of its group); ``conflict`` (claimed more than once); ``incompatible`` (made for another
            version of the core).
        cause: reason for a state that is not ok; empty if the state is ok.
    """

    group: str
    name: str
    distribution: str
    version: str
    value: str
    state: State
    cause: str = ""


def report(
    check: bool = False,
    groups: Iterable[str] | None = None,
    registries: Iterable[str] | None = None,
    timeout: float = 120.0,
) -> list[PluginReport]:
    """Report on all plugins, installed and in-process, sorted by group and name.

    Args:
        check: True to import each plugin in a separate process. Otherwise no plugin code runs: the metadata shows
            conflicts, version ranges, malformed entry points, missing top-level modules and missing distributions,
            but no errors inside modules.
        groups: groups to report on; by default all.
        registries: modules to import in the separate process first, which declare the registries with the checks of
            the groups; by default those of this process.
        timeout: time limit for importing one plugin in seconds.

    Raises:
        PluginError: the separate process cannot be started.
    """
    declared = {registry.group: registry.defined_in for registry in find_registries()}
    wanted = set(find_groups() if groups is None else groups)
    # The metadata also contains groups of other projects.
    ours = sorted(group for group in wanted if group in declared or group.startswith("rollcast."))
    rows = {plugin: _judge(plugin, {*declared, *describe_groups()}) for group in ours for plugin in find_plugins(group)}
    if check:
        sound = [plugin for plugin, (state, _) in rows.items() if state == "ok"]
        first = set(declared.values()) - {"__main__"} if registries is None else registries
        rows |= {plugin: (state, cause) for plugin, state, cause in _check(sound, sorted(first), timeout)}
    plugins = [
        PluginReport(p.group, p.name, p.distribution, p.version, p.value, state, cause)
        for p, (state, cause) in rows.items()
    ]
    for entry in inprocess.entries():
        if not entry.is_hidden and (groups is None or entry.group in wanted):
            plugins.append(PluginReport(entry.group, entry.name, "", "", entry.location, "in-process"))
    return sorted(plugins, key=lambda row: (row.group, row.name, row.distribution))


def _judge(plugin: PluginInfo, known: set[str]) -> tuple[State, str]:
    """Return the state of an installed plugin and its cause, as far as its metadata shows."""
    if plugin.group not in known:
        # A plugin may declare its own group, but a name this similar to a known group is a typo.
        prefix, _, short = plugin.group.rpartition(".")
        near = difflib.get_close_matches(short, [g.rpartition(".")[2] for g in known], n=1, cutoff=0.8)
        if near:
            return "broken", f"there is no group {plugin.group!r}; did its author mean '{prefix}.{near[0]}'?"
    claims = find_claims(plugin.group, plugin.name)
    if len(claims) > 1:
        return "conflict", explain_conflict(claims)
    incompatible = find_version_complaint(plugin)
    if incompatible is not None:
        return "incompatible", incompatible
    broken = find_metadata_complaint(plugin)
    return ("ok", "") if broken is None else ("broken", broken)


# -- importing in a child process ------------------------------------------------------------------


def _check(
    plugins: Sequence[PluginInfo], registries: Sequence[str], timeout: float
) -> Iterator[tuple[PluginInfo, State, str]]:
    """Import each plugin in a child process and yield its state and cause.

    If the child dies or hangs, the plugin that it was importing is reported as broken, and a new child continues with
    the remaining plugins.
    """
    left = list(plugins)
    while left:
        is_ready = False
        request = {"registries": list(registries), "plugins": [[plugin.group, plugin.name] for plugin in left]}
        for kind, text in run_child(request, timeout):
            if kind == "ready":
                is_ready = True
            elif kind == "warning":
                _log.warning("%s", text)
            elif not is_ready:
                raise PluginError(f"the process for checking plugins failed: it {text}")
            elif kind == "died":
                yield left.pop(0), "broken", f"importing it {text}"
            else:
                yield left.pop(0), cast(State, kind), text


def run_child(request: dict[str, Any], timeout: float, boot: str = "") -> Iterator[tuple[str, str]]:
    """Yield the messages of one child; the last is ``died`` if it did not answer for every plugin.

    Args:
        request: passed to the child as JSON, with this process's ``path`` and the file for ``answers``. One answer
            is due for each of its ``plugins``; answers of the kinds ``ready``, ``warning`` and ``limit`` do not count.
        timeout: seconds between two answers; the child changes it by the answer ``limit``, which is not yielded.
        boot: the child's program, which reads the request from standard input; :func:`serve` if empty.

    Raises:
        PluginError: this Python does not know its own executable.
    """
    if not sys.executable:
        raise PluginError("cannot check plugins: this Python does not know its own executable")
    # Answers are written to a separate file, because a plugin may print, even from native code, close descriptors, or
    # leave a process behind that would keep a pipe open.
    with tempfile.TemporaryDirectory(prefix="rollcast-check-") as folder:
        asked, answers, output = (Path(folder, name) for name in ("asked", "answers", "output"))
        asked.write_text(json.dumps({**request, "path": sys.path, "answers": str(answers)}))
        answers.touch()
        with asked.open() as source, output.open("wb") as sink:
            command = [sys.executable, "-c", boot or _BOOT]
            child = subprocess.Popen(command, stdin=source, stdout=sink, stderr=sink, start_new_session=True)  # noqa: S603
        try:
            yield from _follow(child, answers, output, timeout, len(request["plugins"]))
        finally:
            # Kill the whole session, because a plugin may have left processes behind.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _follow(
    child: subprocess.Popen[bytes], answers: Path, output: Path, timeout: float, missing: int
) -> Iterator[tuple[str, str]]:
    deadline, pending = time.monotonic() + timeout, ""
    with answers.open() as stream:
        while missing:
            code = child.poll()  # polled before reading, so that the last output of a dead child is read too
            *lines, pending = (pending + stream.read()).split("\n")
            for line in lines:
                kind, text = json.loads(line)
                timeout = float(text) if kind == "limit" else timeout
                missing -= kind not in ("ready", "warning", "limit")
                deadline = time.monotonic() + timeout
                if kind != "limit":
                    yield kind, text
            if missing and code is not None:
                how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
                last = output.read_text(errors="replace")[-2000:].strip().splitlines()[-3:]
                yield (
                    "died",
                    f"ended the process with {how}" + (f"; its last output: {' | '.join(last)}" if last else ""),
                )
                return
            if missing and time.monotonic() > deadline:
                yield "died", f"did not end within {timeout:g} seconds"
                return
            time.sleep(_POLL)


def end_with_parent() -> None:
    """End this process soon after its parent, which an interrupt may end at any time."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL)
        os._exit(1)

    threading.Thread(target=watch, name="rollcast-parent", daemon=True).start()


def serve(request: dict[str, Any]) -> None:
    """Import the requested plugins one by one, in the child, and append an answer for each to a file."""

    def answer(kind: str, text: str = "") -> None:
        with open(request["answers"], "a", encoding="utf-8") as stream:
            stream.write(json.dumps([kind, text]) + "\n")

    end_with_parent()
    for module in request["registries"]:
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # third-party modules may raise anything
            answer("warning", f"cannot check types of the groups that {module} declares: {error!r}")
    answer("ready")
    for group, name in request["plugins"]:
        try:
            _try(group, name)
        except PluginError as error:
            kinds: dict[type, State] = {PluginVersionError: "incompatible", PluginConflictError: "conflict"}
            answer(kinds.get(type(error), "broken"), str(error))
        else:
            answer("ok")
    # Exit without waiting for threads and exit handlers that plugins left behind.
    os._exit(0)


def _try(group: str, name: str) -> None:
    """Import a plugin, and run the checks of its group.

    Raises:
        PluginError: it cannot be imported, or does not pass.
    """
    for claim in find_claims(group, name):
        load_plugin(claim)
    # Only now, because the import may have declared the registry of the group.
    for registry in find_registries():
        if registry.group == group:
            obj = registry.get(name)
            try:
                complaint = None if registry.probe is None else registry.probe(obj)
            except Exception as error:  # noqa: BLE001  # a probe may call a stranger's code
                complaint = f"fails when it is tried: {type(error).__name__}: {error}"
            if complaint is not None:
                raise PluginTypeError(f"{registry.find(name)} does not work as {name!r} in {group}: it {complaint}")
