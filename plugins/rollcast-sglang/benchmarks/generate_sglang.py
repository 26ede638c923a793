"""Measures the SGLang rollout: its start, its memory, and new tokens per second against the bare HTTP endpoint."""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import psutil

from rollcast.contracts.rollout import RolloutRequest, RolloutSetup, SamplingParams
from rollcast_sglang.rollout import SglangRollout
from rollcast_sglang.schemas import SglangRolloutConfig
from rollcast_testing.tiny import tiny_model_folder

PROMPTS, TOKENS = 256, 64


def main(repeats: int = 5) -> None:
    """Write one line per measurement; of the speeds the median of some repeats, taken in turns."""
    rng = random.Random(0)
    prompts = [[rng.randrange(4, 80) for _ in range(rng.randint(5, 20))] for _ in range(PROMPTS)]
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_model_folder(Path(folder), hidden=128, layers=4)
        start = time.perf_counter()
        rollout = SglangRollout(RolloutSetup(SglangRolloutConfig(), str(path), 0, pad_token_id=0, eos_token_id=2))
        try:
            asyncio.run(rollout.check_health())
            write("start", f"{time.perf_counter() - start:.1f} s")
            server = psutil.Process(rollout.server.pid)
            own = sum(each.memory_full_info().uss for each in [server, *server.children(recursive=True)])
            write("memory of the server's processes (unique)", f"{own / 2**20:.0f} MiB")
            ways: dict[str, Callable[[], None]] = {
                "rollout.generate, one call a prompt": lambda: generate(rollout, prompts),
                "bare endpoint, one call for all": lambda: asyncio.run(post(rollout, [prompts])),
                "bare endpoint, one call a prompt": lambda: asyncio.run(post(rollout, [[each] for each in prompts])),
            }
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(repeats + 1):
                for name, way in ways.items():
                    begin = time.perf_counter()
                    way()
                    seconds[name].append(time.perf_counter() - begin)
            for name, values in seconds.items():
                write(name, f"{PROMPTS * TOKENS / statistics.median(values[1:]):,.0f} tokens/s")
        finally:
            rollout.close()


def write(name: str, value: str) -> None:
    sys.stdout.write(f"| {name} | {value} |\n")


def generate(rollout: SglangRollout, prompts: list[list[int]]) -> None:
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)

    async def gather() -> None:
        requests = [RolloutRequest(str(i), prompt, sampling) for i, prompt in enumerate(prompts)]
        await asyncio.gather(*map(rollout.generate, requests))

    asyncio.run(gather())


async def post(rollout: SglangRollout, calls: list[list[list[int]]]) -> None:
    headers = {"Authorization": f"Bearer {rollout.server.api_key}"}
    params = {"temperature": 1.0, "max_new_tokens": TOKENS}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(rollout.server.url, headers=headers, connector=connector) as session:

        async def call(prompts: list[list[int]]) -> None:
            body = {"input_ids": prompts, "sampling_params": params, "return_logprob": True}
            async with session.post("/generate", json=body) as response:
                for answer in await response.json():
                    if len(answer["output_ids"]) != TOKENS:
                        raise RuntimeError(f"an answer has {len(answer['output_ids'])} tokens")

        await asyncio.gather(*map(call, calls))


if __name__ == "__main__":
    main()
