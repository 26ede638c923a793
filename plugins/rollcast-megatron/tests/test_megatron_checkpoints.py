"""Checkpoints that another mesh reads, and what is refused."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron_scenarios as scenarios
import pytest
import torch
from megatron_models import family_folder

from rollcast.contracts.engine import ForwardSettings, ModelConfig
from rollcast.errors import CheckpointError
from rollcast_megatron.engine import MegatronEngine
from rollcast_testing.ranks import Ranks
from rollcast_testing.tiny import plain_model, plain_weights

pytestmark = pytest.mark.long

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
VP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
SP2 = {**TP2, "sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2}
VALUES = {"model_type": "value_model"}


def assert_resumed(before: dict[str, Any], after: dict[str, Any]) -> None:
    for name, tensor in before["saved"].items():
        torch.testing.assert_close(after["saved"][name], tensor, rtol=0, atol=1e-6, msg=name)
    assert after["lr"] == before["lr"]
    for expected, step in zip(before["history"], after["history"], strict=True):
        assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        assert step.metrics == pytest.approx(expected.metrics, rel=1e-4)
    for name, tensor in before["after"].items():
        torch.testing.assert_close(after["after"][name], tensor, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("family", "tied", "source", "target"),
    [
        pytest.param("qwen2", True, TP2, {}, id="tp2-to-dp2-tied"),
        pytest.param("qwen3", True, {**PP2, "num_layers_in_last_pipeline_stage": 1}, SP2, id="pp2-uneven-to-sp2-tied"),
        pytest.param("llama", False, {"use_distributed_optimizer": False}, PP2, id="dp2-to-pp2"),
        pytest.param("qwen2", False, {}, TP2, id="distributed-dp2-to-tp2"),
        pytest.param("qwen2", True, VP2, TP2, id="interleaved-to-tp2-tied"),
        pytest.param("qwen3_moe", False, PP2, VP2, id="pp2-to-interleaved"),
        pytest.param("qwen3_moe", False, EP2, SP2, id="ep2-to-sp2"),
        pytest.param("glm4_moe", False, SP2, PP2, id="sp2-to-pp2-sigmoids"),
        pytest.param("deepseek_v3", False, SP2, PP2, id="sp2-to-pp2-latent-attention"),
        pytest.param("qwen3_moe", True, {}, {**EP2, "use_distributed_optimizer": False}, id="dp2-to-ep2-tied"),
        pytest.param("qwen2", True, {**PP2, **VALUES}, {**TP2, **VALUES}, id="value-model-pp2-to-tp2"),
    ],
)
def test_another_mesh_goes_on(
    two_ranks: Ranks,
    model_of: Callable[..., Path],
    tmp_path: Path,
    family: str,
    tied: bool,
    source: dict[str, Any],
    target: dict[str, Any],
) -> None:
    options: dict[str, Any] = {"folder": model_of(family, tied), "checkpoint": tmp_path / "checkpoint"}
    before = two_ranks.run(scenarios.save, **options, **source)
    for after in two_ranks.run(scenarios.resume, **options, **target):
        assert_resumed(before[0], after)


def test_training_goes_on_while_a_checkpoint_is_written(
    two_ranks: Ranks, model_of: Callable[..., Path], tmp_path: Path
) -> None:
    answers = two_ranks.run(scenarios.write_slowly, folder=model_of(), checkpoint=tmp_path / "checkpoint")
    assert answers == [(False, True)] * 2


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.cases(1)
def test_the_same_mesh_goes_on_bitwise(
    two_ranks: Ranks, model_of: Callable[..., Path], tmp_path: Path, background: bool
) -> None:
    options: dict[str, Any] = {"folder": model_of(), "checkpoint": tmp_path / "checkpoint"}
    before = two_ranks.run(scenarios.save, **options, background=background)
    after = two_ranks.run(scenarios.resume, **options)
    for expected, result in zip(before, after, strict=True):
        assert torch.equal(result["noise"], expected["noise"])
        assert result["history"] == expected["history"]
        for key in ("saved", "after"):
            for name, tensor in expected[key].items():
                assert torch.equal(result[key][name], tensor), name


def test_bfloat16_weights_keep_their_float32_copies(
    two_ranks: Ranks, model_of: Callable[..., Path], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"folder": model_of(), "checkpoint": tmp_path / "checkpoint", "dtype": "bfloat16"}
    before = two_ranks.run(scenarios.save, **options, **TP2)[0]
    assert {tensor.dtype for tensor in before["saved"].values()} == {torch.bfloat16}
    after = two_ranks.run(scenarios.resume, **options)[0]
    for name, tensor in before["saved"].items():
        assert torch.equal(after["saved"][name], tensor), name
    # The sums of two ranks differ in bfloat16; what the copies lost would show in every weight.
    for expected, step in zip(before["history"], after["history"], strict=True):
        assert step.grad_norm == pytest.approx(expected.grad_norm, rel=0.05)


def test_what_is_refused(two_ranks: Ranks, model_of: Callable[..., Path], tmp_path: Path) -> None:
    folder, checkpoint = model_of("llama", False), tmp_path / "checkpoint"
    options: dict[str, Any] = {"folder": folder, "checkpoint": checkpoint, **TP2}
    two_ranks.run(scenarios.save, steps=0, **options)
    other = family_folder(tmp_path / "other", "llama", tied=False, num_hidden_layers=2)
    for result in two_ranks.run(scenarios.fail_to_load, folder=other, checkpoint=checkpoint, **TP2):
        assert result["same"]
        assert "does not fit this engine: model.layers.2" in result["text"]
    shard = max((checkpoint / "shards").glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = shard.read_bytes()
    middle = len(content) // 2
    shard.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    for result in two_ranks.run(scenarios.fail_to_load, **options):
        assert result["same"]
        assert f"{shard} is corrupt" in result["text"]
    shard.write_bytes(content[:-7])
    assert f"{len(content)} were written" in two_ranks.run(scenarios.fail_to_load, **options)[0]["text"]
    shard.unlink()
    assert f"lacks shards/{shard.name}" in two_ranks.run(scenarios.fail_to_load, **options)[1]["text"]
    summary = checkpoint / "engine.json"
    summary.write_text(json.dumps({"engine": "fsdp"}), encoding="utf-8")
    assert "was not written by the megatron engine" in two_ranks.run(scenarios.fail_to_load, **options)[0]["text"]


@pytest.mark.parametrize(
    ("tied", "keys"), [(False, SP2), (True, PP2), (True, VP2)], ids=["sp2", "pp2-tied", "interleaved-tied"]
)
def test_exports_open_in_transformers(
    two_ranks: Ranks, model_of: Callable[..., Path], tmp_path: Path, tied: bool, keys: dict[str, Any]
) -> None:
    folder = model_of("qwen2", tied)
    results = two_ranks.run(scenarios.export, folder=folder, output=tmp_path / "hf", **keys)
    exported = plain_weights(plain_model(tmp_path / "hf"))
    for result in results:
        for whole in (result["weights"], result["whole"]):
            assert whole.keys() == exported.keys()
            assert all(torch.equal(whole[name], tensor) for name, tensor in exported.items())


def test_checkpoints_become_folders(two_ranks: Ranks, model_of: Callable[..., Path], tmp_path: Path) -> None:
    folder, checkpoint = model_of(), tmp_path / "checkpoint"
    before = two_ranks.run(scenarios.save, folder=folder, checkpoint=checkpoint, steps=0, **PP2)
    MegatronEngine.export_checkpoint(checkpoint, ModelConfig(path=str(folder)), tmp_path / "hf")
    exported = plain_weights(plain_model(tmp_path / "hf"))
    assert all(torch.equal(before[0]["saved"][name], tensor) for name, tensor in exported.items())
    other = family_folder(tmp_path / "other", "qwen2", tied=True, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match="does not fit"):
        MegatronEngine.export_checkpoint(checkpoint, ModelConfig(path=str(other)), tmp_path / "hf2")


def test_value_models_keep_their_heads(model_of: Callable[..., Path], tmp_path: Path) -> None:
    engine = scenarios.build(scenarios.ALONE, model_of(), model_type="value_model")
    scenarios.step(engine, 1)
    engine.export(tmp_path / "hf")
    again = scenarios.build(scenarios.ALONE, tmp_path / "hf", model_type="value_model")
    settings = ForwardSettings()
    assert torch.equal(
        scenarios.infer(again, settings=settings)["values"], scenarios.infer(engine, settings=settings)["values"]
    )


class Command:
    """A pickle that would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_code_in_common_values_is_refused(
    model_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even with valid checksums, and where the environment turns torch's restricted loader off."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    checkpoint, touched = tmp_path / "checkpoint", tmp_path / "touched"
    engine = scenarios.build(scenarios.ALONE, model_of())
    engine.save_checkpoint(checkpoint)
    engine.load_checkpoint(checkpoint)
    common = checkpoint / "shards" / "common.pt"
    torch.save({"more": Command(touched)}, common)
    content = common.read_bytes()
    for file in (checkpoint / "sums").glob("*.json"):
        sums = json.loads(file.read_text(encoding="utf-8"))
        if common.name in sums:
            sums[common.name] = [len(content), zlib.crc32(content)]
            file.write_text(json.dumps(sums), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"common\.pt is not a file of plain values"):
        engine.load_checkpoint(checkpoint)
    assert not touched.exists()
