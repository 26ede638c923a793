"""Replicas in a worker group: started, asked through a batch, killed and brought back, ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from serving_tools import EOS, PAD, greedy, load_model, make_requests

from rollcast import WorkerGroup
from rollcast.contracts.pools import ResourcePool
from rollcast.contracts.rollout import SamplingParams
from rollcast.contracts.worker import ClassWithInitArgs
from rollcast.errors import WorkerError
from rollcast.protocol import DataProto
from rollcast.runtime.local import LocalRuntime
from rollcast_serving.launcher import ReplicaAddress, ReplicaSpec
from rollcast_serving.manager import RoutingSettings
from rollcast_serving.replicas import Replicas
from rollcast_serving.worker import ReplicaWorker

pytestmark = pytest.mark.long


@pytest.fixture
def local_group(replica_spec: ReplicaSpec, tmp_path: Path) -> Iterator[WorkerGroup]:
    runtime = LocalRuntime()
    spec = replace(replica_spec, log_dir=str(tmp_path))
    yield WorkerGroup(ResourcePool([1]), ClassWithInitArgs(ReplicaWorker, spec), runtime=runtime)
    runtime.shutdown()


def prompts_of(prompts: Sequence[Sequence[int]]) -> DataProto:
    rows = [torch.tensor(list(prompt)) for prompt in prompts]
    return DataProto.from_dict({"prompts": torch.nested.nested_tensor(rows, layout=torch.jagged)})


def test_a_batch_and_a_death(local_group: WorkerGroup, model_folder: Path) -> None:
    replicas = Replicas(local_group, RoutingSettings(continuous=False))
    resynced: list[ReplicaAddress] = []
    replicas.resync = resynced.extend
    model, prompts = load_model(model_folder), [request.prompt_ids for request in make_requests(9)]
    (address,) = replicas.addresses
    assert address.host == "127.0.0.1"

    def check() -> None:
        batch = replicas.generate_sequences(prompts_of(prompts), SamplingParams(temperature=0.0, max_tokens=7))
        for row, prompt in enumerate(prompts):
            tokens = greedy(model, prompt, 7)
            assert batch["responses"].unbind()[row].tolist() == tokens
            assert bool(batch["finished"][row]) == (tokens[-1] == EOS)

    check()
    (pid,) = [child.pid for child in psutil.Process().children() if "rollcast_serving.process" in child.cmdline()]
    os.kill(pid, signal.SIGKILL)
    check()  # the only replica: its requests wait until it is back
    assert [each.generation for each in resynced] == [1]
    assert replicas.addresses == resynced
    (output,) = replicas.generate_on_each(make_requests(9)[0])
    assert list(output.sequences[0].token_ids) == greedy(model, prompts[0], 8)
    replicas.check_health()
    replicas.release()
    replicas.resume()
    replicas.close()
    replicas.close()
    local_group.shutdown()
    assert not [child for child in psutil.Process().children() if "rollcast_serving.process" in child.cmdline()]


def test_a_replica_that_cannot_start(replica_spec: ReplicaSpec) -> None:
    runtime = LocalRuntime()
    spec = replace(replica_spec, python="/no/such/python")
    group = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(ReplicaWorker, spec), runtime=runtime)
    with pytest.raises(WorkerError, match="/no/such/python"):
        Replicas(group)
    runtime.shutdown()


@pytest.mark.exhaustive
def test_seeds_decide_samples_on_any_replica(local_group: WorkerGroup) -> None:
    replicas = Replicas(local_group)
    prompts = prompts_of([request.prompt_ids for request in make_requests(6)])
    seeded = prompts.with_columns({"seed": torch.arange(6)})
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)

    def sample(batch: DataProto) -> Any:
        return replicas.generate_sequences(batch, sampling)["responses"].to_padded_tensor(PAD)

    first = sample(seeded)
    assert torch.equal(sample(seeded), first)
    assert torch.equal(sample(seeded.reordered(torch.tensor([3, 1, 0, 5, 4, 2]))), first[[3, 1, 0, 5, 4, 2]])
    assert not torch.equal(sample(prompts), first)
    replicas.close()
