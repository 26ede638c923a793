"""Shared prompts against whole rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsdp_scenarios as scenarios
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollcast.contracts.engine import ForwardSettings
from rollcast.errors import ConfigError
from rollcast.protocol import DataProto
from rollcast_fsdp.engine import FsdpEngine
from rollcast_testing.tiny import random_batch

ALONE = scenarios.ALONE


def groups(prompts: int, samples: int, prompt_len: int = 6, response_len: int = 8, seed: int = 0) -> DataProto:
    """Rows of which ``samples`` each have a prompt in common, in random order."""
    batch = random_batch(prompts * samples, prompt_len, response_len, seed=seed)
    source = torch.arange(prompts).repeat_interleave(samples)
    changed = {"prompts": batch["prompts"][source]}
    for name, own in (("input_ids", "responses"), ("attention_mask", None)):
        response = batch[name][:, prompt_len:] if own is None else batch[own]
        changed[name] = torch.cat([batch[name][source, :prompt_len], response], 1)
    changed["position_ids"] = (changed["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    return batch.with_columns(changed).select_idxs(order)


def run(engine: FsdpEngine, batch: DataProto, how: ForwardSettings) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs and gradients."""
    with engine.eval_mode():
        output, _ = engine.infer_batch(batch, how)
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch, scenarios.nll, how)
        gradients = {name: p.grad.clone() for name, p in engine.module.named_parameters() if p.grad is not None}
    return scenarios.dict_of(output), gradients


def count_tokens(engine: FsdpEngine, call: Callable[[], Any]) -> int:
    seen: list[int] = []
    body: Any = engine.module.get_submodule("model")
    hook = body.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    try:
        call()
    finally:
        hook.remove()
    return sum(seen)


@pytest.fixture(scope="module")
def engines(model_folder: Path) -> tuple[FsdpEngine, FsdpEngine]:
    return scenarios.build(ALONE, model_folder), scenarios.build(ALONE, model_folder, share_prompts=True)


@given(
    prompts=st.integers(1, 4),
    samples=st.integers(1, 4),
    prompt_len=st.integers(1, 6),
    response_len=st.integers(1, 6),
    rows=st.sampled_from([None, 1, 3]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_outputs_and_gradients_are_those_of_whole_rows(
    engines: tuple[FsdpEngine, FsdpEngine],
    prompts: int,
    samples: int,
    prompt_len: int,
    response_len: int,
    rows: int | None,
    seed: int,
) -> None:
    batch = groups(prompts, samples, prompt_len, response_len, seed)
    how = ForwardSettings(temperature=0.8, calculate_entropy=True, micro_batch_size_per_gpu=rows)
    (expected, slopes), (output, gradients) = (run(engine, batch, how) for engine in engines)
    for name, values in expected.items():
        torch.testing.assert_close(output[name], values, rtol=1e-5, atol=1e-5)
    assert slopes.keys() == gradients.keys()
    scale = max(float(slope.abs().max()) for slope in slopes.values())
    for name, slope in slopes.items():
        torch.testing.assert_close(gradients[name], slope, rtol=1e-4, atol=1e-5 * scale, msg=name)


def test_each_distinct_prompt_goes_through_the_model_once(engines: tuple[FsdpEngine, FsdpEngine]) -> None:
    batch = groups(2, 4)
    starts, ends = ((batch["attention_mask"][:, part] > 0).sum(-1) for part in (slice(0, 6), slice(6, None)))
    whole, shared = (
        count_tokens(engine, lambda engine=engine: engine.infer_batch(batch, ForwardSettings())) for engine in engines
    )
    prompt, response = int(starts.max()), int(ends.max())
    assert whole == 8 * (prompt + response - 1)
    assert shared == 2 * prompt + 8 * (response - 1)


def test_rows_with_prompts_of_their_own_go_through_whole(engines: tuple[FsdpEngine, FsdpEngine]) -> None:
    batch = random_batch(5, 6, 8, seed=2)
    calls = [count_tokens(e, lambda engine=e: engine.infer_batch(batch, ForwardSettings())) for e in engines]
    assert calls[0] == calls[1]


def test_equal_tokens_at_other_positions_are_another_prompt(engines: tuple[FsdpEngine, FsdpEngine]) -> None:
    batch = groups(1, 2, seed=1)
    positions = batch["position_ids"].clone()
    positions[1] += 3
    batch = batch.with_columns({"position_ids": positions})
    expected, output = (engine.infer_batch(batch, ForwardSettings())[0]["log_probs"] for engine in engines)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_a_model_without_a_cache_is_refused(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scenarios.build(ALONE, model_folder, share_prompts=True)
    forward = engine.module.forward
    monkeypatch.setattr(engine.module, "forward", lambda **inputs: forward(**{**inputs, "use_cache": False}))
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM returns no KV cache"):
        engine.infer_batch(groups(1, 2), ForwardSettings())


def test_a_value_model_has_nothing_to_share(model_folder: Path) -> None:
    engine = scenarios.build(ALONE, model_folder, model_type="value_model", share_prompts=True)
    assert engine.infer_batch(groups(2, 2), ForwardSettings())[0]["values"].shape == (4, 8)
