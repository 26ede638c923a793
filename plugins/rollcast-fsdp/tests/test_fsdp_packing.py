"""Packed rows: what goes through the model, who attends to whom, and which models are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsdp_scenarios as scenarios
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from rollcast.contracts.engine import ForwardSettings, ModelConfig
from rollcast.errors import CapabilityError, ConfigError
from rollcast_engine.batching import dummy_micro_batch, plan_batch
from rollcast_fsdp.attention import PackedRows, packed_attention
from rollcast_fsdp.packing import pack_rows
from rollcast_fsdp.schemas import FsdpConfig
from rollcast_fsdp.sharding import check_heads
from rollcast_testing.tiny import plain_log_probs, plain_model, random_batch

ALONE = scenarios.ALONE
PACKS = {"use_remove_padding": True}


def blockwise(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], window: int | None) -> Tensor:
    """The same by one mask over the whole pack."""
    row = torch.tensor([number for number, length in enumerate(lengths) for _ in range(length)])
    place = torch.arange(len(row))
    distance = place.unsqueeze(1) - place
    mask = (row.unsqueeze(1) == row) & (distance >= 0)
    if window is not None:
        mask &= distance < window
    groups = query.size(1) // key.size(1)
    key, value = (heads.repeat_interleave(groups, 1) for heads in (key, value))
    return scaled_dot_product_attention(query, key, value, mask, scale=0.3).transpose(1, 2)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), window=st.sampled_from([None, 1, 4]))
@settings(max_examples=25, deadline=None)
def test_tokens_attend_within_their_row(lengths: list[int], window: int | None) -> None:
    torch.manual_seed(len(lengths))
    count = sum(lengths)
    tensors = [torch.randn(1, heads, count, 8, requires_grad=True) for heads in (4, 2, 2)]
    rows = PackedRows(tuple(lengths), torch.tensor([0, *lengths]).cumsum(0).int())
    given_, _ = packed_attention(nn.Module(), *tensors, None, scaling=0.3, sliding_window=window, packed_rows=rows)
    expected = blockwise(*tensors, lengths, window)
    torch.testing.assert_close(given_, expected, rtol=1e-5, atol=1e-6)
    weights = torch.randn_like(expected)
    ours = torch.autograd.grad(given_, tensors, weights)
    theirs = torch.autograd.grad(expected, tensors, weights)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_a_pack_holds_each_token_that_predicts_once() -> None:
    batch = random_batch(6, 5, 7, seed=3)
    micro = plan_batch(batch, ForwardSettings(), packs=True).micro_batch(0, torch.device("cpu"))
    pack = pack_rows(micro)
    present = micro.model_inputs["attention_mask"] > 0
    assert pack.input_ids.shape == (1, int(present.sum()) - 6)
    assert sum(pack.rows.lengths) == pack.input_ids.size(1)
    assert pack.rows.bounds.tolist()[-1] == pack.input_ids.size(1)
    chosen = (micro.response_mask > 0).flatten()
    assert torch.equal(pack.targets, chosen.nonzero().flatten())
    assert torch.equal(pack.tokens, micro.responses.flatten()[chosen])
    # Each token's place is that of the one before it, in its row.
    starts = pack.rows.bounds.tolist()[:-1]
    for row, start in enumerate(starts):
        tokens = micro.model_inputs["input_ids"][row][present[row]]
        length = pack.rows.lengths[row]
        assert torch.equal(pack.input_ids[0, start : start + length], tokens[:-1])
        assert pack.position_ids[0, start : start + length].tolist() == list(range(length))
    following = torch.cat([micro.model_inputs["input_ids"][row][present[row]][1:] for row in range(6)])
    assert torch.equal(following[pack.places], pack.tokens)


def test_a_dummy_makes_a_pack_too() -> None:
    pack = pack_rows(dummy_micro_batch(torch.device("cpu")))
    assert pack.input_ids.shape == (1, 1)
    assert not len(pack.places)


def test_rows_under_no_attention_are_left_out(model_folder: Path) -> None:
    batch = random_batch(4, 5, 7, seed=3)
    attention, mask = batch["attention_mask"].clone(), batch["response_mask"].clone()
    attention[1], mask[1] = 0, 0
    engine = scenarios.build(ALONE, model_folder, **PACKS)
    output, _ = engine.infer_batch(
        batch.with_columns({"attention_mask": attention, "response_mask": mask}), ForwardSettings()
    )
    expected = plain_log_probs(plain_model(model_folder), batch.select_idxs([0, 2, 3]))[0].detach()
    torch.testing.assert_close(output["log_probs"][[0, 2, 3]], expected, rtol=1e-5, atol=1e-5)
    assert not output["log_probs"][1].any()
    empty = batch.with_columns({"attention_mask": 0 * attention, "response_mask": 0 * mask})
    assert not engine.infer_batch(empty, ForwardSettings())[0]["log_probs"].any()


def test_the_budget_counts_tokens_and_not_padding(model_folder: Path) -> None:
    batch = random_batch(1, 5, 7, seed=3)  # a row of 12 tokens, as long as can be
    engine = scenarios.build(ALONE, model_folder, **PACKS)
    engine.infer_batch(batch, ForwardSettings(max_token_len_per_gpu=12))
    with pytest.raises(ConfigError, match="a row of 12 tokens does not fit max_token_len_per_gpu=11"):
        engine.infer_batch(batch, ForwardSettings(max_token_len_per_gpu=11))


def test_generation_is_unpacked_and_training_packed_again(model_folder: Path) -> None:
    batch = random_batch(3, 5, 7, seed=3)
    engine = scenarios.build(ALONE, model_folder, **PACKS)
    expected = engine.infer_batch(batch, ForwardSettings())[0]["log_probs"]
    prompts = {"input_ids": batch["prompts"], "attention_mask": batch["attention_mask"][:, :5]}
    with engine.in_process_module() as module:
        theirs = plain_model(model_folder).generate(**prompts, max_new_tokens=6, do_sample=False)
        assert torch.equal(module.generate(**prompts, max_new_tokens=6, do_sample=False), theirs)  # type: ignore[operator]
    assert torch.equal(engine.infer_batch(batch, ForwardSettings())[0]["log_probs"], expected)


def test_attention_that_cannot_be_packed_is_refused(model_folder: Path) -> None:
    model = ModelConfig(str(model_folder), attn_implementation="eager")
    with pytest.raises(ConfigError, match="attn_implementation=eager needs padded rows; use one of sdpa"):
        scenarios.build_model(ALONE, model, FsdpConfig(use_remove_padding=True))
    heads = torch.zeros(1, 1, 2, 8)
    with pytest.raises(ConfigError, match="does not pass the model's keyword arguments on"):
        packed_attention(nn.Module(), heads, heads, heads, None)
    rows = PackedRows((2,), torch.tensor([0, 2]).int())
    with pytest.raises(ConfigError, match="needs softcap"):
        packed_attention(nn.Module(), heads, heads, heads, None, packed_rows=rows, softcap=30.0)


@pytest.mark.parametrize("keys", [{"use_fused_kernels": True}, {}])
def test_a_model_that_scales_its_logits(tmp_path: Path, keys: dict[str, Any]) -> None:
    """Whoever looks at hidden states would miss the scale: that is refused, and logits are right."""
    from transformers import CohereConfig, CohereForCausalLM

    config = CohereConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        logit_scale=0.5,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    CohereForCausalLM(config).save_pretrained(tmp_path)
    engine = scenarios.build(ALONE, tmp_path, **keys, **PACKS)
    batch = random_batch(3, 4, 5)
    if keys:
        with pytest.raises(
            ConfigError, match=r"^actor\.engine\.use_fused_kernels is true, but CohereForCausalLM changes"
        ):
            engine.infer_batch(batch, ForwardSettings())
        return
    expected = plain_log_probs(plain_model(tmp_path), batch)[0].detach()
    torch.testing.assert_close(
        engine.infer_batch(batch, ForwardSettings())[0]["log_probs"], expected, rtol=1e-5, atol=1e-5
    )


def test_sliding_windows_hold_in_packs(model_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(model_folder)
    module.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention"] * 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    batch = random_batch(3, 6, 9)
    expected = plain_log_probs(plain_model(tmp_path), batch)[0].detach()
    assert not torch.allclose(expected, plain_log_probs(plain_model(model_folder), batch)[0].detach(), atol=1e-4)
    given_ = scenarios.build(ALONE, tmp_path, **PACKS).infer_batch(batch, ForwardSettings())[0]["log_probs"]
    torch.testing.assert_close(given_, expected, rtol=1e-5, atol=1e-5)


def test_heads_that_ranks_cannot_share_are_refused(model_folder: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_folder)
    assert config.num_attention_heads == 4
    check_heads(config, 2, 8)
    with pytest.raises(ConfigError, match=r"4 attention heads do not divide by it; with 8 ranks use one of 1, 2, 4"):
        check_heads(config, 8, 8)


def test_only_engines_of_one_layout_are_compared(model_folder: Path) -> None:
    engine = scenarios.build(ALONE, model_folder, **PACKS)
    with pytest.raises(CapabilityError, match="use_remove_padding, use_fused_kernels"):
        engine.set_reference(scenarios.build(ALONE, model_folder, trained=False))
