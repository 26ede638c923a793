"""Architectures besides Llama's, as tiny random models: the engine, its rollout, and transformers compute the same."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollcast.contracts.engine import EngineSetup, ForwardSettings, ModelConfig, OptimConfig
from rollcast.contracts.rollout import RolloutOutput, RolloutRequest, RolloutSetup, SamplingParams
from rollcast.contracts.worker import WorkerContext
from rollcast.errors import ConfigError
from rollcast.protocol import DataProto, Jagged
from rollcast_fsdp.engine import FsdpEngine
from rollcast_fsdp.schemas import FsdpConfig
from rollcast_hf.model import load_model
from rollcast_hf.rollout import HfRollout
from rollcast_hf.schemas import HfRolloutConfig
from rollcast_testing.engine_routing import other_choices
from rollcast_testing.tiny import jagged_batch, nll_loss, plain_log_probs, plain_model, random_batch

torch.set_num_threads(1)

VOCABULARY = 97
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {**WINDOWS, "query_pre_attn_scalar": 8},
    "qwen3_next": {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 16},
    "glm4": {},
    "glm4_moe": ROUTED,
    "deepseek_v3": {**ROUTED, **LATENT, "head_dim": 4},
}
#: Layers that carry a state from one token to the next, also from one row to the next in a pack.
STATEFUL = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the family's model; its name is that of the family."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family = request.param
    path = tmp_path_factory.mktemp("models") / family
    config = AutoConfig.for_model(family, **{**COMMON, "num_hidden_layers": 3, **FAMILIES[family]})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        module: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.copy_(torch.rand(buffer.shape) * 0.1)
    module.save_pretrained(path)
    return path


def build(folder: Path, **keys: Any) -> FsdpEngine:
    optim = OptimConfig(lr=1e-2, clip_grad=100.0)
    setup = EngineSetup(
        "language_model", ModelConfig(path=str(folder)), FsdpConfig(**keys), optim, WorkerContext(), seed=3
    )
    engine = FsdpEngine(setup)
    engine.initialize()
    return engine


def grouped(rows: int, samples: int) -> DataProto:
    """Rows of which ``samples`` each have a prompt in common."""
    batch = random_batch(rows, 7, 9, VOCABULARY, seed=5)
    first = torch.arange(rows) // samples * samples
    changed = {name: batch[name].clone() for name in ("input_ids", "attention_mask")}
    for column in changed.values():
        column[:, :7] = column[first, :7]
    changed["prompts"] = changed["input_ids"][:, :7]
    changed["position_ids"] = (changed["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return batch.with_columns(changed)


def gradients(engine: FsdpEngine, batch: DataProto) -> dict[str, torch.Tensor]:
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch, nll_loss, ForwardSettings(micro_batch_size_per_gpu=4))
        return {name: p.grad.clone() for name, p in engine.module.named_parameters() if p.grad is not None}


LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"use_remove_padding": True},
    "fused head": {"use_fused_kernels": True},
    "shared prompts": {"share_prompts": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_and_gradients_are_those_of_transformers_row_by_row(folder: Path, layout: str) -> None:
    if folder.name in STATEFUL and layout in ("packed", "shared prompts"):
        key = next(iter(LAYOUTS[layout]))
        with pytest.raises(ConfigError, match=rf"actor\.engine\.{key} is true, but .* carries a state"):
            build(folder, **LAYOUTS[layout])
        return
    batch = grouped(8, 2)
    module = plain_model(folder)
    module.train()
    expected, _ = plain_log_probs(module, batch)
    (-expected.sum() / batch["response_mask"].sum()).backward()
    engine = build(folder, **LAYOUTS[layout])
    found = engine.infer_batch(batch, ForwardSettings(micro_batch_size_per_gpu=4))[0]["log_probs"]
    torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=2e-5)
    given = gradients(engine, batch)
    slopes = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert given.keys() == slopes.keys()
    scale = max(float(slope.abs().max()) for slope in slopes.values())
    for name, slope in slopes.items():
        torch.testing.assert_close(given[name], slope, rtol=1e-3, atol=2e-5 * scale, msg=name)


def test_sampled_tokens_have_the_engines_log_probs(folder: Path) -> None:
    """Prompts of unequal length with several samples each; the batch does not change what a row gets."""
    engine = build(folder)
    rollout = HfRollout(RolloutSetup(HfRolloutConfig(), str(folder), 4, 0, 2))
    rollout.bind_engine(engine, 1)
    module = plain_model(folder)
    requests = [
        RolloutRequest(f"r{number}", prompt, SamplingParams(n=2, max_tokens=7, ignore_eos=True))
        for number, prompt in enumerate([[5, 9, 11, 30, 31, 32, 33, 34], [7], [60, 61, 62]])
    ]

    async def generate() -> list[RolloutOutput]:
        return list(await asyncio.gather(*(rollout.generate(request) for request in requests)))

    for request, output in zip(requests, asyncio.run(generate()), strict=True):
        for sequence in output.sequences:
            tokens = torch.tensor([[*request.prompt_ids, *sequence.token_ids]])
            with torch.no_grad():
                logits = module(input_ids=tokens).logits[0, -8:-1]
            expected = logits.log_softmax(-1).gather(-1, tokens[0, -7:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(sequence.log_probs), expected, rtol=1e-4, atol=2e-5)


def test_weights_go_out_and_come_back(folder: Path, tmp_path: Path) -> None:
    """What is sent to rollouts, and what is exported, is the whole trained model, its buffers too."""
    engine = build(folder)
    batch = grouped(4, 1)
    with engine.train_mode():
        engine.train_batch(batch, nll_loss, ForwardSettings())
    expected = engine.infer_batch(batch, ForwardSettings())[0]["log_probs"]
    engine.export(tmp_path / "export")
    exported = plain_model(tmp_path / "export")
    torch.testing.assert_close(plain_log_probs(exported, batch)[0].detach(), expected, rtol=1e-4, atol=2e-5)
    sent = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}
    stored = load_file(tmp_path / "export" / "model.safetensors")
    assert sent.keys() >= stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(tensor, sent[name]), name


@pytest.mark.parametrize("packing", [{}, {"use_remove_padding": True}], ids=["padded", "packed"])
def test_recorded_choices_weigh_as_the_routers_own(folder: Path, packing: dict[str, Any]) -> None:
    if folder.name not in ("glm4_moe", "deepseek_v3"):
        pytest.skip("its routers are none, or those of Qwen3-MoE, which the suite of engines covers")
    engine, batch = build(folder, **packing), jagged_batch(random_batch(5, 7, 9, VOCABULARY))
    output = engine.infer_batch(batch, ForwardSettings(record_routing=True, micro_batch_size_per_gpu=2))[0]
    assert Jagged.of(output["routed_experts"]).values.shape[1:] == (2, 2)
    again = batch.with_columns({"routed_experts": output["routed_experts"]})
    replayed = engine.infer_batch(again, ForwardSettings(micro_batch_size_per_gpu=3))[0]["log_probs"]
    torch.testing.assert_close(Jagged.of(replayed).values, Jagged.of(output["log_probs"]).values, rtol=1e-4, atol=2e-5)
    other = other_choices(batch, output["routed_experts"], ROUTED["n_routed_experts"])
    moved = engine.infer_batch(other, ForwardSettings())[0]["log_probs"]
    assert float((Jagged.of(moved).values - Jagged.of(replayed).values).abs().max()) > 1e-2


def test_bf16_is_that_of_transformers(folder: Path, tmp_path: Path) -> None:
    """Some buffers stay in float32, such as the bias of DeepSeek's routers."""
    from transformers import AutoModelForCausalLM

    module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    engine = build(folder, model_dtype="bf16")
    expected = {name: (tensor.dtype, tensor.shape) for name, tensor in module.named_buffers()}
    assert {name: (each.dtype, each.shape) for name, each in engine.module.named_buffers()} == expected
    ids = random_batch(1, 5, 6, VOCABULARY)["input_ids"]
    with torch.no_grad():
        assert torch.equal(engine.module(input_ids=ids).logits, module.eval()(input_ids=ids).logits)
    engine.export(tmp_path / "export")
    rollout: Any = load_model(str(tmp_path / "export"))
    with torch.no_grad():
        assert torch.equal(rollout(input_ids=ids).logits, module(input_ids=ids).logits)
    stored = load_file(folder / "model.safetensors")
    for name, tensor in load_file(tmp_path / "export" / "model.safetensors").items():
        dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        assert torch.equal(tensor, stored[name].to(dtype)), name
