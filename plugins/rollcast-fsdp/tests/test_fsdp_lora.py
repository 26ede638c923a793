"""Adapters: against PEFT on plain transformers, on one rank and two; checkpoints, exports, the reference policy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsdp_scenarios as scenarios
import lora_scenarios as lora
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from rollcast.contracts.engine import ModelConfig, OptimConfig
from rollcast.errors import CapabilityError, CheckpointError, ConfigError
from rollcast_fsdp.engine import FsdpEngine
from rollcast_testing.tiny import plain_log_probs, plain_model, plain_weights, tiny_model_folder

peft = pytest.importorskip("peft")
ALONE = scenarios.ALONE


def assert_same(given: Mapping[str, Tensor], expected: Mapping[str, Tensor], **limits: float) -> None:
    assert given.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(given[name], tensor, **(limits or {"rtol": 1e-5, "atol": 2e-6}), msg=name)


def peft_model(folder: Path, targets: Any = "all-linear") -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(r=lora.RANK, lora_alpha=lora.ALPHA, target_modules=targets, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def adapter_state(model: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in peft.get_peft_model_state_dict(model).items()}


def plain_steps(model: Any, optim: OptimConfig, seeds: list[int]) -> list[float]:
    """Losses' gradient norms of plain steps on the adapter alone."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=optim.lr, eps=optim.eps, weight_decay=optim.weight_decay)
    norms = []
    for seed in seeds:
        data = scenarios.share(ALONE, [2, 2], seed=seed)
        adamw.zero_grad()
        log_probs, _ = plain_log_probs(model, data)
        (-log_probs.sum() / data["response_mask"].sum()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, optim.clip_grad)))
        adamw.step()
    return norms


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"], r".*self_attn\.(k|o)_proj"])
def test_training_is_that_of_peft(model_folder: Path, targets: Any) -> None:
    engine = lora.build(ALONE, model_folder, target_modules=targets)
    model = peft_model(model_folder, targets)
    start = lora.adapter_of(engine)
    assert start.keys() == adapter_state(model).keys()
    peft.set_peft_model_state_dict(model, start)
    history = [lora.step(engine, ALONE, seed) for seed in range(4)]
    norms = plain_steps(model, lora.OPTIM, [0, 1, 2, 3])
    assert [result.grad_norm for result in history] == pytest.approx(norms, rel=1e-5)
    assert_same(lora.adapter_of(engine), adapter_state(model))
    assert_same(scenarios.weights(engine), plain_weights(plain_model(model_folder)), rtol=0, atol=0)


def test_an_adapter_starts_as_peft_starts_it(model_folder: Path) -> None:
    """B is zero, so the model starts as it is; A has the spread of ``nn.Linear``'s weights."""
    engine = lora.build(ALONE, model_folder)
    for name, tensor in lora.adapter_of(engine).items():
        if "lora_B" in name:
            assert not tensor.any(), name
        else:
            bound = tensor.shape[1] ** -0.5
            assert tensor.abs().max() <= bound, name
            assert float(tensor.std()) == pytest.approx(bound / 3**0.5, rel=0.2), name
    plain = scenarios.build(ALONE, model_folder)
    assert torch.equal(lora.infer(engine, ALONE)["log_probs"], lora.infer(plain, ALONE)["log_probs"])


