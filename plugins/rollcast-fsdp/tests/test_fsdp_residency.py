"""State and activations in host memory: what moves, how often, and on which stream.

The device is a recording stand-in on a CPU; values have to survive the moves all the same.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import fsdp_scenarios as scenarios
import pytest
import torch
from fake_streams import RecordingStream
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

import rollcast_fsdp.engine as engine_module
import rollcast_fsdp.sharding as sharding_module
from rollcast.contracts.engine import EngineSetup, ForwardSettings, ModelConfig, OptimConfig
from rollcast_fsdp.engine import FsdpEngine
from rollcast_fsdp.model import build_module
from rollcast_fsdp.offload import ActivationOffload
from rollcast_fsdp.residency import Residency
from rollcast_fsdp.schemas import FsdpConfig
from rollcast_testing.tiny import random_batch, tiny_model_folder

ALONE = scenarios.ALONE
OFFLOADS = {"param_offload": True, "optimizer_offload": True}


def build(model_folder: Path, **keys: object) -> tuple[FsdpEngine, RecordingStream]:
    """An engine whose state is in host memory, and the stream that moves it."""
    engine = scenarios.build(ALONE, model_folder, **OFFLOADS, **keys)
    stream = RecordingStream()
    engine.residency = Residency(engine.module, engine.optimizer, stream)
    engine.to("cpu")
    return engine, stream


def update(engine: FsdpEngine, seed: int, mini_batches: int = 3) -> list[float]:
    with engine.train_mode():
        norms = [
            engine.train_batch(
                random_batch(4, 5, 7, seed=seed + index), scenarios.nll, ForwardSettings(micro_batch_size_per_gpu=2)
            ).grad_norm
            for index in range(mini_batches)
        ]
    engine.lr_scheduler_step()
    return norms


@pytest.mark.parametrize("keys", [{}, {"param_dtype": "bf16"}], ids=["plain", "sharded"])
def test_an_update_moves_its_state_once_each_way(keys: dict[str, object], model_folder: Path) -> None:
    engine, stream = build(model_folder, **keys)
    plain = scenarios.build(ALONE, model_folder, **keys)
    weights = sum(parameter.nbytes for parameter in engine.module.parameters())
    moments = 2 * weights
    assert stream.bytes_moved() == {"to host": weights + moments, "to device": 0}
    buffers = len(stream.pinned)
    for seed in (0, 10):
        stream.events.clear()
        assert update(engine, seed) == update(plain, seed)
        assert stream.bytes_moved() == {"to host": weights + moments, "to device": weights + moments}
        # The first pass waits for the weights, the first step for the moments, and the host for the way back.
        order = [name for name, _ in stream.events if name not in ("to host", "to device")]
        assert order == ["mark", "compute waits", "mark", "compute waits", "copies wait", "mark", "host waits"]
    assert stream.default_copies == 0
    assert len(stream.pinned) == buffers
    for name, tensor in scenarios.weights(engine).items():
        assert torch.equal(tensor, scenarios.weights(plain)[name])


def test_a_pass_without_gradients_brings_nothing_back(model_folder: Path) -> None:
    engine, stream = build(model_folder)
    batch = random_batch(3, 5, 7)
    expected = scenarios.build(ALONE, model_folder).infer_batch(batch, ForwardSettings())[0]["log_probs"]
    weights = sum(parameter.nbytes for parameter in engine.module.parameters())
    for _ in range(2):
        stream.events.clear()
        with engine.eval_mode():
            assert torch.equal(engine.infer_batch(batch, ForwardSettings())[0]["log_probs"], expected)
        assert stream.bytes_moved() == {"to host": 0, "to device": weights}
    update(engine, 0)
    stream.events.clear()
    engine.to("device")
    engine.to("cpu", optimizer=False)
    assert stream.bytes_moved() == {"to host": 0, "to device": 3 * weights}


def test_a_checkpoint_is_of_the_weights_in_host_memory(model_folder: Path, tmp_path: Path) -> None:
    engine, _ = build(model_folder)
    update(engine, 0)
    engine.save_checkpoint(tmp_path / "one")
    again, stream = build(model_folder)
    again.load_checkpoint(tmp_path / "one")
    assert update(again, 5) == update(engine, 5)
    assert stream.default_copies == 0


def test_eight_bit_moments_move_as_they_are_and_are_kept_in_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchao.optim")
    # torchao compiles its step, which takes minutes on a CPU and changes no number beyond rounding.
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    folder = tiny_model_folder(tmp_path / "m", vocab=2048, hidden=64)
    optim = OptimConfig(optimizer="adamw_8bit", lr=1e-3, eps=scenarios.EPS)
    plain, whole = (scenarios.build(ALONE, folder, optim=each) for each in (optim, replace(optim, optimizer="adamw")))
    engine = scenarios.build(ALONE, folder, optim=optim, **OFFLOADS)
    stream = RecordingStream()
    engine.residency = Residency(engine.module, engine.optimizer, stream)
    for seed in (0, 10):
        stream.events.clear()
        assert update(engine, seed) == update(plain, seed)
        update(whole, seed)
    weights = sum(parameter.nbytes for parameter in engine.module.parameters())
    # A quarter of float32 each, with scales of 256 numbers, and small parameters whole.
    assert stream.bytes_moved()["to device"] < weights + 2 * weights * 0.3
    expected = scenarios.weights(whole)
    for name, tensor in scenarios.weights(engine).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-3)
    engine.save_checkpoint(tmp_path / "checkpoint")
    again = scenarios.build(ALONE, folder, optim=optim)
    again.load_checkpoint(tmp_path / "checkpoint")
    assert update(again, 20) == update(engine, 20)


def test_the_offload_policy_holds_every_weight_and_moves_none(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies: list[object] = []
    shard = sharding_module.fully_shard

    def spy(module: nn.Module, **options: object) -> object:
        policies.append(options.get("offload_policy"))
        return shard(module, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(sharding_module, "fully_shard", spy)
    engine = scenarios.build(ALONE, model_folder, offload_policy=True)
    assert len(policies) == 3  # two layers and the rest
    assert all(isinstance(each, CPUOffloadPolicy) for each in policies)
    plain = scenarios.build(ALONE, model_folder)
    assert update(engine, 0) == pytest.approx(update(plain, 0), rel=1e-6)
    weights = [parameter.data_ptr() for parameter in engine.module.parameters()]
    for device in ("cpu", "device"):
        engine.to(device)
    assert [parameter.data_ptr() for parameter in engine.module.parameters()] == weights
    for name, tensor in scenarios.weights(engine).items():
        torch.testing.assert_close(tensor, scenarios.weights(plain)[name], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("random_init", [False, True])
def test_weights_are_loaded_to_their_home_and_buffers_to_the_device(model_folder: Path, random_init: bool) -> None:
    model, optim = ModelConfig(str(model_folder), random_init=random_init), OptimConfig()
    plan = build_module(EngineSetup("language_model", model, FsdpConfig(), optim, ALONE), torch.float32)
    plan.fill(torch.device("meta"), torch.device("cpu"))
    assert {each.device.type for each in plan.module.parameters()} == {"cpu"}
    assert {each.device.type for each in plan.module.buffers()} == {"meta"}


def test_training_leaves_no_gradients_and_no_cache(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[int] = []
    engine = scenarios.build(ALONE, model_folder)
    monkeypatch.setattr(
        engine_module,
        "empty_cache",
        lambda: emptied.append(sum(parameter.grad is not None for parameter in engine.module.parameters())),
    )
    update(engine, 0)
    assert emptied == [0]  # once, after the gradients were dropped
    assert all(parameter.grad is None for parameter in engine.module.parameters())


def layers() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)), nn.Linear(64, 1))
    return module, torch.randn(32, 64)


def test_offloaded_activations_come_back() -> None:
    module, rows = layers()
    module(rows).sum().backward()
    expected = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    module.zero_grad()
    stream = RecordingStream()
    offload = ActivationOffload(stream, least_bytes=1024, ahead_bytes=3 * 32 * 64 * 4)
    with offload:
        loss = module(rows).sum()
    assert stream.bytes_moved() == {"to host": offload.bytes_offloaded, "to device": 0}
    assert offload.bytes_offloaded >= 5 * 32 * 64 * 4  # the input of each linear layer; no weights
    forward = [name for name, _ in stream.events]
    # Each copy waits for the computation before it, and the computation for no copy.
    assert forward == ["copies wait", "to host", "hold"] * (len(forward) // 3)
    stream.events.clear()
    loss.backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients, expected, strict=True) if ours is not None)
    assert stream.bytes_moved() == {"to host": 0, "to device": offload.bytes_offloaded}
    assert stream.default_copies == 0
    # The first tensor is fetched with the next three, so the computation finds those there.
    backward = [name for name, _ in stream.events]
    assert backward[:8] == ["to device", "mark"] * 4
    assert backward[8] == "compute waits"


def test_tensors_of_another_device_are_not_offloaded() -> None:
    module, rows = layers()
    stream = RecordingStream()
    stream.device = torch.device("meta")
    offload = ActivationOffload(stream, least_bytes=0)
    with offload:
        module(rows).sum().backward()
    assert not offload.bytes_offloaded
    assert not stream.events


def test_a_graph_that_is_kept_fetches_again() -> None:
    module, rows = layers()
    with ActivationOffload(RecordingStream(), least_bytes=1024):
        loss = module(rows).sum()
    first = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(module.parameters()))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))
