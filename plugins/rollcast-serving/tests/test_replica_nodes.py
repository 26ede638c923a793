"""A replica that spans two nodes: its processes meet, start together and end together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollcast import WorkerHost
from rollcast.contracts.runtime import WorkerRaised
from rollcast.contracts.worker import ClassWithInitArgs, WorkerContext
from rollcast_serving.launcher import ReplicaAddress, ReplicaSpec
from rollcast_serving.worker import RankPlace, ReplicaWorker

HOST = "127.0.0.1"
HOSTS = {"first": HOST, "second": HOST}
#: A rollout whose parts only connect to each other, as an engine's processes do before they load a model.
ROLLOUT = """
import os, socket, subprocess, time
from dataclasses import replace
from rollcast.contracts.rollout import EnginePart
from rollcast.errors import RolloutError
from rollcast_hf.rollout import HfRollout

class Part(EnginePart):
    def __init__(self, setup):
        if os.environ.get("TP_FAILS"):
            raise RolloutError("the part has no device")
        while True:
            try:
                meeting = socket.create_connection((setup.node.address, setup.node.port))
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        meeting.sendall(b"joined")
        self.child = subprocess.Popen(["sleep", "600"])

    def check_health(self):
        if self.child.poll() is not None:
            raise RolloutError("the part's process ended")

    def close(self):
        self.child.kill()

class Spanning(HfRollout):
    capabilities = replace(HfRollout.capabilities, multi_node=True, tensor_parallel=True)

    def __init__(self, setup):
        if setup.node.nodes > 1:
            with socket.create_server((setup.node.address, setup.node.port)) as server:
                assert server.accept()[0].recv(6) == b"joined"
        super().__init__(setup)

    @classmethod
    def join(cls, setup):
        return Part(setup)
"""


@pytest.fixture
def spec(replica_spec: ReplicaSpec, tmp_path: Path) -> ReplicaSpec:
    info = tmp_path / "tp_span-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tp-span\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rollcast.rollouts]\nspanning = tp_span:Spanning\n")
    (tmp_path / "tp_span.py").write_text(ROLLOUT)
    rollout = {**replica_spec.rollout, "name": "spanning", "tensor_model_parallel_size": 4}
    env = {**replica_spec.env, "PYTHONPATH": str(tmp_path)}
    log_dir = str(tmp_path / "logs")
    return replace(replica_spec, rollout=rollout, env=env, multi_node=True, log_dir=log_dir, launch_timeout_s=60.0)


class Nodes:
    """Workers of the ranks of two nodes, two on each, in threads that last as the workers' processes do."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self.hosts = [WorkerHost() for _ in range(4)]
        self.threads = [ThreadPoolExecutor(1) for _ in self.hosts]
        self._spec = spec
        for rank, (host, thread) in enumerate(zip(self.hosts, self.threads, strict=True)):
            place = WorkerContext(rank, 4, rank % 2, 2, node=("first", "second")[rank // 2])
            worker = ClassWithInitArgs(ReplicaWorker, self._spec, 4)
            thread.submit(host.build, place, {"rollout": worker}).result()

    def call(self, method: str, *args: Any) -> list[Any]:
        calls = [
            thread.submit(host.call, "rollout", method, args, {})
            for host, thread in zip(self.hosts, self.threads, strict=True)
        ]
        errors = [call.exception() for call in calls]
        return [error or call.result() for error, call in zip(errors, calls, strict=True)]

    def launch(self, replaced: list[int]) -> list[Any]:
        places = self.call("place")
        assert places[3] == RankPlace("second", "", 1)
        return self.call("launch", HOSTS, places, replaced, self.call("meet", HOSTS, replaced))

    def processes(self) -> list[Any]:
        """Return the processes of ranks 0 and 2, which start one each."""
        workers = [host.workers["rollout"]._process for host in self.hosts]
        assert workers[1] is workers[3] is None
        return [workers[0], workers[2]]


@pytest.fixture
def start(spec: ReplicaSpec) -> Iterator[Callable[..., Nodes]]:
    started: list[Nodes] = []

    def start(**env: str) -> Nodes:
        started.append(Nodes(replace(spec, env={**spec.env, **env})))
        return started[-1]

    yield start
    for nodes in started:
        nodes.call("stop", [0])
        for thread in nodes.threads:
            thread.shutdown()


def has_ended(process: Any, within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while process.is_alive and time.monotonic() < deadline:
        time.sleep(0.05)
    return not process.is_alive


def child_of(part: Any) -> psutil.Process:
    (child,) = [child for child in psutil.Process(part.popen.pid).children() if child.name() == "sleep"]
    return child


def test_the_processes_of_a_replica_end_together(start: Callable[..., Nodes]) -> None:
    nodes = start()
    first, *others = nodes.launch([])
    assert isinstance(first, ReplicaAddress)
    assert (first.index, first.generation, others) == (0, 0, [None, None, None])
    head, part = nodes.processes()
    assert nodes.launch([]) == [first, None, None, None]  # runs already
    assert nodes.processes() == [head, part]
    assert part.log.name == "replica_0_node_1.log"

    child = child_of(part)
    head.popen.kill()
    assert has_ended(part)
    psutil.wait_procs([child], timeout=5)
    assert not child.is_running()

    (second, *_) = nodes.launch([0])
    assert isinstance(second, ReplicaAddress), second
    assert (second.generation, second.port == first.port) == (1, False)
    head, part = nodes.processes()
    child_of(part).kill()  # the part's engine dies
    assert has_ended(part)
    assert has_ended(head)
    assert "its process on node 127.0.0.1 ended" in head.log.read_text()


def test_a_part_that_cannot_start_ends_the_start(start: Callable[..., Nodes]) -> None:
    began = time.monotonic()
    first, _, third, _ = start(TP_FAILS="1").launch([])
    assert isinstance(first, WorkerRaised)
    assert "the replica spans nodes, and its process on node 127.0.0.1 ended" in str(first)
    assert isinstance(third, WorkerRaised)
    assert "replica 0 on its node 1" in str(third)
    assert "the part has no device" in str(third)
    assert time.monotonic() - began < 40.0  # not the deadline of the start
