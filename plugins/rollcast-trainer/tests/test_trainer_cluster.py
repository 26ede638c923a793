"""Runs on a Ray cluster: one loses the node of its workers and goes on where there is room, one is a job of Ray's."""

from __future__ import annotations

import shlex
import socket
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
from ray.cluster_utils import Cluster
from ray.job_submission import JobSubmissionClient
from trainer_tools import SmallTask, before_stage, launch, read_jsonl, read_metrics, without_times

from rollcast.contracts.trainer import trainers
from rollcast_trainer.ppo import PpoTrainer

pytestmark = pytest.mark.long

HAS_JOBS = find_spec("aiohttp_cors") is not None
NODES = ("127.0.0.11", "127.0.0.12")
STORE = 80 << 20
#: Ray takes half a minute by default to give up a node.
QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 200, "health_check_failure_threshold": 3}


class LosesNode(PpoTrainer):
    """Kills the raylet under its worker, once."""

    cluster: ClassVar[Cluster]
    nodes: ClassVar[dict[str, Any]]
    ran_on: ClassVar[list[str]]

    def setup(self) -> None:
        super().setup()
        worker = self.run.actor.group.workers[0].info
        self.ran_on.append(worker.node)

        def lose(_: Any) -> None:
            if self.step == 2 and len(self.ran_on) == 1:
                self.cluster.remove_node(self.nodes[worker.node], allow_graceful=False)
                # The worker notices a little later; the tiny run could be at its end by then.
                psutil.wait_procs([psutil.Process(worker.pid)] if psutil.pid_exists(worker.pid) else [], 60.0)

        before_stage(self, "update_actor", lose)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A head without CPUs, and two nodes with room for a worker each; returns the address."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}.items():
            patch.setenv(key, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        head = {"num_cpus": 0, "object_store_memory": STORE, "_system_config": QUICK}
        # The server of jobs needs libraries of ray[default].
        jobs = {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": _free_port()}
        made = Cluster(initialize_head=True, head_node_args={**head, **(jobs if HAS_JOBS else {})})
        LosesNode.cluster, LosesNode.ran_on = made, []
        LosesNode.nodes = {
            address: made.add_node(node_ip_address=address, object_store_memory=STORE, num_cpus=1) for address in NODES
        }
        trainers.register("loses_node", LosesNode)
        yield made.address
        trainers.unregister("loses_node")
        made.shutdown()


def test_a_run_moves_to_another_node(small_task: SmallTask, cluster: str, tmp_path: Path) -> None:
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    launch(small_task.ppo(whole))
    on_ray = ["trainer.name=loses_node", "runtime=ray", "runtime.threads_per_worker=1", f"runtime.address={cluster}"]
    assert launch(small_task.ppo(run_dir, *on_ray)).step == 4
    assert LosesNode.ran_on == list(NODES)
    assert [each["step"] for each in read_jsonl(run_dir / "recoveries.jsonl")] == [2]
    rows = [
        {key: value for key, value in row.items() if not key.startswith("recovery/")}
        for row in without_times(read_metrics(run_dir))
    ]
    assert rows == without_times(read_metrics(whole))


@pytest.mark.skipif(not HAS_JOBS, reason="Ray's server of jobs is not installed: pip install 'ray[default]'")
def test_a_job_runs_its_loop_on_the_cluster(small_task: SmallTask, cluster: str, tmp_path: Path) -> None:
    client = _connect(LosesNode.cluster.head_node.webui_url)
    changes = ["runtime=ray", "trainer.on_driver=false", "trainer.total_steps=1", "trackers=[jsonl,console]"]
    overrides = small_task.ppo(tmp_path, *changes, "trainer.save_freq=-1", "data.val_files=[]")
    job = client.submit_job(entrypoint=shlex.join([sys.executable, "-m", "rollcast", "train", *overrides]))
    deadline = time.monotonic() + 240.0
    while not client.get_job_status(job).is_terminal() and time.monotonic() < deadline:
        time.sleep(0.1)
    log = client.get_job_logs(job)
    assert client.get_job_status(job).value == "SUCCEEDED", log
    assert "step 1/1  finished" in log
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]


def _connect(url: str) -> JobSubmissionClient:
    """Connect as soon as the server answers."""
    deadline = time.monotonic() + 60.0
    while True:
        try:
            return JobSubmissionClient(f"http://{url}")
        except ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
