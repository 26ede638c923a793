"""512 trajectories of three turns, with a tool that sleeps 50 ms and an engine that answers at once.

What is left is our own code: sessions, rendering, parsing, tool calls. It may take 1 ms of CPU a turn, and the batch
1.3 times what cannot be shorter: the tools' sleep, and that CPU time in one thread.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from _report import Comparison, write_report
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollcast.contracts.rollout import RolloutOutput, RolloutRequest, RolloutSequence, SamplingParams
from rollcast_agents.contracts.tool import tools
from rollcast_agents.host import AgentHost, HostSetup, Rollout
from rollcast_agents.schemas import AgentConfig

ROLLOUTS, TURNS, SLEEP_S = 512, 3, 0.05
CPU_MS_A_TURN, WALL_RATIO = 1.0, 1.3
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{%- endfor %}<|im_end|>\n"
    "{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CALL = '<tool_call>{"name": "lookup", "arguments": {"key": "some words"}}</tool_call>'


async def lookup(key: str) -> str:
    """Look a key up.

    Args:
        key: Any text.
    """
    await asyncio.sleep(SLEEP_S)
    return f"{key} is the key of this answer, which is a sentence."


def write_tokenizer(folder: Path) -> str:
    """Write a tokenizer of single characters; return its folder."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    ids = {token: index for index, token in enumerate([*SPECIAL, *characters])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=SPECIAL[0],
        pad_token=SPECIAL[0],
        additional_special_tokens=list(SPECIAL[1:]),
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    return str(folder)


class Engine:
    """Answers at once: two calls, then a text."""

    def __init__(self, host: AgentHost) -> None:
        stop = host.renderer.stop_token_ids[0]
        encoded = [np.append(host.renderer.encode(text), stop) for text in (CALL, CALL, "That is it.")]
        self._answers = [RolloutSequence(ids.tolist(), [-0.5] * len(ids), "stop", [0] * len(ids)) for ids in encoded]

    async def __call__(self, rollout: Rollout, request: RolloutRequest) -> RolloutOutput:
        """Return the answer of the turn."""
        turn = int(request.request_id.rpartition("/")[2])
        return RolloutOutput(request.request_id, [self._answers[turn]], request.sampling)


def measure(host: AgentHost) -> tuple[float, float]:
    """Return CPU and wall seconds of a batch."""
    engine = Engine(host)
    prompt = [{"role": "user", "content": "Look some words up, twice, and say what you have found."}]
    rollouts = [Rollout(n, f"r{n}", f"g{n // 8}", {"prompt": prompt}, n) for n in range(ROLLOUTS)]
    cpu, wall = time.process_time(), time.perf_counter()
    found = asyncio.run(_run(host, rollouts, engine))
    seconds = time.process_time() - cpu, time.perf_counter() - wall
    for (trajectory,) in found:
        if (trajectory.end, trajectory.metrics["turns"]) != ("done", TURNS):
            raise RuntimeError(f"a trajectory ended with {trajectory.end} after {trajectory.metrics['turns']} turns")
    return seconds


async def _run(host: AgentHost, rollouts: list[Rollout], engine: Engine) -> list[list[object]]:
    await host.start()
    return await host.run(rollouts, engine, SamplingParams(max_tokens=256))  # type: ignore[return-value]


def main() -> None:
    """Print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/agents.json"))
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    with tempfile.TemporaryDirectory() as folder, tools.temporarily("lookup", lookup):
        config = AgentConfig(loop="tool", tools={"lookup": {}})
        host = AgentHost(HostSetup(config, write_tokenizer(Path(folder)), 4096))
        measure(host)
        runs = [measure(host) for _ in range(arguments.repeats)]
    cpu, wall = (statistics.median(each) for each in zip(*runs, strict=True))
    turns = ROLLOUTS * TURNS
    shortest = cpu + (TURNS - 1) * SLEEP_S
    comparisons = [
        Comparison("CPU of a turn, ms", 1e3 * cpu / turns, CPU_MS_A_TURN, at_most=1.0),
        Comparison("a batch, s, against its critical path", wall, shortest, at_most=WALL_RATIO),
    ]
    notes = [f"{ROLLOUTS} trajectories of {TURNS} turns: {cpu:.2f} s of CPU, {wall:.2f} s of wall time"]
    write_report("Agents", comparisons, notes, arguments.output)
    if not all(each.holds for each in comparisons):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
