"""Running health checks: a process for each distribution, so that no check can take the doctor down."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from rollcast.contracts.health import Finding, HealthSetup, health_checks, problem
from rollcast.errors import PluginError
from rollcast.plugins.discovery import PluginInfo, find_plugins
from rollcast.plugins.health import end_with_parent, run_child

__all__ = ["Examined", "examine", "serve"]

#: Seconds for importing a check; what its ``run`` may take, it says itself.
_IMPORT_LIMIT_S = 60.0
#: Processes at a time; most of their time is importing.
_AT_ONCE = 4
_BOOT = (
    "import json, sys; request = json.load(sys.stdin); sys.path[:] = request['path']; "
    "from rollcast.cli.checkup import serve; serve(request)"
)


@dataclass(frozen=True)
class Examined:
    """A finding and its origin.

    Attributes:
        subject: heading of the check; its name where the check could not be loaded.
        check: name of the check in its group.
        distribution: provider of the check, with its version.
        finding: the finding.
    """

    subject: str
    check: str
    distribution: str
    finding: Finding

    def as_dict(self) -> dict[str, str]:
        """Return one flat JSON object."""
        return {
            "subject": self.subject,
            "check": self.check,
            "distribution": self.distribution,
            **{key: str(value) for key, value in asdict(self.finding).items()},
        }


def examine(setup: HealthSetup, only: Sequence[str] = ()) -> list[Examined]:
    """Run every installed health check, and return all findings in the order of the checks' distributions.

    Args:
        setup: the run that is asked about.
        only: names of checks, or of distributions; all checks if empty.

    Raises:
        PluginError: this Python does not know its own executable.
    """
    plugins = [
        plugin
        for plugin in find_plugins(health_checks.group)
        if not only or {plugin.name, plugin.distribution} & set(only)
    ]
    ordered = sorted(plugins, key=lambda plugin: (plugin.distribution != "rollcast", plugin.distribution, plugin.name))
    batches = [tuple(batch) for _, batch in groupby(ordered, key=lambda plugin: plugin.distribution)]
    request = {"config": setup.config}
    # Daemons, and not an executor, whose threads an interrupted process would wait for: the children end with it.
    results: list[list[Examined]] = [[] for _ in batches]
    errors: list[Exception] = []
    turn = threading.Semaphore(min(_AT_ONCE, (os.cpu_count() or 1) + 1))

    def work(place: int) -> None:
        with turn:
            try:
                results[place] = list(_examine_one(batches[place], request))
            except Exception as error:  # noqa: BLE001  # raised again below
                errors.append(error)

    threads = [threading.Thread(target=work, args=(place,), daemon=True) for place in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [finding for part in results for finding in part]


def _examine_one(plugins: Sequence[PluginInfo], request: Mapping[str, Any]) -> Iterator[Examined]:
    """Run the checks of one distribution; one that ends its process is a finding, and another process goes on."""
    left = list(plugins)
    while left:
        names = [f"{remaining_plugin.distribution}:{remaining_plugin.name}" for remaining_plugin in left]
        for kind, text in run_child({**request, "plugins": names}, _IMPORT_LIMIT_S, _BOOT):
            plugin = left.pop(0)
            if kind == "died":
                fault = _broken(f"the check {plugin.name!r} of {plugin.owner} {text}", plugin.distribution)
                yield Examined(plugin.name, plugin.name, plugin.owner, fault)
                continue
            answer = json.loads(text)
            for row in answer["findings"]:
                yield Examined(answer["subject"], plugin.name, plugin.owner, Finding(**row))


def _broken(text: str, distribution: str) -> Finding:
    """Return the finding about a check that did not end well."""
    fix = f"report it to the authors of {distribution}, or uninstall it: pip uninstall {distribution}"
    return problem("health check", " ".join(text.split()), fix)


# -- in the child process --------------------------------------------------------------------------


def serve(request: Mapping[str, Any]) -> None:
    """Run the requested checks one by one and append an answer for each to a file; runs in the child."""

    def answer(kind: str, text: str) -> None:
        with open(request["answers"], "a", encoding="utf-8") as stream:
            stream.write(json.dumps([kind, text]) + "\n")

    end_with_parent()
    setup = HealthSetup(request["config"])
    for name in request["plugins"]:
        subject, findings = _run_one(name, setup, lambda seconds: answer("limit", str(seconds)))
        answer("done", json.dumps({"subject": subject, "findings": [asdict(finding) for finding in findings]}))
        answer("limit", str(_IMPORT_LIMIT_S))
    # Threads and exit handlers that checks left behind are no reason to wait.
    os._exit(0)


def _run_one(name: str, setup: HealthSetup, limit: Callable[[float], None]) -> tuple[str, list[Finding]]:
    distribution, _, plain = name.partition(":")
    try:
        check = health_checks.get(name)
    except PluginError as error:
        fix = f"reinstall or uninstall {distribution}: pip install --force-reinstall {distribution}"
        return plain, [problem("health check", " ".join(str(error).split()), fix)]
    subject, findings = str(getattr(check, "subject", "") or plain), []
    try:
        limit(float(check.timeout_s))
        for finding in check().run(setup):
            if not isinstance(finding, Finding):
                raise TypeError(f"run() returned {finding!r}, which is not a Finding")
            findings.append(finding)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # a stranger's check may raise anything
        text = f"the check {plain!r} of {distribution} raised {type(error).__name__}: {error}"
        findings.append(_broken(text, distribution))
    return subject, findings
