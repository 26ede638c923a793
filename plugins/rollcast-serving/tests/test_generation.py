"""``generate_sequences``: requests from jagged prompts, and rows from answers."""

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
from rollcast.protocol import DataProto, Jagged
from rollcast_serving.generation import GenerationContractError, generate_sequences

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


def prompts_of(prompts: Sequence[Sequence[int]]) -> DataProto:
    rows = [torch.tensor(list(prompt)) for prompt in prompts]
    return DataProto.from_dict({"prompts": torch.nested.nested_tensor(rows, layout=torch.jagged)})


def generate(rollout: BaseRollout, prompts: DataProto, width: int) -> DataProto:
    return asyncio.run(generate_sequences(rollout, prompts, SamplingParams(max_tokens=width)))


tokens = st.lists(st.integers(2, 50), min_size=1, max_size=6)


@given(st.lists(st.tuples(tokens, tokens, st.booleans()), min_size=1, max_size=6), st.integers(6, 9))
@settings(deadline=None)
def test_every_answer_stands_behind_its_own_prompt(rows: list[tuple[list[int], list[int], bool]], width: int) -> None:
    answers = [
        RolloutSequence(answer, [-0.5 * token for token in answer], "stop" if ended else "length", [3] * len(answer))
        for _, answer, ended in rows
    ]
    rollout = Scripted(answers)
    out = generate(rollout, prompts_of([prompt for prompt, _, _ in rows]), width)
    assert [list(request.prompt_ids) for request in rollout.requests] == [prompt for prompt, _, _ in rows]
    assert [out[name].dtype for name in ("prompts", "responses")] == [torch.int32] * 2
    assert (out["response_mask"].dtype, out["rollout_log_probs"].dtype) == (torch.bool, torch.float32)
    columns = [out[name].unbind() for name in ("prompts", "responses", "response_mask", "rollout_log_probs")]
    for row, (prompt, answer, ended) in enumerate(rows):
        found, responses, mask, log_probs = (column[row].tolist() for column in columns)
        assert (found, responses, mask) == (prompt, answer, [True] * len(answer))
        assert log_probs == [-0.5 * token for token in answer]
        assert bool(out["finished"][row]) == ended
        assert int(out["rollout_weight_version"][row]) == 3


def test_an_aborted_answer_without_tokens_is_an_empty_row() -> None:
    out = generate(Scripted([RolloutSequence([], [], "abort", [])]), prompts_of([[5, 6]]), 4)
    assert Jagged.of(out["response_mask"]).lengths.tolist() == [0]
    assert not bool(out["finished"][0])
    assert int(out["rollout_weight_version"][0]) == -1


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (RolloutSequence([4] * 5, [0.0] * 5, "length", [1] * 5), "5 tokens"),
        (RolloutSequence([4, 4], [0.0], "stop", [1, 1]), "1 log-probs"),
        (RolloutSequence([4, 4], [0.0, float("nan")], "stop", [1, 1]), "not finite"),
    ],
)
def test_a_rollout_that_breaks_its_contract_is_named(answer: RolloutSequence, says: str) -> None:
    with pytest.raises(GenerationContractError, match=says):
        generate(Scripted([answer]), prompts_of([[5]]), 4)
