"""A small run with agents: a tiny model, a renderer in whose eyes most replies call a tool, and runs of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from agent_plugins import Dying, Letters, Vowels

from rollcast.config import compose
from rollcast.contracts.trainer import RunResult, trainers
from rollcast_agents.contracts.environment import environments
from rollcast_agents.contracts.renderer import Message, renderers
from rollcast_agents.contracts.tool import tools
from rollcast_agents.renderers.chat_template import ChatTemplateRenderer
from rollcast_data.chat_template import ToolCall
from rollcast_testing.tiny import CHAT_TEMPLATE, tiny_model_folder
from rollcast_trainer.ppo import PpoTrainer
from rollcast_trainer.run.run import Run
from rollcast_trainer.run.settings import check_run


class CallingRenderer(ChatTemplateRenderer):
    """A reply ends with any digit or sign; one with a small letter in it is a call of ``letters``."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return (2, *self.encode("0123456789+-*/=<>()[]#$%&.,:;?!").tolist())

    def parse(self, ids: Any, tools: Any = ()) -> Message:
        text = self.decode(ids)
        call = ToolCall("letters", {"text": text}, "call_0")
        return Message(text, tool_calls=(call,) if any(letter.islower() for letter in text) else ())


@contextmanager
def registered() -> Iterator[None]:
    """The plugins of this module, for a ``with`` block."""
    with ExitStack() as stack:
        stack.enter_context(renderers.temporarily("calling", CallingRenderer))
        stack.enter_context(tools.temporarily("letters", Letters))
        stack.enter_context(environments.temporarily("vowels", Vowels))
        stack.enter_context(environments.temporarily("dying", Dying))
        yield


TOOL = ("agent.loop=tool", "agent.tools.letters={}")


@dataclass(frozen=True)
class AgentTask:
    """A model folder and prompts, and the overrides that train on them in seconds."""

    folder: Path
    model: Path

    @classmethod
    def make(cls, folder: Path) -> AgentTask:
        model = tiny_model_folder(folder / "model", hidden=32, chat_template=CHAT_TEMPLATE)
        rows = [
            {"prompt": [{"role": "user", "content": f"{a}+{b}="}], "ground_truth": str(a + b)}
            for a in range(4)
            for b in range(4)
        ]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
        (folder / "reward.py").write_text(
            "def said(sample):\n"
            "    tools = [m['content'] for m in sample.extra_info['messages'] if m['role'] == 'tool']\n"
            "    return 0.5 * len(tools) + 0.25 * any('vowels' in text for text in tools) + len(sample.response) / 64\n"
        )
        return cls(folder, model)

    def overrides(self, run_dir: Path, *changes: str) -> list[str]:
        """4 prompts x 4 rollouts a step, two mini-batches."""
        return [
            "trainer=ppo",
            "algorithm=grpo",
            f"model.path={self.model}",
            f"data.train_files=[{self.folder / 'train.jsonl'}]",
            f"data.val_files=[{self.folder / 'test.jsonl'}]",
            "data.max_prompt_length=64",
            "data.max_response_length=160",
            "runtime=local",
            "runtime.threads_per_worker=1",
            "trackers=[jsonl]",
            f"run_dir={run_dir}",
            "reward=function",
            "reward.reward_manager=naive",
            f"reward.reward_kwargs.path={self.folder / 'reward.py'}:said",
            "data.train_batch_size=4",
            "rollout.n=4",
            "actor.ppo_mini_batch_size=2",
            "actor.optim.lr=1e-2",
            "trainer.total_steps=2",
            "trainer.save_freq=1",
            "trainer.test_freq=2",
            "agent.renderer=calling",
            *([] if any(each.startswith("agent.loop=") for each in changes) else TOOL),
            "agent.max_assistant_turns=4",
            "agent.max_response_length=12",
            # Longer than any pause of a loaded machine, so that batches are the same in every run.
            "agent.batch_wait_s=60",
            *changes,
        ]


def launch(overrides: Sequence[str]) -> RunResult:
    """What ``rollcast train`` does with these overrides."""
    config = compose(list(overrides)).config
    return trainers.get(config.trainer.name).launch(config)


@contextmanager
def set_up(overrides: Sequence[str]) -> Iterator[PpoTrainer]:
    """A trainer with workers, before its first step."""
    run = Run(check_run(compose(list(overrides)).config, PpoTrainer))
    trainer = PpoTrainer(run)
    with run:
        trainer.setup()
        trainer.run.sync_weights()
        yield trainer


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


async def chat(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Say something twice, as any program that speaks OpenAI's API; the reward is the number of replies."""
    messages = list(task["prompt"])
    headers = {"Authorization": f"Bearer {api_key}"}
    async with aiohttp.ClientSession(headers=headers) as client:
        for _ in range(2):
            async with client.post(f"{base_url}/chat/completions", json={"messages": messages}) as response:
                choice = (await response.json())["choices"][0]
            messages += [
                {"role": "assistant", "content": choice["message"]["content"]},
                {"role": "user", "content": "?"},
            ]
    return 2.0
