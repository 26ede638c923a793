"""Memory that a training phase leaves to the rollout on the same device, in bytes of the device's allocator."""

from __future__ import annotations

import gc
from pathlib import Path

import fsdp_scenarios as scenarios
import pytest
import torch

from rollcast_fsdp.engine import FsdpEngine
from rollcast_testing.cuda import needs_cuda
from rollcast_testing.tiny import tiny_model_folder

pytestmark = needs_cuda

OFFLOADS = {"param_offload": True, "optimizer_offload": True}
#: Tensors that stay on the device in any case: the model's buffers and the counts of steps.
REST = 2 << 20


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 84 MB in float32, which stands out of the allocator's blocks of 2 MB."""
    return tiny_model_folder(tmp_path_factory.mktemp("model") / "large", hidden=1024)


def weight_bytes(engine: FsdpEngine) -> int:
    return sum(each.numel() * each.element_size() for each in engine.module.parameters())


def measure() -> tuple[int, int]:
    """Return the bytes of tensors, and the bytes that are free for other processes."""
    gc.collect()  # engines of earlier tests
    torch.cuda.synchronize()
    # The workspaces of cuBLAS, up to 32 MB for each stream, count as tensors and are no part of the engine.
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]


def test_gradients_and_activations_are_gone_after_training(large_folder: Path) -> None:
    start = measure()[0]
    engine = scenarios.build(scenarios.ALONE, large_folder, param_dtype="bf16")
    size = weight_bytes(engine)
    for _ in range(2):  # in the first update libraries load their kernels, and the optimizer makes its state
        built, free = measure()
        with engine.train_mode():
            engine.train_batch(scenarios.share(scenarios.ALONE, [6]), scenarios.nll, scenarios.ForwardSettings())
            within, _ = measure()
    after, free_after = measure()
    assert within - built >= size  # the gradients
    assert after - built <= REST
    # Weights and AdamW's two moments remain.
    assert abs(after - start - 3 * size) <= 0.1 * size
    # Cached blocks went back to the device.
    assert free_after >= free - (64 << 20)
    assert torch.cuda.memory_reserved() - after <= 64 << 20


@pytest.mark.parametrize("keys", [OFFLOADS, {**OFFLOADS, "param_dtype": "bf16"}], ids=["plain", "mixed"])
def test_an_offloading_engine_frees_its_state(keys: dict[str, object], large_folder: Path) -> None:
    start = measure()[0]
    engine = scenarios.build(scenarios.ALONE, large_folder, **keys)
    size = weight_bytes(engine)
    assert measure()[0] - start <= 0.05 * size + REST
    expected = scenarios.weights(engine)
    for _ in range(2):
        with engine.train_mode():
            loaded = measure()[0] - start
            engine.train_batch(scenarios.share(scenarios.ALONE, [6]), scenarios.nll, scenarios.ForwardSettings())
            trained = measure()[0] - start
        assert loaded >= 0.95 * size
        assert trained >= 2.9 * size  # weights and both moments
        assert measure()[0] - start <= 0.05 * size + REST
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= start + 0.05 * size + (64 << 20)
    moved = scenarios.weights(engine)
    assert any(not torch.equal(moved[name], tensor) for name, tensor in expected.items())
    assert measure()[0] - start <= 0.05 * size + REST


def test_the_offload_policy_keeps_state_in_host_memory(large_folder: Path) -> None:
    settings = scenarios.ForwardSettings()
    plain = scenarios.build(scenarios.ALONE, large_folder)
    with plain.train_mode():
        expected = plain.train_batch(scenarios.share(scenarios.ALONE, [6]), scenarios.nll, settings).grad_norm
    after = scenarios.weights(plain)
    del plain
    start = measure()[0]
    engine = scenarios.build(scenarios.ALONE, large_folder, offload_policy=True)
    size = weight_bytes(engine)
    assert measure()[0] - start <= 0.05 * size + REST
    torch.cuda.reset_peak_memory_stats()
    with engine.train_mode():
        norm = engine.train_batch(scenarios.share(scenarios.ALONE, [6]), scenarios.nll, settings).grad_norm
        assert measure()[0] - start <= 0.05 * size + REST  # gradients and moments are in host memory too
    assert norm == pytest.approx(expected, rel=1e-4)
    # One layer's weights and gradients at a time, with the embedding and the head; 4 x size without the policy.
    assert torch.cuda.max_memory_allocated() - start <= 2.5 * size
    assert {each.device.type for each in engine.module.parameters()} == {"cpu"}
    for name, tensor in scenarios.weights(engine).items():
        torch.testing.assert_close(tensor, after[name], rtol=1e-3, atol=1e-4)


def test_moving_to_the_host_and_back(large_folder: Path) -> None:
    engine = scenarios.build(scenarios.ALONE, large_folder)
    size, before = weight_bytes(engine), measure()[0]
    weights = scenarios.weights(engine)
    engine.to("cpu")
    assert before - measure()[0] >= 0.95 * 3 * size
    engine.to("cuda")
    assert abs(measure()[0] - before) <= REST
    assert all(torch.equal(weights[name], tensor) for name, tensor in scenarios.weights(engine).items())
