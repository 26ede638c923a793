"""``rollcast doctor``: the core's checks, checks that misbehave, output and exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollcast.cli import installation_checks
from rollcast.cli.installation_checks import PythonCheck, VersionsCheck
from rollcast.contracts.health import Finding, HealthSetup, problem
from rollcast.errors import PluginTypeError
from rollcast_testing import HealthCheckSuite

Run = Callable[..., Any]
GIB = 2**30

CHECKS = """
    import os, time
    from rollcast.contracts.health import BaseHealthCheck, ok, problem, warning

    class Good(BaseHealthCheck):
        subject = "coffee"
        def run(self, setup):
            yield ok("beans", "enough")
            yield warning("milk", "half a litre", "buy milk")

    class Raises(BaseHealthCheck):
        subject = "raising"
        def run(self, setup):
            yield ok("before", "was seen")
            raise ZeroDivisionError("an oversight")

    class Hangs(BaseHealthCheck):
        subject = "hanging"
        timeout_s = 0.3
        def run(self, setup):
            time.sleep(600)

    class Waits(BaseHealthCheck):
        subject = "waiting"
        timeout_s = 600.0
        def run(self, setup):
            with open(os.environ["TP_HEALTH_PID"], "w") as file:
                file.write(str(os.getpid()))
            time.sleep(600)

    class Dies(BaseHealthCheck):
        subject = "dying"
        def run(self, setup):
            os._exit(7)

    class Talks(BaseHealthCheck):
        subject = "talking"
        def run(self, setup):
            return ["all is well"]
