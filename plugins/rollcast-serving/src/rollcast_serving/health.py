"""Health checks of replicas: the interpreters that run them, and what is installed there."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollcast.contracts.health import BaseHealthCheck, Finding, HealthSetup, health_checks, ok, problem, warning
from rollcast.contracts.rollout import rollouts

__all__ = ["ReplicaCheck", "engine_findings"]

_LIMIT_S = 300.0
#: Runs in the replicas' interpreter. Its answer goes to a file, because imports may print.
_PROBE = """
import importlib.metadata, json, platform, sys
asked = json.load(sys.stdin)
found = {"python": platform.python_version(), "versions": {}, "findings": []}
for name in asked["distributions"]:
    try:
        found["versions"][name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found["versions"][name] = None
if all(found["versions"].values()):
    try:
        from rollcast_serving.health import engine_findings
        found["findings"] = engine_findings(asked["rollout"], asked["config"])
    except BaseException as error:
        found["error"] = f"{type(error).__name__}: {error}"
with open(asked["answer"], "w") as file:
    json.dump(found, file)
"""


class ReplicaCheck(BaseHealthCheck):
    """The environments that ``replica.python`` names: their Python, rollcast, and engine."""

    subject = "replicas"
    timeout_s = 2 * _LIMIT_S + 30.0

    def run(self, setup: HealthSetup) -> Iterator[Finding]:
        """Ask each interpreter what it has, and run the health checks of its rollout's distribution there."""
        for section in ("rollout", "judge.rollout"):
            python, name = setup.get(f"{section}.replica.python"), setup.get(f"{section}.name")
            if python is not None and name is not None:
                yield from self._environment(setup, section, str(python), str(name))

    def _environment(self, setup: HealthSetup, section: str, python: str, name: str) -> Iterator[Finding]:
        key = f"{section}.replica.python"
        if shutil.which(python) is None:
            fix = f"{key}=PATH of an interpreter, such as DIR/bin/python of a virtual environment"
            yield problem(key, f"{python} is not an executable file", fix)
            return
        owner = rollouts.find(name).distribution
        names = list(dict.fromkeys(["rollcast", "rollcast-serving", *([owner] if owner else [])]))
        added = setup.get(f"{section}.replica.env", {})
        answer = _ask(python, {"distributions": names, "rollout": name, "config": _as_replica(setup, section)}, added)
        if isinstance(answer, str):
            yield problem(
                key, f"{python} does not work: {answer}", f"make the environment again, or give another {key}"
            )
            return
        yield from _compare(key, python, answer)
        for row in answer["findings"]:
            yield Finding(
                f"{section}: {row['name']}",
                row["state"],
                f"{row['message']} (in the environment of {python})",
                row["fix"],
            )


def _compare(key: str, python: str, answer: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield findings about the versions of an environment, against those here."""
    wrong = {name: version for name, version in answer["versions"].items() if version != _version(name)}
    for name, version in wrong.items():
        there = "is not installed" if version is None else f"has version {version}"
        fix = f"{python} -m pip install '{name}=={_version(name)}'"
        yield problem(key, f"{name} {there} in the environment of {python}; here it has {_version(name)}", fix)
    if "error" in answer:
        fix = f"{python} -m pip check, then reinstall what it names"
        yield problem(key, f"the checks of the rollout do not run in {python}: {answer['error']}", fix)
    here = platform.python_version()
    if answer["python"].rpartition(".")[0] != here.rpartition(".")[0]:
        fix = f"make the environment with Python {here.rpartition('.')[0]}, unless the engine has no release for it"
        yield warning(key, f"{python} is Python {answer['python']}; here it is {here}", fix)
    elif not wrong:
        yield ok(key, f"{python}: Python {answer['python']}, the same rollcast as here")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _as_replica(setup: HealthSetup, section: str) -> dict[str, Any]:
    """Return the configuration as it looks from inside a replica: the engine has to be in that environment."""
    own: dict[str, Any] = dict(setup.get(section, {}))
    own["replica"] = {**(own.get("replica") or {}), "python": None}
    return {"rollout": own}


def _ask(python: str, request: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, Any] | str:
    """Return what an interpreter reports, or why it reports nothing."""
    with tempfile.TemporaryDirectory(prefix="rollcast-doctor-") as folder:
        answer = Path(folder, "answer.json")
        try:
            done = subprocess.run(  # noqa: S603  # the interpreter is the one that the config names
                [python, "-c", _PROBE],
                input=json.dumps({**request, "answer": str(answer)}),
                env={**os.environ, **{name: str(value) for name, value in env.items()}},
                capture_output=True,
                text=True,
                timeout=_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"it did not answer within {_LIMIT_S:g} seconds"
        except OSError as error:
            return str(error)
        if not answer.is_file():
            last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
            return f"it ended with exit status {done.returncode}: {last[0]}"
        content: dict[str, Any] = json.loads(answer.read_text())
        return content


def engine_findings(rollout: str, config: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the findings of the health checks that a rollout's distribution announces, run in this process.

    Args:
        rollout: registry name of the rollout.
        config: configuration with the section ``rollout``.

    Raises:
        PluginError: the rollout or one of the checks cannot be loaded.
    """
    owner = rollouts.find(rollout, requested_by="rollout.name").distribution
    rollouts.get(rollout)
    setup = HealthSetup(config)
    own = [name for name in health_checks if health_checks.find(name).distribution == owner]
    return [asdict(finding) for name in own for finding in health_checks.get(name)().run(setup)]
