"""Floating-point operations against what torch counts while a model runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rollcast.errors import ConfigError
from rollcast_automap.profiling.devices import find_peak
from rollcast_automap.profiling.flops import ARCHITECTURES, ModelFlops, read_model_flops

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def build(folder: Path, kind: str, **changes: Any) -> Any:
    """A tiny random model, and its config in ``folder``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **{**SIZES, **changes})
    config.save_pretrained(folder)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def counted(model: Any, rows: int, length: int, train: bool) -> int:
    """What torch counts."""
    ids = torch.randint(0, 96, (rows, length))
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=ids, use_cache=False).logits
        if train:
            logits.sum().backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 32}),
        ("mistral", {"num_key_value_heads": 4}),
        ("gemma", {"head_dim": 24}),
        # Not in the table: the model itself is looked at.
        ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}),
        ("phi3", {"pad_token_id": 0}),
    ],
)
@pytest.mark.parametrize("kind_of_pass", ["forward", "train"])
def test_dense_models_as_torch_counts_them(
    tmp_path: Path, kind: str, changes: dict[str, Any], kind_of_pass: Any
) -> None:
    model = build(tmp_path, kind, **changes)
    expected = counted(model, 2, 24, kind_of_pass == "train")
    found = read_model_flops(tmp_path).count([24, 24], kind=kind_of_pass)
    # Torch counts the products of rotary positions too, a thousandth of all.
    assert found == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [0]}),
        ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 80, "decoder_sparse_step": 2}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_of_experts_the_chosen_ones_count(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    model = build(tmp_path, kind, **changes)
    model.set_experts_implementation("eager")
    expected = counted(model, 2, 24, train=False)
    assert read_model_flops(tmp_path).count([24, 24]) == pytest.approx(expected, rel=2e-3)


def test_rows_count_for_themselves_and_the_head_for_what_goes_through_it() -> None:
    model = ModelFlops(body=10, head=7, pair=3)
    assert model.count([2, 5]) == 2 * (10 * 7 + 7 * 7 + 3 * (4 + 25))
    assert model.count([2, 5], head_tokens=1) == 2 * (10 * 7 + 7 + 3 * (4 + 25))
    assert model.count([2, 5], kind="train") == 3 * model.count([2, 5])
    assert model.count([]) == 0
    assert model.as_value_model(4).count([2]) == 2 * (10 * 2 + 4 * 2 + 3 * 4)


def test_a_published_shape(tmp_path: Path) -> None:
    """Qwen2.5-0.5B: 494,032,768 parameters, of which 136,134,656 are the tied embedding."""
    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    shape = {"model_type": "qwen2", **sizes, "num_key_value_heads": 2, "vocab_size": 151936}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    found = read_model_flops(tmp_path)
    biases_and_norms = 24 * ((14 + 2 * 2) * 64 + 2 * 896) + 896
    assert found.body + found.head + biases_and_norms == 494_032_768
    assert found.pair == 2 * 24 * 896
    assert read_model_flops(tmp_path, value_model=True).head == 896


def test_what_cannot_be_counted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.json cannot be read"):
        read_model_flops(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "clip_vision_model"}')
    with pytest.raises(ConfigError, match="cannot be counted"):
        read_model_flops(tmp_path)
    build(tmp_path, "olmoe", **EXPERTS)
    with pytest.raises(ConfigError, match=rf"model_type=olmoe has experts.*{min(ARCHITECTURES)}"):
        read_model_flops(tmp_path)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA A10", 125.0),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce GTX 1080", None),
        ("cpu", None),
    ],
)
def test_peaks_by_the_name_of_the_device(name: str, tflops: float | None) -> None:
    found = find_peak(name)
    assert found == (None if tflops is None else pytest.approx(tflops * 1e12))