"""


class TestPython(HealthCheckSuite):
    name = "python"


class TestVersions(HealthCheckSuite):
    name = "versions"


def one(check: Any, name: str, config: Any = None) -> Finding:
    (found,) = [each for each in check.run(HealthSetup(config)) if each.name == name]
    return found


@pytest.fixture
def install(make_dist: Callable[..., Path]) -> Callable[..., None]:
    def call(**points: str) -> None:
        checks = {name: f"tp_health:{attribute}" for name, attribute in points.items()}
        make_dist("tp-health", {"rollcast.health_checks": checks}, {"tp_health.py": CHECKS}, version="2.1")

    return call


# -- the command --------------------------------------------------------------------------------


def test_findings_are_listed_by_subject_with_their_mends(run: Run, install: Callable[..., None]) -> None:
    install(good="Good")
    done = run("doctor", "--only", "tp-health")
    assert done.code == 0  # warnings are no failure
    assert done.out.splitlines() == [
        "coffee",
        "  ok       beans  enough",
        "  warning  milk   half a litre",
        "                  fix: buy milk",
        "0 problems, 1 warning, 1 ok",
    ]


def test_checks_that_raise_hang_or_die_are_findings(run: Run, install: Callable[..., None]) -> None:
    install(a_raises="Raises", b_hangs="Hangs", c_dies="Dies", d_talks="Talks", e_missing="Missing", f_good="Good")
    done = run("doctor", "--json", "--only", "tp-health")
    assert done.code == 1
    rows = json.loads(done.out)["findings"]
    said = {row["check"]: row for row in rows if row["state"] == "problem"}
    assert "raised ZeroDivisionError: an oversight" in said["a_raises"]["message"]
    assert "did not end within 0.3 seconds" in said["b_hangs"]["message"]
    assert "exit status 7" in said["c_dies"]["message"]
    assert "'all is well', which is not a Finding" in said["d_talks"]["message"]
    assert "Missing" in said["e_missing"]["message"]
    assert all("tp-health" in row["message"] + row["fix"] and row["fix"] for row in said.values())
    # What was found before the error counts, and so do the checks behind a bad one.
    assert [row["message"] for row in rows if row["state"] == "ok"] == ["was seen", "enough"]
    assert {row["distribution"] for row in rows} == {"tp-health 2.1"}


def test_json_counts_the_states(run: Run, install: Callable[..., None]) -> None:
    install(good="Good")
    found = json.loads(run("doctor", "--json", "--only", "good").out)
    assert found["counts"] == {"ok": 1, "warning": 1, "problem": 0}
    assert found["findings"][1] == {
        "subject": "coffee",
        "check": "good",
        "distribution": "tp-health 2.1",
        "name": "milk",
        "state": "warning",
        "message": "half a litre",
        "fix": "buy milk",
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--only", "disc"), ["--only disc", "there is no such check", "disk"]),
        (("modle.path=x",), ["modle.path", "did you mean"]),
        (("recipe=nothing",), ["recipe=nothing"]),
    ],
)
def test_wrong_arguments(run: Run, arguments: tuple[str, ...], words: list[str]) -> None:
    done = run("doctor", *arguments)
    assert done.code == 2
    assert all(word in done.err for word in words)


def test_single_keys_need_no_recipe(run: Run, cli_plugin: Path) -> None:
    done = run("doctor", "--only", "disk", "trainer=tp_cli", "runtime=local", "run_dir=/proc/nowhere/run")
    assert done.code == 1
    assert "problem  run directory    /proc/nowhere/run cannot be written" in done.out
    assert "run_dir=DIR" in done.out


def test_an_interrupt_ends_the_checks_too(install: Callable[..., None], tmp_path: Path) -> None:
    install(waits="Waits")
    note = tmp_path / "pid"
    path = os.pathsep.join(entry for entry in sys.path if entry)
    process = subprocess.Popen(
        [sys.executable, "-m", "rollcast", "doctor", "--only", "waits"],
        env={**os.environ, "PYTHONPATH": path, "TP_HEALTH_PID": str(note)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job ignores SIGINT, and its children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not (note.exists() and note.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")
    check = int(note.read_text())
    while psutil.pid_exists(check) and psutil.Process(check).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.05)


# -- the core's checks --------------------------------------------------------------------------


def test_an_unsupported_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.python_version", lambda: "3.10.2")
    found = one(PythonCheck(), "version")
    assert found.state == "problem"
    assert "3.10.2" in found.message


def test_a_distribution_of_another_version(make_dist: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    make_dist("tp-sibling", {"rollcast.hooks": {"tp_sibling": "tp_sibling"}}, version="0.0.7")
    monkeypatch.setattr(installation_checks, "find_known", lambda group: {"x": "tp-sibling"})
    monkeypatch.setattr(installation_checks, "find_core_version", lambda: "0.1.0")
    found = one(VersionsCheck(), "tp-sibling")
    assert found.state == "problem"
    assert "0.0.7 beside rollcast 0.1.0" in found.message
    assert found.fix == "pip install 'tp-sibling==0.1.0'"


def test_a_requirement_that_is_not_met(make_dist: Callable[..., Path]) -> None:
    folder = make_dist("tp-needy", {"rollcast.hooks": {"tp_needy": "tp_needy"}})
    (metadata,) = folder.glob("*.dist-info/METADATA")
    with metadata.open("a") as file:
        file.write("Requires-Dist: pytest<2\nRequires-Dist: tp-absent>=1\nRequires-Dist: tp-extra; extra == 'x'\n")
    found = [each for each in VersionsCheck().run(HealthSetup()) if each.name == "tp-needy"]
    assert [each.fix for each in found] == ["pip install 'pytest<2'", "pip install 'tp-absent>=1'"]
    assert f"is installed in version {pytest.__version__}" in found[0].message
    assert "tp-absent is not installed" in found[1].message


def test_a_finding_is_complete() -> None:
    with pytest.raises(PluginTypeError, match="needs a fix"):
        problem("disk", "full", "")
    with pytest.raises(PluginTypeError, match="state 'bad'; allowed: ok, warning, problem"):
        Finding("disk", "bad", "full", "free it")  # type: ignore[arg-type]
    with pytest.raises(PluginTypeError, match="needs a name"):
        Finding("", "ok", "fine")


def test_a_setup_reads_dotted_keys() -> None:
    setup = HealthSetup({"rollout": {"replica": {"python": None}, "n": 4}, "data": "???"})
    assert setup.get("rollout.n") == 4
    assert setup.get("rollout.replica.python", "here") == "here"
    assert setup.get("data") is None
    assert setup.get("rollout.n.more", 1) == 1
    assert HealthSetup().get("rollout.n", 2) == 2