@pytest.mark.parametrize("folder", ["model_folder", "untied_folder"])
def test_two_ranks_train_as_one(ranks: Any, folder: str, request: pytest.FixtureRequest) -> None:
    source = request.getfixturevalue(folder)
    alone = lora.train(ALONE, source)
    assert not torch.allclose(alone["after"]["log_probs"], alone["base"]["log_probs"], atol=1e-3)
    assert torch.equal(alone["base"]["log_probs"], alone["before"]["log_probs"])
    parts = ranks.run(lora.train, folder=source)
    for result in parts:
        assert_same(result["first"], alone["first"], rtol=0, atol=0)
        assert_same(result["adapter"], alone["adapter"])
        assert_same(result["weights"], alone["weights"], rtol=0, atol=0)
        for expected, given in zip(alone["history"], result["history"], strict=True):
            assert given.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    for key in ("base", "after"):
        both = torch.cat([result[key]["log_probs"] for result in parts])
        torch.testing.assert_close(both, alone[key]["log_probs"], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("experts", [0, 4])
def test_a_value_model_trains_its_head_too(ranks: Any, experts: int, tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "model", experts=experts)
    alone = lora.train(ALONE, folder, model_type="value_model")
    assert alone["weights"]["score.weight"].any()
    for result in ranks.run(lora.train, folder=folder, model_type="value_model"):
        assert_same(result["adapter"], alone["adapter"])
        assert_same(result["weights"], alone["weights"])


def test_the_base_model_is_the_reference(ranks: Any, model_folder: Path) -> None:
    """The exact divergence from the base model, in one forward of each; two ranks as one."""
    alone = lora.compare_with_base(ALONE, model_folder)
    divergences = [result.metrics["kl"] for result in alone["history"]]
    assert divergences[0] > 1e-4
    for result in ranks.run(lora.compare_with_base, folder=model_folder):
        assert_same(result["adapter"], alone["adapter"])
        assert [step.metrics["kl"] for step in result["history"]] == pytest.approx(divergences, rel=1e-4)


def test_only_an_engine_with_an_adapter_has_a_base_model(model_folder: Path) -> None:
    engine = scenarios.build(ALONE, model_folder)
    assert engine.get_adapter() is None
    with pytest.raises(CapabilityError, match=r"has no adapter; set model\.lora_rank"):
        engine.disable_adapter()
    with pytest.raises(CapabilityError, match="has no adapter"):
        engine.set_reference(engine)


def test_the_in_process_module_has_the_adapter(ranks: Any, model_folder: Path) -> None:
    reference = plain_model(model_folder)
    alone = lora.generate(ALONE, model_folder)
    results = ranks.run(lora.generate, folder=model_folder)
    for result in (alone, *results):
        base = reference(input_ids=result["ids"]).logits.detach()
        torch.testing.assert_close(result["base"], base, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(result["logits"], base, atol=1e-2)
    torch.testing.assert_close(results[0]["logits"], alone["logits"], rtol=1e-4, atol=1e-4)


def test_checkpoints_hold_the_adapter_and_resume_on_other_ranks(ranks: Any, model_folder: Path, tmp_path: Path) -> None:
    options = {"folder": model_folder, "checkpoint": tmp_path / "checkpoint"}
    written = ranks.run(lora.save_and_go_on, output=tmp_path / "hf", **options)
    kept = FileSystemReader(tmp_path / "checkpoint" / "shards").read_metadata().state_dict_metadata
    assert len(kept) == 4 * len(written[0]["saved"])  # with its step and both moments
    assert all("lora_" in name for name in kept)
    for result in [lora.load_and_go_on(ALONE, **options), *ranks.run(lora.load_and_go_on, **options)]:
        assert_same(result["saved"], written[0]["saved"], rtol=0, atol=0)
        assert_same(result["adapter"], written[0]["adapter"])
        for expected, given in zip(written[0]["history"], result["history"], strict=True):
            assert given.metrics == pytest.approx(expected.metrics, rel=1e-4)
    _check_exports(model_folder, tmp_path, written)


def _check_exports(model_folder: Path, tmp_path: Path, written: list[dict[str, Any]]) -> None:
    """Merged weights are PEFT's own merge; the adapter by itself opens in PEFT."""
    FsdpEngine.export_checkpoint(tmp_path / "checkpoint", ModelConfig(str(model_folder)), tmp_path / "saved")
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    opened = peft.PeftModel.from_pretrained(model, str(tmp_path / "hf" / "adapter"))
    assert_same(adapter_state(opened), written[0]["saved"], rtol=0, atol=0)
    assert_same(load_file(tmp_path / "saved" / "adapter" / "adapter_model.safetensors"), adapter_state(opened))
    merged = plain_weights(opened.merge_and_unload())
    for name in ("hf", "saved"):
        assert_same(plain_weights(plain_model(tmp_path / name)), merged, rtol=1e-6, atol=1e-7)
    data = scenarios.share(ALONE, [2, 2], seed=9)
    expected = plain_log_probs(plain_model(tmp_path / "hf"), data)[0].detach()
    given = torch.cat([result["outputs"]["log_probs"] for result in written])
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=2e-5)


def test_checkpoints_of_other_kinds_are_refused(model_folder: Path, tmp_path: Path) -> None:
    engine, plain = lora.build(ALONE, model_folder), scenarios.build(ALONE, model_folder)
    engine.save_checkpoint(tmp_path / "adapter")
    plain.save_checkpoint(tmp_path / "plain")
    with pytest.raises(
        CheckpointError, match=r"plain does not fit .* contains the whole model, but the engine trains a LoRA"
    ):
        engine.load_checkpoint(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="contains a LoRA adapter, but the engine trains the whole model"):
        plain.load_checkpoint(tmp_path / "adapter")
    other = tiny_model_folder(tmp_path / "other", seed=7)
    stranger = lora.build(ALONE, other)
    with pytest.raises(CheckpointError, match=r"on other base weights than those in model\.path"):
        stranger.load_checkpoint(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=f"on other base weights than those in {other}"):
        FsdpEngine.export_checkpoint(tmp_path / "adapter", ModelConfig(str(other)), tmp_path / "hf")
    wider = lora.build(ALONE, model_folder, lora_rank=8)
    with pytest.raises(
        CheckpointError, match=r"lora_A\.default\.weight: float32\[4, 64\] in the checkpoint, float32\[8, 64\] here"
    ):
        wider.load_checkpoint(tmp_path / "adapter")


def test_training_goes_on_from_an_adapters_folder(model_folder: Path, tmp_path: Path) -> None:
    first = lora.build(ALONE, model_folder, target_modules=["q_proj", "v_proj"])
    for seed in range(2):
        lora.step(first, ALONE, seed)
    first.export(tmp_path / "hf")
    folder = tmp_path / "hf" / "adapter"
    again = lora.build(ALONE, model_folder, lora_rank=0, lora_adapter_path=str(folder))
    assert_same(lora.adapter_of(again), lora.adapter_of(first), rtol=0, atol=0)
    assert again.get_adapter().config["target_modules"] == ["q_proj", "v_proj"]  # type: ignore[union-attr]
    assert torch.equal(lora.infer(again, ALONE)["log_probs"], lora.infer(first, ALONE)["log_probs"])
    assert lora.step(again, ALONE, 3).grad_norm > 0
    with pytest.raises(ConfigError, match=r"lora_rank is 8, but the adapter in .* has 4"):
        lora.build(ALONE, model_folder, lora_rank=8, lora_adapter_path=str(folder))
    other = tiny_model_folder(tmp_path / "other", hidden=32)
    with pytest.raises(ConfigError, match=r"does not fit this model: it has the wrong shape for .*q_proj\.lora_A"):
        lora.build(ALONE, other, lora_rank=0, lora_adapter_path=str(folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora=True, which is not supported"),
        ({"peft_type": "IA3"}, "describes an adapter of type IA3"),
        (None, "has no adapter_config.json"),
    ],
)
def test_adapters_of_other_kinds_are_refused(
    model_folder: Path, tmp_path: Path, changes: dict[str, Any] | None, message: str
) -> None:
    if changes is not None:
        peft_model(model_folder).save_pretrained(tmp_path)
        file = tmp_path / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ConfigError, match=message):
        lora.build(ALONE, model_folder, lora_rank=0, lora_adapter_path=str(tmp_path))


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["no_such"], "target_modules=.*no_such.* cannot be adapted"),
        (["lm_head"], "selects lm_head, the vocabulary head"),
        (["embed_tokens"], r"selects model\.embed_tokens, which is not a linear layer"),
        (3, "target_modules is 3; allowed are names"),
    ],
)
def test_targets_that_cannot_be_adapted_are_named(model_folder: Path, targets: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lora.build(ALONE, model_folder, target_modules=targets)


def test_without_peft_the_extra_is_named(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'rollcast-engine\[lora\]'"):
        lora.build(ALONE, model_folder)


def test_a_bf16_model_has_an_adapter_in_fp32(ranks: Any, model_folder: Path) -> None:
    alone = lora.train(ALONE, model_folder, keys={"model_dtype": "bf16"})
    assert {tensor.dtype for tensor in alone["adapter"].values()} == {torch.float32}
    assert {tensor.dtype for tensor in alone["weights"].values()} == {torch.bfloat16}
    for result in ranks.run(lora.train, folder=model_folder, keys={"model_dtype": "bf16", "reduce_dtype": "fp32"}):
        assert {tensor.dtype for tensor in result["adapter"].values()} == {torch.float32}
        assert result["history"][0].grad_norm == pytest.approx(alone["history"][0].grad_norm, rel=0.1)


def test_random_weights_take_an_adapter_too(model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "no_weights"
    shutil.copytree(model_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    engine = lora.build(ALONE, folder, random_init=True)
    assert lora.step(engine, ALONE, 0).grad_norm > 0
    engine.save_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match=r"its base model cannot be read: .*no_weights contains no"):
        FsdpEngine.export_checkpoint(tmp_path / "checkpoint", ModelConfig(str(folder)), tmp_path / "hf")
