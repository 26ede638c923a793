"""verl's own tests of its single controller, from its wheel and unchanged, pass on rollcast's worker groups."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

#: Tests of verl that need CUDA, NCCL or more memory than a machine for tests has.
NOT_HERE = {
    "test_ray_collectives.py": "tensors on CUDA and NCCL",
    "test_rvdz.py": "cupy's NCCL",
    "test_data_transfer.py": "batches of 2 GiB, about 16 GiB in all",
}
#: Files that always run; the others, which take ten minutes more, run with ``ROLLCAST_ALL_CASES=1``.
ALWAYS = {
    "test_colocated_workers.py",
    "test_decorator_on_cpu.py",
    "test_worker_group_basics.py",
}


def find_tests() -> list[Path]:
    """Return the files of verl's tests, which its wheel installs beside the package."""
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        pytest.skip("verl is not installed; nox -s tests_peers installs it")
    folder = Path(spec.origin).parents[1] / "tests" / "single_controller"
    found = sorted(folder.glob("test_*.py"))
    if not found:
        pytest.skip(f"this verl came without its tests: {folder} has none")
    wanted = [file for file in found if file.name not in NOT_HERE]
    return wanted if os.environ.get("ROLLCAST_ALL_CASES") else [file for file in wanted if file.name in ALWAYS]


def environment(folder: Path) -> dict[str, str]:
    """Return variables for Rays below ``folder``, with logical devices on which verl's platform ``cpu`` runs."""
    return {
        **os.environ,
        "RAY_TMPDIR": str(folder),
        "RAY_OVERRIDE_RESOURCES": '{"CPU": 100, "GPU": 4}',
        # Processes in reserve serve no worker here, because each worker has an environment of its own.
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
        "VERL_PLATFORM": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


@pytest.mark.timeout(1800)
def test_verls_own_tests_of_its_controller_pass() -> None:
    files = find_tests()
    command = [sys.executable, "-m", "pytest", "-v", "-p", "verl_on_cpu", "-p", "no:cacheprovider", "-n", "2"]
    rooted = ["--rootdir", str(files[0].parents[2]), "-c", os.devnull, *map(str, files)]
    with tempfile.TemporaryDirectory() as place:  # short, because Ray's sockets are below it
        done = subprocess.run(
            [*command, *rooted], env=environment(Path(place)), cwd=place, capture_output=True, text=True
        )
    assert done.returncode == 0, f"{done.stdout[-12000:]}\n{done.stderr[-2000:]}"
    passed = done.stdout.count(" PASSED")
    assert passed >= (24 if os.environ.get("ROLLCAST_ALL_CASES") else 5) and "SKIPPED" not in done.stdout, done.stdout[
        -6000:
    ]
