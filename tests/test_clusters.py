"""The files in contrib/clusters: the Slurm script runs on two Ray nodes of this machine, the rest is composed."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollcast.config import compose

CLUSTERS = Path(__file__).parent.parent / "contrib" / "clusters"
#: Slurm's commands as far as the script uses them, on one machine.
SHIMS = {
    "scontrol": 'if [ "$1" = show ]; then echo one; echo two; else echo "$@" >> "$SHIM_LOG"; fi',
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"',
    "hostname": "echo 127.0.0.1 172.17.0.1",
}


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in SHIMS.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "PATH": path,
        "SHIM_LOG": str(tmp_path / "requeued"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "ROLLCAST_RAY_PORT": str(23_000 + os.getpid() % 7_000),
        "OMP_NUM_THREADS": "1",
    }


def start(slurm: dict[str, str], run_dir: Path) -> subprocess.Popen[bytes]:
    overrides = [
        "recipe=quickstart",
        f"run_dir={run_dir}",
        "trainer.warm_start=null",
        "model.random_init=true",
        "trainer.total_steps=400",
        "trainer.save_freq=1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "data.train_batch_size=4",
        "actor.ppo_mini_batch_size=4",
        "trackers=[jsonl]",
    ]
    command = ["bash", str(CLUSTERS / "rollcast.sbatch"), *overrides]
    # A file, because Ray's processes inherit it and would keep a pipe open.
    with output_of(slurm).open("a") as output:
        return subprocess.Popen(command, env=slurm, cwd=run_dir.parent, stdout=output, stderr=output)


def output_of(slurm: dict[str, str]) -> Path:
    return Path(slurm["SHIM_LOG"]).with_name("output")


@pytest.mark.long
@pytest.mark.exhaustive
def test_the_slurm_script_runs_on_two_nodes_and_requeues_a_preempted_job(slurm: dict[str, str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    job = start(slurm, run_dir)
    try:
        check(job, slurm, run_dir)
    finally:
        job.terminate()  # the script stops Ray
        job.wait(60)


def check(job: subprocess.Popen[bytes], slurm: dict[str, str], run_dir: Path) -> None:
    deadline = time.monotonic() + 240
    while not (run_dir / "checkpoints" / "step_1").is_dir():
        assert job.poll() is None, output_of(slurm).read_text()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    job.send_signal(signal.SIGTERM)
    assert job.wait(120) == 143, output_of(slurm).read_text()
    assert Path(slurm["SHIM_LOG"]).read_text() == "requeue 7\n"
    assert "nnodes: 2" in (run_dir / "config.yaml").read_text()
    with pytest.raises(ConnectionError):  # the job stops what it started
        socket.create_connection(("127.0.0.1", int(slurm["ROLLCAST_RAY_PORT"])), 5)


def test_the_job_of_kuberay_composes() -> None:
    job: dict[str, Any] = yaml.safe_load((CLUSTERS / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    program, command, *overrides = shlex.split(job["spec"]["entrypoint"])
    assert (program, command) == ("rollcast", "train")
    config = compose(overrides).config
    cluster = job["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    devices = group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert config.placement.nnodes == group["replicas"]
    assert config.placement.n_gpus_per_node == int(devices)
    assert config.trainer.on_driver is False
    for spec in (cluster["headGroupSpec"], group):
        (container,) = spec["template"]["spec"]["containers"]
        assert {"name": "RAY_worker_niceness", "value": "0"} in container["env"]
        volumes = {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_the_images_install_distributions_of_this_repository() -> None:
    text = (CLUSTERS / "Dockerfile").read_text()
    root = CLUSTERS.parent.parent
    known = {"rollcast", *(each.name for each in (root / "plugins").iterdir())}
    named = {word.partition("==")[0].partition("[")[0].strip('"') for word in text.split() if "==${VERSION}" in word}
    assert {"rollcast", "rollcast-vllm", "rollcast-megatron"} <= named
    assert named <= known
