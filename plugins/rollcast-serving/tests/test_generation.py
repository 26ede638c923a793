"""``generate_sequences``: requests from padded prompts, and padded rows from answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcast.contracts.rollout import (
    BaseRollout,
    RolloutOutput,
    RolloutRequest,
    RolloutSequence,
    RolloutSetup,
    SamplingParams,
    WeightReport,
)
from rollcast.protocol import DataProto
from rollcast_serving.generation import GenerationContractError, generate_sequences, trim_responses

PAD = 0


class Scripted(BaseRollout):
    """Answers the k-th request with the k-th script, the later ones first."""

    def __init__(self, answers: Sequence[RolloutSequence]) -> None:
        super().__init__(RolloutSetup(None, "", 0, PAD, 1))
        self.answers = answers
        self.requests: list[RolloutRequest] = []

    async def generate(self, request: RolloutRequest) -> RolloutOutput:
        index = len(self.requests)
        self.requests.append(request)
        for _ in range(len(self.answers) - index):
            await asyncio.sleep(0)
        return RolloutOutput(request.request_id, [self.answers[index]], request.sampling)

    async def update_weights(self, buckets: Iterable[Any], version: int) -> WeightReport:
        raise NotImplementedError


def left_padded(prompts: Sequence[Sequence[int]]) -> DataProto:
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return DataProto.from_dict(
        {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    )


def generate(rollout: BaseRollout, prompts: DataProto, width: int) -> DataProto:
    return asyncio.run(generate_sequences(rollout, prompts, SamplingParams(max_tokens=width), PAD))


tokens = st.lists(st.integers(2, 50), min_size=1, max_size=6)


@given(st.lists(st.tuples(tokens, tokens, st.booleans()), min_size=1, max_size=6), st.integers(6, 9))
@settings(deadline=None)
def test_every_answer_stands_behind_its_own_prompt(rows: list[tuple[list[int], list[int], bool]], width: int) -> None:
    answers = [
        RolloutSequence(answer, [-0.5 * token for token in answer], "stop" if ended else "length", [3] * len(answer))
        for _, answer, ended in rows
    ]
    rollout = Scripted(answers)
    out = generate(rollout, left_padded([prompt for prompt, _, _ in rows]), width)
    assert [list(request.prompt_ids) for request in rollout.requests] == [prompt for prompt, _, _ in rows]
    assert out["responses"].shape == out["response_mask"].shape == out["rollout_log_probs"].shape == (len(rows), width)
    prompt_width = out["prompts"].shape[1]
    assert torch.equal(out["input_ids"], torch.cat([out["prompts"], out["responses"]], 1))
    assert torch.equal(out["attention_mask"][:, prompt_width:], out["response_mask"])
    for row, (prompt, answer, ended) in enumerate(rows):
        present = out["attention_mask"][row].bool()
        assert out["input_ids"][row][present].tolist() == [*prompt, *answer]
        assert out["position_ids"][row][present].tolist() == list(range(len(prompt) + len(answer)))
        chosen = out["response_mask"][row].bool()
        assert out["responses"][row][chosen].tolist() == answer
        assert out["responses"][row][~chosen].eq(PAD).all()
        assert out["rollout_log_probs"][row][chosen].tolist() == [-0.5 * token for token in answer]
        assert out["rollout_log_probs"][row][~chosen].eq(0).all()
        assert bool(out["finished"][row]) == ended
        assert int(out["rollout_weight_version"][row]) == 3


def test_an_aborted_answer_without_tokens_is_an_empty_row() -> None:
    out = generate(Scripted([RolloutSequence([], [], "abort", [])]), left_padded([[5, 6]]), 4)
    assert out["response_mask"].sum() == 0
    assert not bool(out["finished"][0])
    assert int(out["rollout_weight_version"][0]) == -1


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (RolloutSequence([4] * 5, [0.0] * 5, "length", [1] * 5), "5 tokens"),
        (RolloutSequence([4, 4], [0.0], "stop", [1, 1]), "1 log-probs"),
    ],
)
def test_a_rollout_that_breaks_its_contract_is_named(answer: RolloutSequence, says: str) -> None:
    with pytest.raises(GenerationContractError, match=says):
        generate(Scripted([answer]), left_padded([[5]]), 4)


def test_trimming_cuts_to_the_longest_answer() -> None:
    answers = [RolloutSequence([7] * n, [-1.0] * n, "stop", [0] * n) for n in (2, 3)]
    out = generate(Scripted(answers), left_padded([[5], [6, 6]]), 8)
    trimmed = trim_responses(out)
    assert trimmed["responses"].shape == (2, 3)
    assert trimmed["input_ids"].shape == (2, 2 + 3)
    for name in ("responses", "response_mask", "rollout_log_probs"):
        assert torch.equal(trimmed[name], out[name][:, :3])
    for name in ("input_ids", "attention_mask", "position_ids"):
        assert torch.equal(trimmed[name], out[name][:, :5])
    assert torch.equal(trimmed["prompts"], out["prompts"])


def test_trimming_keeps_one_column_where_nothing_was_generated() -> None:
    out = generate(Scripted([RolloutSequence([], [], "abort", [])]), left_padded([[5]]), 4)
    assert trim_responses(out)["responses"].shape == (1, 1)
