from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_tools import make_prompts, run_all, tokens_of
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from rollcast.contracts.rollout import SamplingParams
from rollcast.errors import WeightSyncError
from rollcast.protocol import combine_checksums, tensor_checksum
from rollcast_hf.errors import WeightUpdateError
from rollcast_hf.model import build_model, load_model
from rollcast_hf.rollout import HfRollout
from rollcast_hf.schemas import HfRolloutConfig
from rollcast_hf.weights import load_buckets
from rollcast_serving.casting import CastRoom, WeightCast
from rollcast_serving.syncs.sending import pack_buckets
from rollcast_testing.tiny import tiny_model_folder


def test_a_folder_without_weights_is_enough(make_rollout: Callable[..., HfRollout], model: Any, tmp_path: Path) -> None:
    rollout = make_rollout(path=tiny_model_folder(tmp_path / "bare", weights=False))
    before = torch.get_rng_state()
    report = asyncio.run(rollout.update_weights([list(model.named_parameters())], 4))
    assert torch.equal(torch.get_rng_state(), before)
    expected = combine_checksums((name, tensor_checksum(value)) for name, value in model.named_parameters())
    assert report.checksums == {"0": expected}
    sampling = SamplingParams(temperature=0, max_tokens=8)
    rows = tokens_of(run_all(rollout, make_prompts(3), sampling))
    assert rows == tokens_of(run_all(make_rollout(), make_prompts(3), sampling))


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_a_weight_sync_casts_to_the_dtype_of_the_own_copy(
    model: Any, tmp_path: Path, dtype: torch.dtype | None
) -> None:
    folder = tiny_model_folder(tmp_path / "folder")
    config = AutoConfig.from_pretrained(folder)
    config.dtype = dtype
    config.save_pretrained(folder)
    named = dtype or torch.float32
    name = HfRollout.weight_dtype(HfRolloutConfig(), str(folder), "cpu")
    assert name == str(named).removeprefix("torch.")
    for own in (build_model(str(folder)), load_model(str(folder))):
        assert {each.dtype for each in own.parameters()} == {named}
        packed = pack_buckets(model.named_parameters(), 1 << 20, WeightCast(name))
        load_buckets(own, (list(CastRoom().cast(bucket)) for bucket in packed), 1)
        for key, parameter in own.named_parameters():
            assert torch.equal(parameter, model.get_parameter(key).to(named))


def test_a_tied_head_may_come_once_or_twice(model: Any) -> None:
    assert load_buckets(model, [list(model.named_parameters())], 1).tensors == len(list(model.parameters()))
    assert load_buckets(model, [list(model.state_dict().items())], 1).tensors == len(model.state_dict())
    head_only = [("lm_head.weight", model.lm_head.weight)]
    rest = [(name, value) for name, value in model.named_parameters() if "embed" not in name]
    load_buckets(model, [rest, head_only], 1)
    other = [*model.named_parameters(), ("lm_head.weight", model.lm_head.weight + 1)]
    with pytest.raises(WeightUpdateError, match=r"embed_tokens.*lm_head\.weight"):
        load_buckets(model, [other], 1)


def test_an_untied_head_must_come(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder(tmp_path / "untied", tied=False))
    named = [(name, value) for name, value in model.named_parameters() if "lm_head" not in name]
    with pytest.raises(WeightUpdateError, match=r"lacks lm_head\.weight"):
        load_buckets(model, [named], 2)


def test_wrong_shape_names_the_tensor_and_stops_generation(make_rollout: Callable[..., HfRollout], model: Any) -> None:
    rollout = make_rollout()
    bucket = [("model.norm.weight", torch.zeros(3))]
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight.*\(3,\).*\(64,\)"):
        asyncio.run(rollout.update_weights([bucket], 2))
    with pytest.raises(WeightSyncError, match="version 2 failed"):
        run_all(rollout, [[5]], SamplingParams())
    asyncio.run(rollout.update_weights([list(model.named_parameters())], 3))
    (output,) = run_all(rollout, [[5]], SamplingParams())
    assert set(output.sequences[0].weight_versions) == {3}


def test_experts_come_by_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "mixture", hidden=32, experts=4)
    named = load_file(folder / "model.safetensors")
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in named
    own = build_model(str(tiny_model_folder(tmp_path / "other", hidden=32, experts=4, seed=5)))
    load_buckets(own, [list(named.items())], 1)
    expected = load_model(str(folder))
    for name, parameter in own.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name))
    del named["model.layers.1.mlp.experts.3.up_proj.weight"]
    with pytest.raises(WeightUpdateError, match=r"lacks model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight"):
        load_buckets(own, [list(named.items())], 2)
