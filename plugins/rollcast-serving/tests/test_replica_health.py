"""Health checks of the replicas' environments, and of engines."""

from __future__ import annotations

import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollcast.contracts.health import Finding, HealthSetup, warning
from rollcast_serving import health
from rollcast_serving.engines.health import EngineCheck
from rollcast_serving.health import ReplicaCheck
from rollcast_testing import HealthCheckSuite


class TestReplicas(HealthCheckSuite):
    name = "replicas"
    faults = (
        ({"rollout": {"name": "hf", "replica": {"python": "/nowhere/python"}}}, "rollout.replica.python"),
        ({"judge": {"rollout": {"name": "hf", "replica": {"python": "/bin/false"}}}}, "judge.rollout.replica.python"),
    )


def config(python: object, name: str = "hf", **more: Any) -> HealthSetup:
    return HealthSetup({"rollout": {"name": name, "replica": {"python": str(python), **more}}})


def test_an_environment_without_rollcast(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    found = list(ReplicaCheck().run(config(tmp_path / "bare" / "bin" / "python", env={"PYTHONPATH": ""})))
    assert {each.state for each in found} == {"problem"}
    assert "rollcast is not installed" in found[0].message
    assert "-m pip install 'rollcast==" in found[0].fix


def test_an_environment_that_fits() -> None:
    (found,) = ReplicaCheck().run(config(sys.executable))
    assert found.state == "ok"
    assert sys.executable in found.message


def test_another_python_and_a_rollout_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"python": "3.99.1", "versions": {}, "findings": [], "error": "PluginLoadError: broken"}
    monkeypatch.setattr(health, "_ask", lambda *_: answer)
    problem, other = ReplicaCheck().run(config(sys.executable))
    assert "PluginLoadError: broken" in problem.message
    assert (other.state, "3.99.1" in other.message) == ("warning", True)


class Engine(EngineCheck):
    """An engine that comes as pytest."""

    subject = title = rollout = "tiny"
    adapter = "rollcast"
    engines = ("tp-none", "pytest")
    module = "tp_tiny_engine"

    def find_traps(self) -> Iterator[Finding]:
        yield warning("trap", "is set", "unset it")


def test_an_engine_that_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tp_tiny_engine.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    found = list(Engine().run(HealthSetup()))
    assert [each.state for each in found] == ["ok", "warning"]
    assert found[0].message == f"pytest {pytest.__version__}"


def test_an_engine_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tp_tiny_engine", None)
    _, found = Engine().run(HealthSetup())
    assert found.state == "problem"
    assert "ModuleNotFoundError" in found.message


def test_an_engine_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.requires", lambda _: ['pytest==1.0; extra == "cuda"'])
    found = next(Engine().run(HealthSetup()))
    assert found.state == "warning"
    assert "tested with ==1.0" in found.message


def test_an_engine_that_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "engines", ("tp-none",))
    assert [each.state for each in Engine().run(HealthSetup())] == ["warning"]
    assert [each.state for each in Engine().run(HealthSetup({"rollout": {"name": "tiny"}}))] == ["problem"]
    # In an environment of its own, which the check of the replicas asks.
    assert list(Engine().run(config("/some/python", "tiny"))) == []
