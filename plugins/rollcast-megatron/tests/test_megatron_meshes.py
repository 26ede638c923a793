"""Families of models, split over two ranks, against plain transformers in float32.

What holds on every mesh is in the conformance suite.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron_plain
import megatron_scenarios as scenarios
import pytest
import torch
from megatron_models import DEEPSEEK, family_folder

from rollcast.errors import ConfigError
from rollcast_testing.ranks import Ranks

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
VP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
SP2 = {**TP2, "sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2}
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def assert_same(plain: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """The ranks did what plain transformers do, in log-probs, gradient norms, losses and weights."""
    sources = sorted((result["place"][0], number) for number, result in enumerate(results) if result["place"][1])
    assert [rank for rank, _ in sources] == list(range(len(sources)))
    for name, expected in plain["before"].items():
        whole = torch.cat([results[number]["before"][name] for _, number in sources])
        torch.testing.assert_close(whole, expected, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    for result in results:
        for (norm, loss), step in zip(plain["history"], result["history"], strict=True):
            assert step.grad_norm == pytest.approx(norm, rel=1e-5)
            assert step.metrics["nll"] == pytest.approx(loss, rel=1e-5)
            assert not step.skipped
        assert result["weights"].keys() == plain["weights"].keys()
        for name, tensor in plain["weights"].items():
            torch.testing.assert_close(
                result["weights"][name], tensor, rtol=1e-5, atol=5e-6, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("family", "tied", "keys"),
    [
        pytest.param("llama", False, TP2, id="tp2-llama"),
        pytest.param("qwen3", True, {**SP2, "recompute_granularity": "selective"}, id="sp2-qwen3-tied-recompute"),
        pytest.param("qwen3", False, {**PP2, **FULL_RECOMPUTE}, id="pp2-qwen3-recompute"),
        pytest.param("qwen2", True, {**TP2, "head_chunk_size": 3}, id="tp2-qwen2-tied-chunks"),
        pytest.param("llama", True, {**PP2, "num_layers_in_first_pipeline_stage": 1}, id="pp2-llama-tied-uneven"),
        pytest.param("qwen3", True, {**VP2, **FULL_RECOMPUTE}, id="vp2-qwen3-tied-recompute"),
    ],
)
def test_two_ranks_are_plain_transformers(
    two_ranks: Ranks, model_of: Callable[..., Path], family: str, tied: bool, keys: dict[str, Any]
) -> None:
    folder = model_of(family, tied)
    assert_same(megatron_plain.train(folder), two_ranks.run(scenarios.train, folder=folder, **keys))


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        pytest.param({"norm_topk_prob": True}, EP2, id="ep2"),
        pytest.param({"mlp_only_layers": [1]}, {**SP2, **FULL_RECOMPUTE}, id="sp2-recompute"),
        pytest.param({"decoder_sparse_step": 1, "mlp_only_layers": [2]}, {**PP2, **FULL_RECOMPUTE}, id="pp2-recompute"),
    ],
)
@pytest.mark.cases(1)
def test_experts_among_dense_layers(
    two_ranks: Ranks, tmp_path: Path, changes: dict[str, Any], keys: dict[str, Any]
) -> None:
    folder = family_folder(tmp_path / "model", "qwen3_moe", False, **changes)
    assert_same(megatron_plain.train(folder), two_ranks.run(scenarios.train, folder=folder, **keys))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({**EP2, "use_remove_padding": True}, id="ep2-packed"),
        pytest.param({**SP2, **FULL_RECOMPUTE}, id="sp2-recompute"),
        pytest.param({**PP2, **FULL_RECOMPUTE}, id="pp2-recompute"),
    ],
)
def test_experts_for_some_tokens_and_for_all(
    two_ranks: Ranks, model_of: Callable[..., Path], keys: dict[str, Any]
) -> None:
    """GLM-4-MoE: sigmoids with a bias for the choice, groups of experts, shared experts, half-rotated heads."""
    folder = model_of("glm4_moe", False)
    assert_same(megatron_plain.train(folder), two_ranks.run(scenarios.train, folder=folder, **keys))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        pytest.param({"first_k_dense_replace": 4}, {**TP2, "use_remove_padding": True}, id="tp2-dense-packed"),
        pytest.param({}, {**SP2, **FULL_RECOMPUTE}, id="sp2-recompute"),
        pytest.param({}, {"context_parallel_size": 2, "use_remove_padding": True}, id="cp2-packed"),
        pytest.param({"q_lora_rank": None, "rope_parameters": None}, {**EP2}, id="ep2-whole-queries"),
        pytest.param({}, {**PP2}, id="pp2"),
    ],
)
def test_latent_attention(two_ranks: Ranks, tmp_path: Path, changes: dict[str, Any], keys: dict[str, Any]) -> None:
    """DeepSeek-V3: keys and values from a latent vector, and rotated keys that all heads share."""
    folder = family_folder(tmp_path / "model", "deepseek_v3", False, **changes)
    assert_same(megatron_plain.train(folder), two_ranks.run(scenarios.train, folder=folder, **keys))


@pytest.mark.parametrize("left_out", [["mscale"], ["mscale_all_dim"], ["mscale", "mscale_all_dim"]], ids="-".join)
@pytest.mark.cases(1)
def test_yarn_without_its_scales(tmp_path: Path, left_out: list[str]) -> None:
    rope = {name: value for name, value in DEEPSEEK["rope_parameters"].items() if name not in left_out}
    folder = family_folder(tmp_path / "model", "deepseek_v3", False, rope_parameters=rope)
    assert_same(megatron_plain.train(folder), [scenarios.train(scenarios.ALONE, folder=folder)])


@pytest.mark.parametrize("option", [{"attention_factor": 1.3}, {"truncate": False}], ids=str)
def test_options_of_yarn_that_would_be_ignored_are_refused(tmp_path: Path, option: dict[str, Any]) -> None:
    folder = family_folder(
        tmp_path / "model", "deepseek_v3", False, rope_parameters={**DEEPSEEK["rope_parameters"], **option}
    )
    with pytest.raises(ConfigError, match=f"has {next(iter(option))}=.*use engine=fsdp"):
        scenarios.build(scenarios.ALONE, folder)


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({**EP2, **FULL_RECOMPUTE}, id="ep2-recompute"),
        pytest.param({**SP2, **FULL_RECOMPUTE}, id="sp2-recompute"),
        pytest.param({**PP2, **FULL_RECOMPUTE}, id="pp2-recompute"),
    ],
)
@pytest.mark.cases(1)
def test_the_balance_loss_is_that_of_one_rank(
    two_ranks: Ranks, model_of: Callable[..., Path], keys: dict[str, Any]
) -> None:
    balanced = {"folder": model_of("qwen3_moe", False), "router_aux_loss_coef": 0.5}
    alone = scenarios.train(scenarios.ALONE, **balanced)
    for result in two_ranks.run(scenarios.train, **balanced, **keys):
        for expected, step in zip(alone["history"], result["history"], strict=True):
            assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
            assert step.metrics == pytest.approx(expected.metrics, rel=1e-5)
        for name, tensor in alone["weights"].items():
            torch.testing.assert_close(result["weights"][name], tensor, rtol=1e-5, atol=5e-6, msg=name)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])  # with biases on the projections, with norms on the heads
@pytest.mark.cases(1)
def test_ranks_share_a_key_value_head(two_ranks: Ranks, tmp_path: Path, family: str) -> None:
    folder = family_folder(tmp_path / "model", family, False, num_key_value_heads=1)
    assert_same(megatron_plain.train(folder), two_ranks.run(scenarios.train, folder=folder, **TP2))


@pytest.mark.cases(1)
@pytest.mark.parametrize("keys", [pytest.param(TP2, id="tp2"), pytest.param(PP2, id="pp2")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_parameters_are_gathered_together(
    two_ranks: Ranks, model_of: Callable[..., Path], keys: dict[str, Any], dtype: str
) -> None:
    """The folder's bits come back at any limit, with a collective for each batch and stage."""
    folder = model_of("qwen2", False)
    counts, orders = [], []
    for limit in (1, 20_000, 64 << 20):
        results = two_ranks.run(scenarios.gather_counted, folder=folder, limit=limit, dtype=dtype, **keys)
        assert not any(wrong for _, _, wrong in results)
        orders += [names for _, names, _ in results]
        counts.append(results[0][0])
    assert all(names == orders[0] for names in orders)
    assert counts[0] > counts[1] > counts[2]
    assert counts[2] == keys.get("pipeline_model_parallel_size", 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_packed_rows_on_a_device(model_of: Callable[..., Path]) -> None:
    """Transformer Engine's attention of packed rows, or ours without it, agrees with that of padded rows."""
    padded, packed = (
        scenarios.train(scenarios.ALONE, model_of(), dtype="bfloat16", use_remove_padding=packs)
        for packs in (False, True)
    )
    torch.testing.assert_close(packed["before"]["log_probs"], padded["before"]["log_probs"], rtol=0, atol=0.05)
    for step, expected in zip(packed["history"], padded["history"], strict=True):
        assert step.grad_norm == pytest.approx(expected.grad_norm, rel=0.05)
