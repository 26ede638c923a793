"""``rollcast doctor``: the core's checks, checks that misbehave, output and exit codes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rollcast.cli import machine_checks
from rollcast.cli.machine_checks import DiskCheck, LimitsCheck, NetworkCheck, PythonCheck, VersionsCheck
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


class TestDisk(HealthCheckSuite):
    name = "disk"


class TestLimits(HealthCheckSuite):
    name = "limits"


class TestNetwork(HealthCheckSuite):
    name = "network"


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
        "                  mend: buy milk",
        "0 problems, 1 warning, 1 ok",
    ]


def test_checks_that_raise_hang_or_die_are_findings(run: Run, install: Callable[..., None]) -> None:
    install(a_raises="Raises", b_hangs="Hangs", c_dies="Dies", d_talks="Talks", e_missing="Missing", f_good="Good")
    done = run("doctor", "--json", "--only", "tp-health")
    assert done.code == 1
    rows = json.loads(done.out)["findings"]
    said = {row["check"]: row for row in rows if row["state"] == "problem"}
    assert "raised ZeroDivisionError: an oversight" in said["a_raises"]["found"]
    assert "did not end within 0.3 seconds" in said["b_hangs"]["found"]
    assert "exit status 7" in said["c_dies"]["found"]
    assert "'all is well', which is not a Finding" in said["d_talks"]["found"]
    assert "Missing" in said["e_missing"]["found"]
    assert all("tp-health" in row["found"] + row["mend"] and row["mend"] for row in said.values())
    # What was found before the error counts, and so do the checks behind a bad one.
    assert [row["found"] for row in rows if row["state"] == "ok"] == ["was seen", "enough"]
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
        "found": "half a litre",
        "mend": "buy milk",
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
    assert "3.10.2" in found.found


def test_a_distribution_of_another_version(make_dist: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    make_dist("tp-sibling", {"rollcast.hooks": {"tp_sibling": "tp_sibling"}}, version="0.0.7")
    monkeypatch.setattr(machine_checks, "find_known", lambda group: {"x": "tp-sibling"})
    monkeypatch.setattr(machine_checks, "find_core_version", lambda: "0.1.0")
    found = one(VersionsCheck(), "tp-sibling")
    assert found.state == "problem"
    assert "0.0.7 beside rollcast 0.1.0" in found.found
    assert found.mend == "pip install 'tp-sibling==0.1.0'"


def test_a_requirement_that_is_not_met(make_dist: Callable[..., Path]) -> None:
    folder = make_dist("tp-needy", {"rollcast.hooks": {"tp_needy": "tp_needy"}})
    (metadata,) = folder.glob("*.dist-info/METADATA")
    with metadata.open("a") as file:
        file.write("Requires-Dist: pytest<2\nRequires-Dist: tp-absent>=1\nRequires-Dist: tp-extra; extra == 'x'\n")
    found = [each for each in VersionsCheck().run(HealthSetup()) if each.name == "tp-needy"]
    assert [each.mend for each in found] == ["pip install 'pytest<2'", "pip install 'tp-absent>=1'"]
    assert f"is installed in version {pytest.__version__}" in found[0].found
    assert "tp-absent is not installed" in found[1].found


def statvfs(free: int, total: int, files: int = 1000) -> Any:
    return SimpleNamespace(f_blocks=total, f_bavail=free, f_frsize=1, f_files=2000, f_favail=files)


@pytest.mark.parametrize(
    ("free", "total", "state", "mend"),
    [
        (64 * 2**20, 64 * 2**20, "problem", "--shm-size"),
        (2**20, 16 * GIB, "problem", "crashed processes"),
        (GIB // 2, 16 * GIB, "warning", "--shm-size"),
        (8 * GIB, 16 * GIB, "ok", ""),
    ],
)
def test_shared_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, total: int, state: str, mend: str
) -> None:
    monkeypatch.setattr(LimitsCheck, "shared", tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: statvfs(free, total))
    found = one(LimitsCheck(), "shared memory")
    assert found.state == state
    assert mend in found.mend


@pytest.mark.parametrize(
    ("soft", "hard", "state", "mend"),
    [
        (256, 4096, "problem", "ulimit -n 8192 as root, or LimitNOFILE="),
        (1024, 524288, "warning", "ulimit -n 65536"),
        (20000, 20000, "ok", ""),
        (-1, -1, "ok", ""),
    ],
)
def test_open_files(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, state: str, mend: str) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (soft, hard))
    found = one(LimitsCheck(), "open files")
    assert found.state == state
    assert found.mend.startswith(mend)


@pytest.mark.parametrize(
    ("free", "files", "state"),
    [(100 * GIB, 5, "ok"), (10 * GIB, 5, "warning"), (1000, 5, "problem"), (100 * GIB, 0, "problem")],
)
def test_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, files: int, state: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free, total=200 * GIB))
    monkeypatch.setattr(os, "statvfs", lambda _: statvfs(free, 200 * GIB, files))
    found = one(DiskCheck(), "run directory", {"run_dir": str(tmp_path / "a" / "b")})
    assert found.state == state
    assert state == "ok" or "run_dir=DIR" in found.mend
    assert not list(tmp_path.iterdir())


def test_a_file_in_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = one(DiskCheck(), "run directory", {"run_dir": str(tmp_path / "file" / "run")})
    assert found.state == "problem"
    assert "is a file" in found.found


def test_network_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("not here")

    monkeypatch.setattr(socket, "create_server", fail)
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    monkeypatch.setenv("http_proxy", "http://proxy:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    found = {each.name: each for each in NetworkCheck().run(HealthSetup())}
    assert {name: each.state for name, each in found.items()} == {
        "ports": "problem",
        "host name": "problem",
        "proxy": "warning",
    }
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert "proxy" not in [each.name for each in NetworkCheck().run(HealthSetup())]


# -- the contract -------------------------------------------------------------------------------


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
