"""One rank: what the conformance suite does not ask."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsdp_scenarios as scenarios
import pytest
import torch
import yaml  # type: ignore[import-untyped]
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForTokenClassification

from rollcast import build_section
from rollcast.contracts.engine import EngineSetup, ForwardSettings, LossInputs, LossOutput, ModelConfig, OptimConfig
from rollcast.contracts.worker import WorkerContext
from rollcast.errors import CheckpointError, ConfigError
from rollcast_fsdp.conf import SCHEMAS
from rollcast_fsdp.engine import FsdpEngine
from rollcast_fsdp.schemas import FsdpConfig
from rollcast_testing.tiny import nll_loss, plain_log_probs, plain_model, random_batch, tiny_model_folder

ALONE = scenarios.ALONE


def test_schemas_and_conf_need_no_torch() -> None:
    code = (
        "import sys, rollcast_fsdp, rollcast_fsdp.schemas, rollcast_fsdp.conf; "
        "sys.exit(len({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr


def test_yaml_holds_the_name_alone() -> None:
    text = (Path(sys.modules["rollcast_fsdp.conf"].__file__ or "").parent / "engine" / "fsdp.yaml").read_text()
    assert text.startswith("# @package actor.engine\n")
    assert yaml.safe_load(text) == {"name": FsdpConfig().name}
    assert SCHEMAS[0].schema is FsdpConfig


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"fsdp_size": 2}, r"fsdp_size is 2, but the group has 1 ranks; use -1 for all of them, or one of 1"),
        ({"fsdp_size": 0}, "fsdp_size is 0"),
        ({"ulysses_sequence_parallel_size": 2}, "ulysses_sequence_parallel_size is 2, but the group has 1 ranks"),
        ({"model_dtype": "float32"}, r"actor\.engine\.model_dtype must be one of fp32, bf16, got 'float32'"),
        ({"share_prompts": True, "enable_gradient_checkpointing": True}, "share_prompts is true, and so is"),
        (
            {"share_prompts": True, "use_remove_padding": True},
            r"share_prompts is true, and so is actor\.engine\.use_remove_padding",
        ),
        (
            {"offload_policy": True, "param_offload": True, "optimizer_offload": True},
            r"offload_policy is true, .* for actor\.engine\.param_offload and actor\.engine\.optimizer_offload; set them",
        ),
        ({"param_dtype": "fp16"}, "param_dtype must be one of fp32, bf16 or null, got 'fp16'"),
        ({"reduce_dtype": "half"}, "reduce_dtype must be one of fp32, bf16 or null, got 'half'"),
    ],
)
def test_wrong_engine_keys_are_named(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FsdpEngine(
            EngineSetup(
                "language_model", ModelConfig("x"), build_section(FsdpConfig, keys, "actor.engine"), None, ALONE
            )
        )


def test_passes_compute_in_param_dtype() -> None:
    assert FsdpEngine.compute_dtype(FsdpConfig()) == "float32"
    assert FsdpEngine.compute_dtype(FsdpConfig(model_dtype="bf16")) == "bfloat16"
    assert FsdpEngine.compute_dtype(FsdpConfig(param_dtype="bf16")) == "bfloat16"
    assert FsdpEngine.compute_dtype(FsdpConfig(model_dtype="bf16", param_dtype="fp32")) == "float32"


def test_keys_are_named_as_those_of_the_role() -> None:
    setup = EngineSetup("value_model", ModelConfig("x"), FsdpConfig(fsdp_size=2), None, ALONE, section="critic")
    with pytest.raises(ConfigError, match=r"^critic\.engine\.fsdp_size is 2"):
        FsdpEngine(setup)
    optim = OptimConfig(lr_scheduler_type="cosine")
    setup = EngineSetup("value_model", ModelConfig("x"), FsdpConfig(), optim, ALONE, section="critic")
    with pytest.raises(
        ConfigError, match=r"^critic\.optim\.lr_scheduler_type=cosine needs critic\.optim\.total_training"
    ):
        FsdpEngine(setup)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lr_scheduler_type": "step"}, "lr_scheduler_type must be one of constant, linear, cosine, wsd, got 'step'"),
        ({"lr_scheduler_type": "cosine"}, "needs actor.optim.total_training_steps"),
        ({"clip_grad": 0.0}, r"actor\.optim\.clip_grad must be above 0, got 0.0"),
        ({"betas": [0.9]}, r"betas must be a list of 2 numbers, got \[0.9\]"),
    ],
)
def test_wrong_optimizer_keys_are_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        optim = build_section(OptimConfig, keys, "actor.optim")
        FsdpEngine(EngineSetup("language_model", ModelConfig("x"), FsdpConfig(), optim, ALONE))


def test_a_group_without_a_port_is_refused(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # an engine of another test may have joined
    with pytest.raises(ConfigError, match="no master_port"):
        scenarios.build(WorkerContext(rank=0, world_size=2), model_folder)


def test_bad_model_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        scenarios.build(ALONE, tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        scenarios.build(ALONE, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(ConfigError, match="unheard_of"):
        scenarios.build(ALONE, tmp_path)
    empty = tiny_model_folder(tmp_path / "empty", weights=False)
    with pytest.raises(ConfigError, match="random_init=true"):
        scenarios.build(ALONE, empty)
    (empty / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        scenarios.build(ALONE, empty)
    bert = tmp_path / "bert"
    bert.mkdir()
    (bert / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ConfigError, match="AutoModelForCausalLM"):
        scenarios.build(ALONE, bert, random_init=True)


def test_incomplete_weights_are_refused(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 3
    config["layer_types"] = ["full_attention"] * 3
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"the folder lacks model\.layers\.2.* and \d+ more"):
        scenarios.build(ALONE, folder)


def test_random_weights_come_from_the_seed_alone(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "model", weights=False)
    before = torch.get_rng_state()
    first = scenarios.weights(scenarios.build(ALONE, folder, random_init=True))
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    second = scenarios.weights(scenarios.build(ALONE, folder, random_init=True))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_bf16_weights(model_folder: Path) -> None:
    engine = scenarios.build(ALONE, model_folder, model_dtype="bf16")
    assert {tensor.dtype for tensor in scenarios.weights(engine).values()} == {torch.bfloat16}
    output, _ = engine.infer_batch(random_batch(3, 4, 5), ForwardSettings())
    assert output["log_probs"].dtype == torch.float32


def test_a_micro_batch_has_at_least_one_row(model_folder: Path) -> None:
    engine = scenarios.build(ALONE, model_folder)
    with pytest.raises(ConfigError, match="micro_batch_size_per_gpu is 0"):
        engine.infer_batch(random_batch(2, 3, 4), ForwardSettings(micro_batch_size_per_gpu=0))


def test_training_needs_a_loss_and_an_optimizer(model_folder: Path) -> None:
    engine = scenarios.build(ALONE, model_folder, trained=False)
    with pytest.raises(TypeError, match="loss_function"):
        engine.forward_backward_batch(random_batch(2, 3, 4), None, ForwardSettings())
    with pytest.raises(TypeError, match="without optim"):
        engine.optimizer_step()


def test_a_loss_without_gradient_is_no_error(model_folder: Path) -> None:
    def constant(inputs: LossInputs) -> LossOutput:
        return LossOutput(torch.zeros(()), {"answer": torch.tensor(21.0)})

    engine = scenarios.build(ALONE, model_folder)
    with engine.train_mode():
        result = engine.train_batch(random_batch(4, 3, 4), constant, ForwardSettings(micro_batch_size_per_gpu=2))
    assert result.grad_norm == 0.0
    assert result.metrics == {"answer": 42.0}


def test_a_pad_token_that_ends_turns_is_trained(model_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(model_folder, tmp_path / "model")
    batch = random_batch(4, 6, 4, seed=1)
    token = int(batch["input_ids"][0, 5])  # of a prompt, in a position that no row pads
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "pad_token_id": token}))
    plain = plain_model(tmp_path / "model")
    norms = {}
    for padding in (token, None):
        plain.get_input_embeddings().padding_idx = padding
        plain.zero_grad()
        log_probs, _ = plain_log_probs(plain, batch)
        (-log_probs.sum() / batch["response_mask"].sum()).backward()
        norms[padding] = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9))
    assert norms[token] != pytest.approx(norms[None], rel=1e-4)
    engine = scenarios.build(ALONE, tmp_path / "model")
    with engine.train_mode():
        result = engine.train_batch(batch, nll_loss, ForwardSettings())
    assert result.grad_norm == pytest.approx(norms[None], rel=1e-5)


def test_modes_are_put_back(model_folder: Path) -> None:
    engine = scenarios.build(ALONE, model_folder)
    assert not engine.module.training
    with engine.train_mode():
        assert engine.module.training
        with engine.eval_mode():
            assert not engine.module.training
            assert not torch.is_grad_enabled()
        assert engine.module.training
        assert torch.is_grad_enabled()
    assert not engine.module.training


def test_value_model_exports_as_token_classification(model_folder: Path, tmp_path: Path) -> None:
    output = scenarios.export(ALONE, model_folder, tmp_path / "hf", tmp_path / "checkpoint", model_type="value_model")
    FsdpEngine.export_checkpoint(tmp_path / "checkpoint", ModelConfig(str(model_folder)), tmp_path / "saved")
    first, second = (
        load_file(tmp_path / "hf" / "model.safetensors"),
        load_file(tmp_path / "saved" / "model.safetensors"),
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    data = scenarios.share(ALONE, [2, 2])
    module = AutoModelForTokenClassification.from_pretrained(tmp_path / "hf").eval()
    logits = module(data["input_ids"], data["attention_mask"], data["position_ids"]).logits
    values = logits[:, 5:-1, 0].where(data["response_mask"] > 0, 0.0)
    torch.testing.assert_close(output["values"], values.detach(), rtol=1e-5, atol=1e-5)
    again = scenarios.build(ALONE, tmp_path / "hf", model_type="value_model")
    torch.testing.assert_close(again.infer_batch(data, ForwardSettings())[0]["values"], output["values"])


def test_fresh_values_are_zero(model_folder: Path) -> None:
    engine = scenarios.build(ALONE, model_folder, model_type="value_model")
    assert not engine.infer_batch(random_batch(3, 4, 5), ForwardSettings())[0]["values"].any()


def test_incomplete_checkpoints_name_what_is_missing(model_folder: Path, tmp_path: Path) -> None:
    engine = scenarios.build(ALONE, model_folder)
    checkpoint = tmp_path / "checkpoint"
    engine.save_checkpoint(checkpoint)
    (checkpoint / "rng" / "rank_0.pt").rename(tmp_path / "rng")
    with pytest.raises(CheckpointError, match=r"lacks .*rank_0\.pt"):
        engine.load_checkpoint(checkpoint)
    (tmp_path / "rng").rename(checkpoint / "rng" / "rank_0.pt")
    shard = next((checkpoint / "shards").glob("*.distcp"))
    shard.rename(tmp_path / "shard")
    with pytest.raises(CheckpointError, match=rf"it lacks shards/{shard.name}"):
        engine.load_checkpoint(checkpoint)
    whole = (tmp_path / "shard").read_bytes()
    shard.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=rf"{shard.name} has {len(whole) - 100} bytes; {len(whole)} were written"):
        engine.load_checkpoint(checkpoint)
    middle = len(whole) // 2
    shard.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    with pytest.raises(CheckpointError, match=rf"{shard.name} is corrupt"):
        engine.load_checkpoint(checkpoint)
    with pytest.raises(CheckpointError, match=rf"{shard.name} is corrupt"):
        FsdpEngine.export_checkpoint(checkpoint, ModelConfig(str(model_folder)), tmp_path / "hf")
    (tmp_path / "shard").rename(shard)
    metadata = checkpoint / "shards" / ".metadata"
    metadata.rename(tmp_path / "metadata")
    with pytest.raises(CheckpointError, match=r"lacks shards/\.metadata"):
        FsdpEngine.export_checkpoint(checkpoint, ModelConfig(str(model_folder)), tmp_path / "hf")
    (tmp_path / "metadata").rename(metadata)
    critic = scenarios.build(ALONE, model_folder, model_type="value_model")
    with pytest.raises(CheckpointError, match="holds a language_model, the engine a value_model; "):
        critic.load_checkpoint(checkpoint)
    engine.load_checkpoint(checkpoint)


def test_a_reference_policys_checkpoint_does_not_resume_training(model_folder: Path, tmp_path: Path) -> None:
    scenarios.build(ALONE, model_folder, trained=False).save_checkpoint(tmp_path / "reference")
    with pytest.raises(CheckpointError, match="no optimizer state"):
        scenarios.build(ALONE, model_folder).load_checkpoint(tmp_path / "reference")
    scenarios.build(ALONE, model_folder, trained=False).load_checkpoint(tmp_path / "reference")


def test_a_checkpoint_that_cannot_be_written_is_an_error(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="could not be written"):
        scenarios.build(ALONE, model_folder).save_checkpoint(tmp_path / "file" / "checkpoint")


def test_exporting_onto_another_model_is_refused(model_folder: Path, tmp_path: Path) -> None:
    scenarios.build(ALONE, model_folder).save_checkpoint(tmp_path / "checkpoint")
    other = tiny_model_folder(tmp_path / "other", hidden=32)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight has shape \(91, 64\); the model's has \(91, 32\)"):
        FsdpEngine.export_checkpoint(tmp_path / "checkpoint", ModelConfig(str(other)), tmp_path / "hf")


@pytest.mark.parametrize("key", ["fsdp_size", "ulysses_sequence_parallel_size"])
@pytest.mark.parametrize("size", [3, 5, 12, -2])
def test_meshes_that_do_not_fit_the_ranks_name_those_that_do(key: str, size: int) -> None:
    config = FsdpConfig(use_remove_padding=True, **{key: size})
    with pytest.raises(ConfigError, match=rf"{key} is {size}, but the group has 8 ranks; .*one of 1, 2, 4, 8"):
        config.check(8)
    FsdpConfig(use_remove_padding=True, fsdp_size=2, ulysses_sequence_parallel_size=4).check(8)


def test_sequences_are_shared_in_packs_only() -> None:
    with pytest.raises(ConfigError, match=r"splits packed sequences; set actor\.engine\.use_remove_padding=true too"):
        FsdpConfig(ulysses_sequence_parallel_size=2).check(2)


def _critic(folder: Path, attention: str = "sdpa", ranks: int = 1, **keys: Any) -> FsdpEngine:
    """A critic's engine; a language model, because a value model has no vocabulary head to refuse."""
    model = ModelConfig(str(folder), attn_implementation=attention)
    context = WorkerContext(world_size=ranks)
    return FsdpEngine(EngineSetup("language_model", model, FsdpConfig(**keys), None, context, section="critic"))


def test_keys_that_model_or_machine_refuse_are_named_with_their_role(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packs = {"use_remove_padding": True}
    with pytest.raises(ConfigError, match=r"^critic\.engine\.use_remove_padding is true, but model\.attn"):
        _critic(model_folder, "eager", **packs).initialize()
    with pytest.raises(ConfigError, match=r"^critic\.engine\.ulysses_sequence_parallel_size is 8, but .*4 attention"):
        _critic(model_folder, ranks=8, ulysses_sequence_parallel_size=8, **packs).initialize()
    monkeypatch.setattr("transformers.Qwen2ForCausalLM.get_output_embeddings", lambda self: nn.Identity())
    with pytest.raises(ConfigError, match=r"^critic\.engine\.use_fused_kernels is true, but the vocabulary head"):
        _critic(model_folder, use_fused_kernels=True).initialize()
    monkeypatch.setattr("rollcast_fsdp.kernels.shutil.which", lambda name: None)
    with pytest.raises(ConfigError, match=r"^critic\.engine\.use_torch_compile is true, but .* compiler"):
        _critic(model_folder, use_torch_compile=True).initialize()
