"""Requests in flight when new weights come."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollcast.contracts.rollout import (
    BaseRollout,
    RolloutCapabilities,
    RolloutOutput,
    RolloutRequest,
    RolloutSequence,
    RolloutSetup,
    SamplingParams,
)
from rollcast.contracts.weights import WeightReport
from rollcast.errors import WeightSyncError
from rollcast_serving import in_flight
from rollcast_serving.in_flight import InFlightRollout, hold_requests

SAMPLING = SamplingParams(max_tokens=12)


def next_token(context: Sequence[int], version: int, place: int = 0) -> int:
    """A token that depends on all before it, and on the weights."""
    return (7 * sum(context) + 31 * len(context) + 1009 * version + place) % 50_000


class Engine(BaseRollout):
    """Computes one token of every request when it is told to."""

    capabilities = RolloutCapabilities(abort=True)

    def __init__(self) -> None:
        super().__init__(RolloutSetup(None, "", 0, 0, 1))
        self.version = 0
        self.requests: list[RolloutRequest] = []
        self.rows: dict[str, list[tuple[list[int], list[int], asyncio.Future[str]]]] = {}
        self.fails = False

    async def generate(self, request: RolloutRequest) -> RolloutOutput:
        self.requests.append(request)
        loop = asyncio.get_running_loop()
        rows = [([], [], loop.create_future()) for _ in range(request.sampling.n)]
        self.rows[request.request_id] = rows
        ends = [await end for _, _, end in rows]
        del self.rows[request.request_id]
        sequences = [
            RolloutSequence(
                array("i", tokens), array("f", [-float(each) for each in versions]), end, array("q", versions)
            )
            for (tokens, versions, _), end in zip(rows, ends, strict=True)
        ]
        return RolloutOutput(request.request_id, sequences, request.sampling)

    def compute(self, count: int, place: int | None = None) -> None:
        """Compute tokens of all sequences, or of one of each request."""
        for name, rows in self.rows.items():
            request = next(each for each in self.requests if each.request_id == name)
            for number, (tokens, versions, end) in enumerate(rows):
                for _ in range(count if place in (None, number) else 0):
                    if len(tokens) < request.sampling.max_tokens and not end.done():
                        tokens.append(next_token([*request.prompt_ids, *tokens], self.version))
                        versions.append(self.version)
                if len(tokens) == request.sampling.max_tokens and not end.done():
                    end.set_result("length")

    async def update_weights(self, buckets: Iterable[Any], version: int) -> WeightReport:
        assert not self.rows  # nothing is in flight
        if self.fails:
            raise WeightSyncError("a tensor is missing")
        self.version = version
        return WeightReport(version, 0, 0, 0.0, ())

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        for name in list(self.rows) if request_ids is None else request_ids:
            for _, _, end in self.rows.get(name, []):
                if not end.done():
                    end.set_result("abort")


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(30):
        await asyncio.sleep(0)


def check(request: RolloutRequest, sequence: RolloutSequence) -> None:
    """Every token is the one that the weights of its version give after all tokens before it."""
    context = list(request.prompt_ids)
    for token, version, log_prob in zip(sequence.token_ids, sequence.weight_versions, sequence.log_probs, strict=True):
        assert token == next_token(context, version)
        assert log_prob == -float(version)
        context.append(token)


def test_an_interrupted_request_goes_on_from_its_tokens_over_several_updates() -> None:
    async def run() -> None:
        engine = Engine()
        rollout = hold_requests(engine, "interrupt")
        request = RolloutRequest("r", [5, 6], SAMPLING, seed=3)
        answer = asyncio.ensure_future(rollout.generate(request))
        for version in (1, 2):
            await settle()
            engine.compute(4)
            await rollout.update_weights([], version)
        await settle()
        engine.compute(12)
        output = await answer
        assert output.request_id == "r"
        (sequence,) = output.sequences
        assert list(sequence.weight_versions) == [0] * 4 + [1] * 4 + [2] * 4
        assert sequence.finish_reason == "length"
        check(request, sequence)
        seeds = [each.seed for each in engine.requests]
        assert len(set(seeds)) == 3  # no random numbers repeat

    asyncio.run(run())


def test_of_a_group_only_the_cut_sequences_go_on() -> None:
    async def run() -> None:
        engine = Engine()
        rollout = hold_requests(engine, "interrupt")
        request = RolloutRequest("r", [5], replace(SAMPLING, n=3))
        answer = asyncio.ensure_future(rollout.generate(request))
        await settle()
        engine.compute(12, place=1)
        engine.compute(2, place=2)
        await rollout.update_weights([], 1)
        await settle()
        assert [len(each.prompt_ids) for each in engine.requests[1:]] == [1, 3]
        engine.compute(12)
        sequences = (await answer).sequences
        assert [list(each.weight_versions) for each in sequences] == [[1] * 12, [0] * 12, [0] * 2 + [1] * 10]
        for each in sequences:
            check(request, each)

    asyncio.run(run())


def test_tokens_that_may_begin_a_stop_text_are_sampled_again() -> None:
    async def run() -> None:
        engine = Engine()
        rollout = hold_requests(engine, "interrupt")
        request = RolloutRequest("r", [5], replace(SAMPLING, stop=("end", "no")))
        answer = asyncio.ensure_future(rollout.generate(request))
        await settle()
        engine.compute(6)
        await rollout.update_weights([], 1)
        await settle()
        engine.compute(12)
        (sequence,) = (await answer).sequences
        assert list(sequence.weight_versions) == [0] * 4 + [1] * 8
        check(request, sequence)

    asyncio.run(run())


def test_requests_end_on_the_old_weights_and_new_ones_wait() -> None:
    async def run() -> None:
        engine = Engine()
        rollout = hold_requests(engine, "finish")
        early = asyncio.ensure_future(rollout.generate(RolloutRequest("early", [5], SAMPLING)))
        await settle()
        engine.compute(3)
        update = asyncio.ensure_future(rollout.update_weights([], 1))
        late = asyncio.ensure_future(rollout.generate(RolloutRequest("late", [6], SAMPLING)))
        await settle()
        assert not update.done()
        assert len(engine.requests) == 1
        engine.compute(9)
        await update
        assert set((await early).sequences[0].weight_versions) == {0}
        await settle()
        engine.compute(12)
        assert set((await late).sequences[0].weight_versions) == {1}

    asyncio.run(run())


def test_a_request_that_its_caller_ends_does_not_go_on() -> None:
    async def run() -> None:
        engine = Engine()
        rollout = hold_requests(engine, "interrupt")
        one, other = (
            asyncio.ensure_future(rollout.generate(RolloutRequest(name, [5], SAMPLING))) for name in ("one", "other")
        )
        await settle()
        engine.compute(4)
        await rollout.abort(["one"])
        (cut,) = (await one).sequences
        assert (cut.finish_reason, len(cut.token_ids)) == ("abort", 4)
        await rollout.update_weights([], 1)
        await settle()
        await rollout.abort()
        (cut,) = (await other).sequences
        assert (cut.finish_reason, len(cut.token_ids)) == ("abort", 4)

    asyncio.run(run())


@pytest.mark.parametrize("policy", ["finish", "interrupt"])
def test_a_failed_update_holds_nobody_up(policy: str) -> None:
    async def run() -> None:
        engine = Engine()
        engine.fails = True
        rollout = hold_requests(engine, policy)
        with pytest.raises(WeightSyncError, match="missing"):
            await rollout.update_weights([], 1)
        answer = asyncio.ensure_future(rollout.generate(RolloutRequest("r", [5], SAMPLING)))
        await settle()
        engine.compute(12)
        assert len((await answer).sequences[0].token_ids) == 12

    asyncio.run(run())


def test_the_engine_is_served_as_it_is_by_default() -> None:
    engine = Engine()
    assert hold_requests(engine, "continue") is engine
    assert isinstance(hold_requests(engine, "finish"), InFlightRollout)


def test_a_continued_sequence_keeps_the_experts_it_was_sampled_with() -> None:
    def part(tokens: list[int], first: int, prompt: int) -> RolloutSequence:
        routed = np.full((prompt + len(tokens), 1, 1), first, np.int16)
        routed[-1] = -1
        return RolloutSequence(tokens, [-1.0] * len(tokens), "length", [0] * len(tokens), routed)

    head = in_flight._first(part([5, 6, 7], 1, prompt=4), 2)
    assert head.routed_experts is not None
    assert head.routed_experts.flatten().tolist() == [1] * 6
    whole = in_flight._joined(head, part([8, 9], 2, prompt=6))
    assert whole.routed_experts is not None
    # The head's last token was read again with the tail.
    assert whole.routed_experts.flatten().tolist() == [1] * 5 + [2, 2, -1]
