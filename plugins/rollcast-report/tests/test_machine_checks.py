"""The health checks of the machine."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollcast.contracts.health import Finding, HealthSetup
from rollcast_report.machine_checks import DiskCheck, LimitsCheck, NetworkCheck
from rollcast_testing import HealthCheckSuite

GIB = 2**30


class TestDisk(HealthCheckSuite):
    name = "disk"


class TestLimits(HealthCheckSuite):
    name = "limits"


class TestNetwork(HealthCheckSuite):
    name = "network"


def one(check: Any, name: str, config: Any = None) -> Finding:
    (found,) = [each for each in check.run(HealthSetup(config)) if each.name == name]
    return found


def statvfs(free: int, total: int, files: int = 1000) -> Any:
    return SimpleNamespace(f_blocks=total, f_bavail=free, f_frsize=1, f_files=2000, f_favail=files)


@pytest.mark.parametrize(
    ("free", "total", "state", "fix"),
    [
        (64 * 2**20, 64 * 2**20, "problem", "--shm-size"),
        (2**20, 16 * GIB, "problem", "crashed processes"),
        (GIB // 2, 16 * GIB, "warning", "--shm-size"),
        (8 * GIB, 16 * GIB, "ok", ""),
    ],
)
def test_shared_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, total: int, state: str, fix: str
) -> None:
    monkeypatch.setattr(LimitsCheck, "shared", tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: statvfs(free, total))
    found = one(LimitsCheck(), "shared memory")
    assert found.state == state
    assert fix in found.fix


@pytest.mark.parametrize(
    ("soft", "hard", "state", "fix"),
    [
        (256, 4096, "problem", "ulimit -n 8192 as root, or LimitNOFILE="),
        (1024, 524288, "warning", "ulimit -n 65536"),
        (20000, 20000, "ok", ""),
        (-1, -1, "ok", ""),
    ],
)
def test_open_files(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, state: str, fix: str) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (soft, hard))
    found = one(LimitsCheck(), "open files")
    assert found.state == state
    assert found.fix.startswith(fix)


@pytest.mark.parametrize(
    ("free", "files", "state"),
    [(100 * GIB, 5, "ok"), (10 * GIB, 5, "warning"), (1000, 5, "problem"), (100 * GIB, 0, "problem")],
)
def test_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, files: int, state: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free, total=200 * GIB))
    monkeypatch.setattr(os, "statvfs", lambda _: statvfs(free, 200 * GIB, files))
    found = one(DiskCheck(), "run directory", {"run_dir": str(tmp_path / "a" / "b")})
    assert found.state == state
    assert state == "ok" or "run_dir=DIR" in found.fix
    assert not list(tmp_path.iterdir())


def test_a_file_in_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = one(DiskCheck(), "run directory", {"run_dir": str(tmp_path / "file" / "run")})
    assert found.state == "problem"
    assert "is a file" in found.message


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
