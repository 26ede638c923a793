"""The state of every plugin, from metadata or by really importing it: the data of ``rollcast plugins``."""

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

__all__ = ["PluginReport", "State", "report"]

State = Literal["ok", "in-process", "broken", "conflict", "incompatible"]

_log = logging.getLogger("rollcast.plugins")

_POLL = 0.05  # seconds between looks at the child's answers

# sys.path first: the core itself may be on it only because this process put it there.
_BOOT = (
    "import json, sys; request = json.load(sys.stdin); sys.path[:] = request['path']; "
    "from rollcast.plugins.health import serve; serve(request)"
)


@dataclass(frozen=True)
class PluginReport:
    """One plugin and its state.

    Attributes:
        group, name: entry-point group and name.
        distribution, version: the provider; empty for an in-process plugin.
        value: the entry point, or where an in-process plugin was defined.
        state: ``ok``; ``in-process``; ``broken`` (it cannot be imported, or does not pass the check
            of its group); ``conflict`` (claimed more than once); ``incompatible`` (made for another
            version of the core).
        cause: the reason for a state that is not ok; empty if it is.
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
    """Return every plugin, installed or in-process, sorted by group and name.

    Args:
        check: really import each plugin, in a process of its own. Otherwise no code of any plugin
            runs: metadata shows conflicts, version ranges, malformed entry points, missing
            top-level modules and missing distributions, but nothing inside of modules.
        groups: only these groups; all if not given.
        registries: modules to import in that process first, because they declare the registries
            that know the checks of the groups; those of this process if not given.
        timeout: seconds that the import of one plugin may take.

    Raises:
        PluginError: the process for checking cannot be started.
    """
    declared = {registry.group: registry.defined_in for registry in find_registries()}
    wanted = set(find_groups() if groups is None else groups)
    # Groups of other projects are in the metadata too.
    ours = sorted(group for group in wanted if group in declared or group.startswith("rollcast."))
    rows = {plugin: _judge(plugin, {*declared, *describe_groups()}) for group in ours for plugin in find_plugins(group)}
    if check:
        sound = [plugin for plugin, (state, _) in rows.items() if state == "ok"]
        first = set(declared.values()) - {"__main__"} if registries is None else registries
        rows |= {plugin: (state, cause) for plugin, state, cause in _check(sound, sorted(first), timeout)}
    found = [
        PluginReport(p.group, p.name, p.distribution, p.version, p.value, state, cause)
        for p, (state, cause) in rows.items()
    ]
    for entry in inprocess.entries():
        if not entry.is_hidden and (groups is None or entry.group in wanted):
            found.append(PluginReport(entry.group, entry.name, "", "", entry.location, "in-process"))
    return sorted(found, key=lambda row: (row.group, row.name, row.distribution))


def _judge(plugin: PluginInfo, known: set[str]) -> tuple[State, str]:
    """Return the state of an installed plugin and its cause, as far as metadata shows."""
    if plugin.group not in known:
        # A plugin may declare a group of its own; a name this close to a known group is a slip.
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

    If the child dies or hangs, the plugin it was at is the culprit, and another child goes on with
    the rest.
    """
    left = list(plugins)
    while left:
        is_ready = False
        request = {"registries": list(registries), "plugins": [[plugin.group, plugin.name] for plugin in left]}
        for kind, text in _run_child(request, timeout):
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


def _run_child(request: dict[str, Any], timeout: float) -> Iterator[tuple[str, str]]:
    """Yield the messages of one child; the last is ``died`` if it did not answer for every plugin."""
    if not sys.executable:
        raise PluginError("cannot check plugins: this Python does not know its own executable")
    # Answers go through a file of their own: a plugin may print, even from native code, close
    # descriptors, or leave a process behind that would keep a pipe open.
    with tempfile.TemporaryDirectory(prefix="rollcast-check-") as folder:
        asked, answers, output = (Path(folder, name) for name in ("asked", "answers", "output"))
        asked.write_text(json.dumps({**request, "path": sys.path, "answers": str(answers)}))
        answers.touch()
        with asked.open() as source, output.open("wb") as sink:
            command = [sys.executable, "-c", _BOOT]
            child = subprocess.Popen(command, stdin=source, stdout=sink, stderr=sink, start_new_session=True)  # noqa: S603
        try:
            yield from _follow(child, answers, output, timeout, len(request["plugins"]))
        finally:
            # The whole session: a plugin may have left processes of its own behind.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _follow(
    child: subprocess.Popen[bytes], answers: Path, output: Path, timeout: float, missing: int
) -> Iterator[tuple[str, str]]:
    deadline, pending = time.monotonic() + timeout, ""
    with answers.open() as stream:
        while missing:
            code = child.poll()  # before reading, so that the last words of a dead child count
            *lines, pending = (pending + stream.read()).split("\n")
            for line in lines:
                kind, text = json.loads(line)
                missing -= kind not in ("ready", "warning")
                deadline = time.monotonic() + timeout
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


def serve(request: dict[str, Any]) -> None:
    """Import the requested plugins one by one and append an answer for each to a file; runs in the child."""

    def answer(kind: str, text: str = "") -> None:
        with open(request["answers"], "a", encoding="utf-8") as stream:
            stream.write(json.dumps([kind, text]) + "\n")

    for module in request["registries"]:
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the module may be a stranger's
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
    # Threads and exit handlers that plugins left behind are no reason to wait.
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
