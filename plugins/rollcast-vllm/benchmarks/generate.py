"""New tokens per second by the bare AsyncLLM, through VllmRollout, and through a replica's server.

python plugins/rollcast-vllm/benchmarks/generate.py [--model FOLDER] [--lengths 16 480]; a tiny random model by default,
and 64 tokens for each prompt. Lengths between two numbers are drawn evenly on a logarithmic scale.

The engines have the same arguments, live at the same time and take turns, so that a busy machine slows all.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from rollcast.contracts.rollout import RolloutRequest, RolloutSetup, SamplingParams
from rollcast_serving.launcher import ReplicaProcess, ReplicaSpec
from rollcast_serving.manager import ServerManager
from rollcast_testing.tiny import tiny_model_folder
from rollcast_vllm.engine import build_llm
from rollcast_vllm.engine_args import build_engine_args
from rollcast_vllm.environment import prepare_environment
from rollcast_vllm.load import LoadReader
from rollcast_vllm.rollout import VllmRollout
from rollcast_vllm.schemas import VllmRolloutConfig

PROMPTS, ROUNDS = 256, 9
EOS = 2


def make_prompts() -> list[list[int]]:
    return [[4 + (7 * row + 3 * place) % 80 for place in range(16)] for row in range(PROMPTS)]


def draw_lengths(shortest: int, longest: int) -> list[int]:
    draw = random.Random(0)
    return [round(math.exp(draw.uniform(math.log(shortest), math.log(longest)))) for _ in range(PROMPTS)]


async def run_bare(llm: Any, number: int, lengths: list[int]) -> float:
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    async def one(row: int, prompt: list[int]) -> int:
        params = VllmParams(
            temperature=1.0, max_tokens=lengths[row], ignore_eos=True, logprobs=0, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        async for output in llm.generate({"prompt_token_ids": prompt}, params, request_id=f"{number}-{row}"):
            last = output
        return len(last.outputs[0].token_ids)

    start = time.perf_counter()
    counts = await asyncio.gather(*(one(row, prompt) for row, prompt in enumerate(make_prompts())))
    return sum(counts) / (time.perf_counter() - start)


def make_requests(lengths: list[int], seeded: bool) -> list[RolloutRequest]:
    return [
        RolloutRequest(str(i), p, SamplingParams(max_tokens=lengths[i], ignore_eos=True), i if seeded else None)
        for i, p in enumerate(make_prompts())
    ]


async def run_rollout(rollout: VllmRollout, requests: list[RolloutRequest]) -> float:
    start = time.perf_counter()
    outputs = await asyncio.gather(*map(rollout.generate, requests))
    return sum(len(output.sequences[0].token_ids) for output in outputs) / (time.perf_counter() - start)


async def run_replica(manager: ServerManager, requests: list[RolloutRequest]) -> float:
    start = time.perf_counter()
    outputs = await manager.generate_many(requests)
    return sum(len(output.sequences[0].token_ids) for output in outputs) / (time.perf_counter() - start)


def memory_mb() -> float:
    return sum(each.memory_full_info().uss for each in psutil.Process().children(recursive=True)) / 1e6


async def compare(folder: Path, lengths: list[int]) -> None:
    setup = RolloutSetup(VllmRolloutConfig(kv_cache_memory_bytes=128 << 20), str(folder), 1, 0, EOS)
    prepare_environment(setup.config)
    start = time.perf_counter()
    rollout = VllmRollout(setup)
    print(f"start {time.perf_counter() - start:.1f} s, engine's processes {memory_mb():.0f} MB, "
          f"this one {psutil.Process().memory_full_info().uss / 1e6:.0f} MB")  # fmt: skip
    llm = build_llm(build_engine_args(setup), LoadReader())
    environment = VllmRollout.environment(setup.config)
    process = ReplicaProcess(ReplicaSpec(asdict(setup.config), str(folder), 1, 0, EOS, env=environment))
    manager = ServerManager([await asyncio.to_thread(process.wait_ready)])
    figures: dict[str, list[float]] = {"bare": [], "rollout": [], "rollout, a seed each": [], "replica": []}
    for number in range(ROUNDS + 1):
        round_figures = [
            await run_bare(llm, number, lengths),
            await run_rollout(rollout, make_requests(lengths, False)),
            await run_rollout(rollout, make_requests(lengths, True)),
            await run_replica(manager, make_requests(lengths, False)),
        ]
        if number:  # the first warms up
            for name, figure in zip(figures, round_figures, strict=True):
                figures[name].append(figure)
    for name, values in figures.items():
        ratio = statistics.median(value / bare for value, bare in zip(values, figures["bare"], strict=True))
        print(f"{name}: median {statistics.median(values):,.0f} tokens/s, best {max(values):,.0f}, {ratio:.3f} of bare")
    await manager.close()
    process.stop()
    rollout.close()
    llm.shutdown(timeout=2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--lengths", type=int, nargs=2, default=(64, 64), metavar=("SHORTEST", "LONGEST"))
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        given = chosen.model or tiny_model_folder(
            Path(temporary) / "tiny", hidden=128, layers=4, head_dim=32
        )  # fmt: skip
        asyncio.run(compare(given, draw_lengths(*chosen.lengths)))
