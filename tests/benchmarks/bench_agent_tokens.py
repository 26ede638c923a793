"""Random agents on a real engine: is every trained token one that the engine sampled, with the engine's log-prob?

    python tests/benchmarks/bench_agent_tokens.py [--trajectories 2000] [--seed 0] [--rollout hf]

Each rollout takes random turns: tool results, answers to malformed calls, parallel calls, contexts that are rewritten,
prompts given as ids, and streaming clients of the gateway. Half of the renderers leave out earlier thinking, so that the
conversation cannot be extended and forks. The engine has a random model: rollcast-hf's, or with ``--rollout`` that of
rollcast-vllm or rollcast-sglang, in an environment that has it. Its outputs are kept beside the sessions and compared with
what these recorded; log-probs are computed again by transformers.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _report import Comparison, write_report
from openai import AsyncOpenAI

from rollcast.contracts.rollout import RolloutOutput, RolloutRequest, RolloutSetup, SamplingParams, rollouts
from rollcast_agents.contracts.renderer import Message, RendererSetup
from rollcast_agents.contracts.trajectory import Trajectory
from rollcast_agents.gateway import Gateway
from rollcast_agents.renderers.chat_template import ChatTemplateRenderer
from rollcast_agents.session import RecordingSession
from rollcast_testing.tiny import plain_model, tiny_model_folder

REPLY = 12
AT_ONCE = 64
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content and (keep or loop.last) %}{{ m.reasoning_content }}{% endif %}{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
#: Settings of each engine that a tiny model on a CPU needs.
SETTINGS: dict[str, dict[str, Any]] = {
    "hf": {},
    "vllm": {"kv_cache_memory_bytes": 64 << 20},
    "sglang": {"max_running_requests": 64},
}
Given = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]


class Thinking(ChatTemplateRenderer):
    """Takes the first two characters of a reply for its thinking."""

    def parse(self, ids: Any, tools: Any = ()) -> Message:
        message = super().parse(ids)
        return Message(message.text[2:], message.text[:2])


class Engine:
    """The engine, and what it gave: prompt, tokens and log-probs by session."""

    def __init__(self, rollout: Any) -> None:
        self._rollout = rollout
        self.given: list[Given] = []

    async def __call__(self, request: RolloutRequest) -> RolloutOutput:
        output: RolloutOutput = await self._rollout.generate(request)
        (one,) = output.sequences
        prompt = tuple(np.asarray(request.prompt_ids).tolist())
        self.given.append(
            (prompt, tuple(np.asarray(one.token_ids).tolist()), tuple(np.asarray(one.log_probs).tolist()))
        )
        return output


async def play(session: RecordingSession, gateway: Gateway, chance: random.Random) -> str:
    """Take random turns; return the kind of the rollout."""
    kind = chance.choice(["tool", "malformed", "parallel", "rewrite", "ids", "stream"])
    messages: list[Any] = [{"role": "user", "content": f"task {chance.random():.3f}"}]
    if kind == "stream":
        await stream(session, gateway, messages, chance)
        return kind
    for turn in range(chance.randint(1, 4)):
        if kind == "parallel":
            reply, _ = await asyncio.gather(session.sample(messages), session.sample(messages))
        else:
            reply = await session.sample(messages)
        if reply.end is not None:
            break
        if kind == "ids":
            more = np.asarray([chance.randrange(5, 60) for _ in range(4)], np.int32)
            await session.sample(np.concatenate([reply.prompt_ids, reply.token_ids, more]))
        said = {"role": "assistant", "content": reply.message.text, "reasoning_content": reply.message.reasoning}
        role = "tool" if kind == "tool" else "user"
        messages += [said, {"role": role, "content": f"result {chance.randrange(1000)}"}]
        if kind == "rewrite" and turn % 2:
            messages[0] = {"role": "user", "content": f"summary {chance.randrange(1000)}"}
    return kind


async def stream(session: RecordingSession, gateway: Gateway, messages: list[Any], chance: random.Random) -> None:
    """Talk to the gateway as a streaming client does."""
    with gateway.open(session) as access:
        async with AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as client:
            for _ in range(chance.randint(1, 3)):
                chunks = await client.chat.completions.create(model="policy", messages=messages, stream=True)
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]


def recorded(trajectories: Sequence[Trajectory]) -> list[Given]:
    """Return prompt, tokens and log-probs of each sampled segment."""
    found = []
    for trajectory in trajectories:
        ids, at = trajectory.token_ids.tolist(), 0
        for segment in trajectory.segments:
            if segment.sampled:
                probs = () if segment.log_probs is None else tuple(segment.log_probs.tolist())
                found.append((tuple(ids[:at]), tuple(segment.token_ids.tolist()), probs))
            at += len(segment)
    return found


def largest_gap(trajectories: Sequence[Trajectory], model: Any) -> float:
    """Return the largest difference of a recorded log-prob from that of transformers."""
    largest = 0.0
    with torch.no_grad():
        for trajectory in trajectories:
            ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))
            scores = model(input_ids=ids[None]).logits[0, :-1].float().log_softmax(-1)
            found = scores.gather(-1, ids[1:, None]).flatten().numpy()
            at = 0
            for segment in trajectory.segments:
                if segment.sampled and segment.log_probs is not None:
                    largest = max(
                        largest, float(np.abs(found[at - 1 : at - 1 + len(segment)] - segment.log_probs).max())
                    )
                at += len(segment)
    return largest


async def run(folder: Path, name: str, count: int, seed: int) -> tuple[list[Trajectory], Engine, Counter[str]]:
    """Play all rollouts, some at a time; return their trajectories."""
    kind = rollouts.get(name)
    config = kind.config_schema(name=name, **SETTINGS[name])
    rollout = kind(RolloutSetup(config, str(folder), seed=seed, pad_token_id=0, eos_token_id=2))
    engine, chance = Engine(rollout), random.Random(seed)
    sampling = SamplingParams(max_tokens=REPLY)
    makers = [Thinking(RendererSetup(str(folder), "hermes", {"keep": keep})) for keep in (True, False)]
    gateways = [Gateway(renderer, str(folder), sampling) for renderer in makers]
    for gateway in gateways:
        await gateway.start()
    room, sessions, kinds = asyncio.Semaphore(AT_ONCE), [], Counter()

    async def one(number: int) -> None:
        which, own = number % 2, random.Random(chance.random())
        session = RecordingSession(
            f"s{number}", group_id="g", generate=engine, renderer=makers[which], sampling=sampling, max_model_len=500
        )
        sessions.append(session)
        async with room:
            kinds[await play(session, gateways[which], own)] += 1
            kinds["forks"] += session.forks

    try:
        await asyncio.gather(*(one(number) for number in range(count)))
    finally:
        for gateway in gateways:
            await gateway.close()
        rollout.close()
    return [each for session in sessions for each in session.trajectories()], engine, kinds


def main() -> None:
    """Play, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rollout", choices=SETTINGS, default="hf")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/agent_tokens.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = tiny_model_folder(Path(name) / "model", chat_template=TEMPLATE, head_dim=32)
        found, engine, kinds = asyncio.run(run(folder, options.rollout, options.trajectories, options.seed))
        gap = largest_gap(found, plain_model(folder))
    ours, theirs = Counter(recorded(found)), Counter(engine.given)
    tokens = sum(each.sampled_tokens for each in found)
    note = f"{options.trajectories} rollouts, {len(found)} trajectories, {tokens} trained tokens; {dict(kinds)}"
    strange = sum(len(each[1]) * count for each, count in (ours - theirs).items())
    lost = sum(len(each[1]) * count for each, count in (theirs - ours).items())
    write_report(
        f"Tokens of random agents on rollcast-{options.rollout}",
        [
            Comparison("trained tokens that the engine did not sample so, plus 1", strange + 1.0, 1.0, at_most=1.0),
            Comparison("sampled tokens that are in no trajectory, plus 1", lost + 1.0, 1.0, at_most=1.0),
            Comparison("largest gap to the log-probs of transformers", gap, 1e-4, at_most=1.0),
        ],
        [note],
        options.output,
    )


if __name__ == "__main__":
    main()
