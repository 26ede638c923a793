"""Adapters: against PEFT on plain transformers, and on meshes of two ranks; checkpoints, exports, refusals."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import megatron_lora_scenarios as lora
import megatron_scenarios as scenarios
import pytest
import torch
from megatron_models import family_folder
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from rollcast.contracts.engine import ModelConfig
from rollcast.errors import CapabilityError, CheckpointError
from rollcast_megatron.engine import MegatronEngine
from rollcast_testing.ranks import Ranks
from rollcast_testing.tiny import plain_log_probs, plain_model, plain_weights, random_batch

peft = pytest.importorskip("peft")

ALONE = scenarios.ALONE
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
VP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
SP2 = {**TP2, "sequence_parallel": True}
CP2 = {"context_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
PACKED = {"use_remove_padding": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def assert_close(given: Mapping[str, Tensor], expected: Mapping[str, Tensor], **limits: float) -> None:
    assert given.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(given[name], tensor, **(limits or {"rtol": 1e-5, "atol": 5e-6}), msg=name)


def assert_trained_alike(alone: dict[str, Any], results: list[dict[str, Any]]) -> None:
    sources = sorted((result["place"][0], number) for number, result in enumerate(results) if result["place"][1])
    for key in ("before", "base", "after"):
        for name, expected in alone[key].items():
            whole = torch.cat([results[number][key][name] for _, number in sources])
            torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-5, msg=f"{key}: {name}")
    for result in results:
        assert_close(result["first"], alone["first"], rtol=0, atol=0)
        assert_close(result["adapter"], alone["adapter"])
        for expected, given in zip(alone["history"], result["history"], strict=True):
            assert given.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
            assert given.metrics == pytest.approx(expected.metrics, rel=1e-5)


@pytest.mark.cases(2)
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"], r".*(self_attn\.[kv]|mlp\.up)_proj"])
@pytest.mark.parametrize("keys", [{}, SP2], ids=["alone", "sp2"])
def test_training_is_that_of_peft(
    two_ranks: Ranks, model_of: Callable[..., Path], targets: Any, keys: dict[str, Any]
) -> None:
    folder, model = model_of(), {**lora.LORA, "target_modules": targets}
    result = (
        two_ranks.run(lora.train, folder=folder, lora=model, **keys)[0]
        if keys
        else lora.train(ALONE, folder, lora=model)
    )
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=targets, task_type="CAUSAL_LM")
    module = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    names = {name.replace(".default", "") for name, each in module.named_parameters() if each.requires_grad}
    assert result["first"].keys() == names
    peft.set_peft_model_state_dict(module, result["first"])
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optim = scenarios.OPTIM
    adamw = torch.optim.AdamW(trained, lr=optim.lr, eps=optim.eps, weight_decay=optim.weight_decay)
    for seed, step in enumerate(result["history"]):
        data = random_batch(8, 6, 8, seed=seed)
        adamw.zero_grad()
        loss = -plain_log_probs(module, data)[0].sum() / data["response_mask"].sum()
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(trained, optim.clip_grad))
        adamw.step()
        assert (step.grad_norm, step.metrics["nll"]) == pytest.approx((norm, float(loss.detach())), rel=1e-5)
    assert_close(result["adapter"], peft.get_peft_model_state_dict(module))
    assert_close(result["weights"], plain_weights(plain_model(folder)), rtol=0, atol=0)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("family", "tied", "keys"),
    [
        pytest.param("llama", False, TP2, id="tp2"),
        pytest.param("qwen2", True, {**SP2, **FULL}, id="sp2-recompute-tied"),
        pytest.param("qwen2", True, {**PP2, **FULL}, id="pp2-recompute-tied"),
        pytest.param("qwen3", True, {**PP2, "recompute_granularity": "selective"}, id="pp2-selective"),
        pytest.param("qwen2", True, {**VP2, **FULL}, id="interleaved-recompute-tied"),
        pytest.param("llama", False, {}, id="copies"),
        pytest.param("llama", False, {"use_distributed_optimizer": False}, id="copies-of-the-optimizer"),
        pytest.param("qwen3", False, {**CP2, **PACKED}, id="packed-cp2"),
        pytest.param("qwen3", True, {**SP2, **PACKED}, id="packed-sp2"),
        pytest.param("qwen3_moe", False, EP2, id="ep2"),
        pytest.param("qwen3_moe", False, SP2, id="sp2-experts"),
    ],
)
def test_two_ranks_train_as_one(
    two_ranks: Ranks, model_of: Callable[..., Path], family: str, tied: bool, keys: dict[str, Any]
) -> None:
    folder = model_of(family, tied)
    alone = lora.train(ALONE, folder)
    assert torch.equal(alone["base"]["log_probs"], alone["before"]["log_probs"])
    assert not torch.allclose(alone["after"]["log_probs"], alone["base"]["log_probs"], atol=1e-3)
    assert not any("experts" in name for name in alone["adapter"])
    assert_trained_alike(alone, two_ranks.run(lora.train, folder=folder, **keys))


@pytest.mark.cases(1)
@pytest.mark.parametrize("keys", [TP2, SP2, PP2, VP2], ids=["tp2", "sp2", "pp2", "interleaved"])
def test_a_value_model_trains_its_head_too(
    two_ranks: Ranks, model_of: Callable[..., Path], keys: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"folder": model_of(), "model_type": "value_model"}
    alone = lora.train(ALONE, **options)
    assert alone["weights"]["score.weight"].any()
    results = two_ranks.run(lora.train, **options, **keys)
    assert_trained_alike(alone, results)
    for result in results:
        assert_close(result["weights"], alone["weights"])


@pytest.mark.cases(1)
@pytest.mark.parametrize("model_type", ["language_model", "value_model"])
@pytest.mark.parametrize("keys", [{}, SP2], ids=["copies", "sp2"])
def test_the_adapter_of_a_bfloat16_model_is_float32(
    two_ranks: Ranks, model_of: Callable[..., Path], model_type: str, keys: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"folder": model_of(), "model_type": model_type, "dtype": "bfloat16"}
    alone = lora.train(ALONE, **options)
    assert {tensor.dtype for tensor in alone["adapter"].values()} == {torch.float32}
    for result in two_ranks.run(lora.train, **options, **keys):
        for expected, given in zip(alone["history"], result["history"], strict=True):
            assert given.grad_norm == pytest.approx(expected.grad_norm, rel=0.05)


@pytest.mark.cases(1)
@pytest.mark.parametrize("keys", [TP2, PP2, VP2, {}], ids=["tp2", "pp2", "interleaved", "copies"])
def test_the_base_model_is_the_reference(two_ranks: Ranks, model_of: Callable[..., Path], keys: dict[str, Any]) -> None:
    folder = model_of()
    alone = lora.compare_with_base(ALONE, folder)
    divergences = [step.metrics["nll"] for step in alone["history"]]
    assert divergences[0] > 1e-4
    for result in two_ranks.run(lora.compare_with_base, folder=folder, **keys):
        assert [step.metrics["nll"] for step in result["history"]] == pytest.approx(divergences, rel=1e-4)
        assert_close(result["adapter"], alone["adapter"], rtol=1e-4, atol=2e-5)


def test_only_an_engine_with_an_adapter_has_a_base_model(model_of: Callable[..., Path]) -> None:
    engine = scenarios.build(ALONE, model_of())
    assert engine.get_adapter() is None
    with pytest.raises(CapabilityError, match=r"has no adapter; set model\.lora_rank"):
        engine.disable_adapter()
    with pytest.raises(CapabilityError, match="has no adapter"):
        engine.set_reference(engine)


@pytest.mark.cases(1)
@pytest.mark.parametrize("keys", [{}, SP2, PP2, VP2], ids=["copies", "sp2", "pp2", "interleaved"])
def test_checkpoints_hold_the_adapter_and_resume(
    two_ranks: Ranks, model_of: Callable[..., Path], tmp_path: Path, keys: dict[str, Any]
) -> None:
    """Bitwise on the same mesh, and on one rank."""
    options: dict[str, Any] = {"folder": model_of(), "checkpoint": tmp_path / "checkpoint"}
    written = two_ranks.run(lora.save, output=tmp_path / "hf", **options, **keys)
    kept = FileSystemReader(tmp_path / "checkpoint" / "shards").read_metadata().state_dict_metadata
    assert len(kept) == 3 * len(written[0]["saved"])
    assert all("lora_" in name for name in kept)
    for expected, result in zip(written, two_ranks.run(lora.resume, **options, **keys), strict=True):
        assert torch.equal(result["noise"], expected["noise"])
        assert result["history"] == expected["history"]
        for key in ("saved", "adapter", "outputs"):
            assert_close(result[key], expected[key], rtol=0, atol=0)
    other = lora.resume(ALONE, **options)
    assert_close(other["saved"], written[0]["saved"], rtol=0, atol=0)
    assert_close(other["adapter"], written[0]["adapter"])
    torch.testing.assert_close(other["logits"], written[0]["logits"], rtol=1e-4, atol=1e-4)
    _check_exports(tmp_path, options["folder"], written[0]["saved"])


def _check_exports(path: Path, folder: Path, saved: Mapping[str, Tensor]) -> None:
    """Exports of a live engine and of a checkpoint are the same, and PEFT opens the adapter."""
    MegatronEngine.export_checkpoint(path / "checkpoint", ModelConfig(path=str(folder)), path / "again")
    data = random_batch(8, 6, 8, seed=3)
    merged = plain_log_probs(plain_model(path / "hf"), data)[0].detach()
    assert not torch.allclose(merged, plain_log_probs(plain_model(folder), data)[0], atol=1e-3)
    assert torch.equal(plain_log_probs(plain_model(path / "again"), data)[0], merged)
    for output in (path / "hf", path / "again"):
        adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), str(output / "adapter"))
        assert_close(peft.get_peft_model_state_dict(adapted), saved, rtol=0, atol=0)
        torch.testing.assert_close(plain_log_probs(adapted.eval(), data)[0].detach(), merged, rtol=1e-5, atol=1e-5)


def test_an_exported_adapter_is_a_start(two_ranks: Ranks, model_of: Callable[..., Path], tmp_path: Path) -> None:
    folder = model_of()
    written = two_ranks.run(lora.save, folder=folder, checkpoint=tmp_path / "checkpoint", output=tmp_path / "hf", **TP2)
    model = {"lora_adapter_path": str(tmp_path / "hf" / "adapter")}
    for result in two_ranks.run(lora.train, folder=folder, lora=model, steps=0, **PP2):
        assert_close(result["first"], written[0]["saved"], rtol=0, atol=0)


def test_checkpoints_of_other_models_are_refused(model_of: Callable[..., Path], tmp_path: Path) -> None:
    folder, checkpoint = model_of(), tmp_path / "checkpoint"
    lora.save(ALONE, folder, checkpoint)
    engine = scenarios.build(ALONE, folder)
    with pytest.raises(CheckpointError, match=r"contains a LoRA adapter, but the engine trains the whole model"):
        engine.load_checkpoint(checkpoint)
    other = ModelConfig(path=str(model_of("qwen2", False)))
    with pytest.raises(CheckpointError, match="was trained on other base weights"):
        MegatronEngine.export_checkpoint(checkpoint, other, tmp_path / "hf")
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(folder / "config.json", empty)
    with pytest.raises(CheckpointError, match=r"its model cannot be built: .* contains no \*\.safetensors"):
        MegatronEngine.export_checkpoint(checkpoint, ModelConfig(path=str(empty)), tmp_path / "hf")


@pytest.mark.parametrize(
    ("family", "changes", "targets", "keys", "message"),
    [
        ("qwen2", {"num_key_value_heads": 1}, ["q_proj"], TP2, r"divides the model's 1 key-value heads, not 2"),
        ("qwen2", {}, r".*layers\.0\..*_proj", PP2, r"selects no layer of pipeline stage 1"),
        (
            "qwen2",
            {},
            r".*layers\.[0-2]\..*_proj",
            VP2,
            r"no layer of chunk 1 of pipeline stage 1, .*or lower virtual_",
        ),
        ("qwen2", {}, ["lm_head"], {}, r"the vocabulary head"),
        ("qwen2", {}, ["embed_tokens"], {}, r"not a linear layer"),
        ("qwen2", {}, ["nothing"], {}, r"model.target_modules=\['nothing'\] cannot be adapted"),
        ("qwen3_moe", {"decoder_sparse_step": 1}, ["gate_proj"], {}, r"cannot be adapted"),
    ],
    ids=str,
)
def test_targets_that_cannot_be_adapted_are_named(
    two_ranks: Ranks,
    tmp_path: Path,
    family: str,
    changes: dict[str, Any],
    targets: Any,
    keys: dict[str, Any],
    message: str,
) -> None:
    options: dict[str, Any] = {"lora": {**lora.LORA, "target_modules": targets}, **keys}
    folder = family_folder(tmp_path / "model", family, False, **changes)
    texts = (
        two_ranks.run(scenarios.fail, folder=folder, **options) if keys else [scenarios.fail(ALONE, folder, **options)]
    )
    for text in texts:
        assert text.startswith("ConfigError: model.target_modules=")
        assert re.search(message, text), text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_adapter_on_a_device(model_of: Callable[..., Path], tmp_path: Path) -> None:
    """The adapter's layers compute what the weights do into which it is merged, also beside Transformer Engine's."""
    engine = scenarios.build(ALONE, model_of(), lora=lora.LORA, dtype="bfloat16", **PACKED)
    before = scenarios.infer(engine)["log_probs"]
    for seed in range(3):
        scenarios.step(engine, seed)
    after = scenarios.infer(engine)["log_probs"]
    assert not torch.allclose(after, before, atol=0.1)
    engine.export(tmp_path / "hf")
    merged = scenarios.build(ALONE, tmp_path / "hf", dtype="bfloat16", **PACKED)
    torch.testing.assert_close(scenarios.infer(merged)["log_probs"], after, rtol=0, atol=0.05)
