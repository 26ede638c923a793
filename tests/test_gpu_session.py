"""The session `gpu`: its parts select tests, each marked test is in one part, and a machine without a device is told."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("nox")
ROOT = Path(__file__).parents[1]
noxfile = runpy.run_path(str(ROOT / "noxfile.py"))
PARTS: dict[str, list[str]] = noxfile["GPU_PARTS"]


def nox(*arguments: str, path: str = os.environ["PATH"]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nox", "--no-venv", "-s", "gpu", "--", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("part", PARTS)
def test_each_part_has_marked_tests(part: str) -> None:
    """By their source, because the engines of some parts are not installed here."""
    for file in PARTS[part]:
        text = (ROOT / "plugins" / file).read_text()
        assert re.search(r"mark\.gpu|needs_cuda|needs_devices|on_cuda|DEVICES", text), (
            f"{file} has no test for a device"
        )


@pytest.fixture(scope="module")
def collected() -> str:
    """Ids of the marked tests of all parts whose engines are installed here."""
    files = [f"plugins/{file}" for part, files in PARTS.items() if part not in ("vllm", "sglang") for file in files]
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "gpu", "-n", "0", *files]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.mark.parametrize("part", sorted(set(PARTS) - {"vllm", "sglang"}))
def test_each_part_selects_tests(part: str, collected: str) -> None:
    for file in PARTS[part]:
        assert f"plugins/{file}::" in collected, f"{file} has no test marked gpu"


def test_every_marked_test_is_in_one_part() -> None:
    marked = {
        str(path.relative_to(ROOT / "plugins"))
        for path in ROOT.glob("plugins/*/tests/*.py")
        if re.search(r"mark\.gpu|rollcast_testing\.cuda import", path.read_text())
    }
    listed = [file for files in PARTS.values() for file in files]
    assert sorted(listed) == sorted(marked)


def test_a_machine_without_a_device_is_told_in_a_sentence(tmp_path: Path) -> None:
    finished = nox(path=str(tmp_path))  # no nvidia-smi there
    text = finished.stdout + finished.stderr
    assert finished.returncode == 0, text
    assert "this machine has no CUDA device (nvidia-smi lists none), and the session needs one" in text
    assert "Traceback" not in text


def test_an_unknown_part_is_refused_with_those_that_exist() -> None:
    finished = nox("kernel")
    assert finished.returncode != 0
    assert "no part kernel; there are engines, kernels, memory," in finished.stdout + finished.stderr


def test_the_guide_lists_the_parts() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    table = guide.split("| part | what it tests on the device |\n|---|---|\n")[1].split("\n\n")[0]
    named = [name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert named == [*PARTS, noxfile["GPU_BENCH"]]


def test_torch_has_every_function_of_cuda_that_is_named() -> None:
    """Code for a device runs on few machines; a name that torch lacks shows on every machine."""
    missing = set()
    for folder in ("core", "plugins", "contrib", "tests/benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            for name in re.findall(r"\btorch\.cuda((?:\.\w+)+)", path.read_text()):
                holder: object = torch.cuda
                for part in name.removeprefix(".").split("."):
                    holder = getattr(holder, part, None)
                if holder is None:
                    missing.add(f"torch.cuda{name} in {path.relative_to(ROOT)}")
    assert not missing
