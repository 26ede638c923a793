"""Fixtures: a tiny model, and processes that serve it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the tools

from serving_tools import EOS, PAD, write_model

from rollcast_hf.schemas import HfRolloutConfig
from rollcast_serving.launcher import ReplicaAddress, ReplicaProcess, ReplicaSpec


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny", seed=0)


@pytest.fixture(scope="session")
def replica_spec(model_folder: Path) -> ReplicaSpec:
    return ReplicaSpec(
        asdict(HfRolloutConfig()), str(model_folder), 3, PAD, EOS, env={"OMP_NUM_THREADS": "1"}, launch_timeout_s=120.0
    )


@pytest.fixture(scope="module")
def shared_replica(
    replica_spec: ReplicaSpec, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ReplicaProcess, ReplicaAddress]]:
    """A replica for the tests that leave it with the model's weights and running."""
    process = ReplicaProcess(replace(replica_spec, log_dir=str(tmp_path_factory.mktemp("replica"))))
    try:
        yield process, process.wait_ready()
    finally:
        process.stop()


@pytest.fixture
def start_replica(replica_spec: ReplicaSpec, tmp_path: Path) -> Iterator[Callable[..., tuple[Any, ReplicaAddress]]]:
    """Start a replica with some of the spec changed; it is stopped afterwards."""
    started: list[ReplicaProcess] = []

    def start(index: int = 0, **changes: Any) -> tuple[ReplicaProcess, ReplicaAddress]:
        process = ReplicaProcess(replace(replica_spec, log_dir=str(tmp_path), **changes), index)
        started.append(process)
        return process, process.wait_ready()

    yield start
    for process in started:
        process.stop()
