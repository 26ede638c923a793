"""A request that SGLang refuses fails alone; runs without SGLang."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from rollcast.contracts.rollout import RolloutOutput, RolloutRequest, RolloutSetup, SamplingParams
from rollcast.errors import RolloutError
from rollcast_serving.engines.http_client import RefusedError
from rollcast_sglang.requests import Job, Row
from rollcast_sglang.rollout import SglangRollout

BAD = 66


class RefusingClient:
    """A server that refuses a whole batch for the sake of one prompt.

    Args:
        raises: True if it refuses with a status, False with an event.
    """

    def __init__(self, raises: bool) -> None:
        self.raises = raises
        self.ids: list[str] = []
        self.aborted: list[str] = []

    async def change(self, path: str, body: Mapping[str, Any]) -> None:
        self.aborted.append(body["rid"])

    async def generate(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        self.ids += body["rid"]
        if any(BAD in prompt for prompt in body["input_ids"]):
            if self.raises:
                raise RefusedError("400: no such prompt")
            yield {"error": "no such prompt"}
            return
        for index in range(len(body["rid"])):
            meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0, 7]], "weight_version": "0"}
            yield {"index": index, "output_ids": [7], "meta_info": meta}


@pytest.mark.parametrize("raises", [False, True])
def test_a_refused_request_fails_alone(raises: bool) -> None:
    async def main() -> None:
        rollout = SglangRollout.__new__(SglangRollout)
        rollout.setup = RolloutSetup(SimpleNamespace(), "", 0, 0, 2)
        client = rollout._client = RefusingClient(raises)  # type: ignore[assignment]
        rollout._tasks, rollout._rows, rollout._recorded = set(), 0, None
        jobs = []
        for prompt in ([5], [BAD], [6]):
            request = RolloutRequest(str(prompt), prompt, SamplingParams(n=2))
            job = Job(request, asyncio.get_running_loop().create_future(), array("i", prompt))
            job.rows = [Row(job, rollout._new_id(), seed) for seed in range(2)]
            jobs.append(job)
        await rollout._send(jobs)
        answers = await asyncio.gather(*(job.future for job in jobs), return_exceptions=True)
        assert [type(answer) for answer in answers] == [RolloutOutput, RefusedError, RolloutOutput]
        assert isinstance(answers[1], RolloutError)
        assert len(set(client.ids)) == len(client.ids)  # SGLang may still know the ids of the first attempt
        assert client.aborted == client.ids[:6]

    asyncio.run(main())
