"""Loops and the runner: conversations with tools and environments, and failures that stay one rollout's."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from agent_tools import ScriptedEngine, check_accounting, make_renderer, make_session, user
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcast.errors import RolloutError
from rollcast.protocol import Jagged
from rollcast_agents.assembly import assemble_trajectories
from rollcast_agents.contracts.agent_loop import AgentLoopSetup, BaseAgentLoop, Outcome
from rollcast_agents.contracts.environment import BaseEnvironment, Observation
from rollcast_agents.contracts.session import Budget
from rollcast_agents.environments.plain import PlainEnvironment
from rollcast_agents.loops.turns import EnvironmentLoop, SingleTurnLoop, ToolLoop
from rollcast_agents.runner import Limits, RolloutRunner
from rollcast_agents.tools.box import ToolBox, ToolLimits
from rollcast_agents.tools.functions import FunctionTool
from rollcast_agents.training.manager import has_failed, scoring_columns
from rollcast_agents.training.metrics import agent_metrics

CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'
TASK = {"prompt": [user("6 times 7")], "answer": 42}


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return make_renderer(tmp_path_factory.mktemp("tokenizer"))


def setup(*functions, limits=None, parallel=8):
    box = ToolBox([FunctionTool(each) for each in functions], limits)
    return AgentLoopSetup(SimpleNamespace(max_parallel_calls=parallel), box)


def roll(loop, engine, task=TASK, make_environment=None, limits=None, budget=None):
    session = make_session(engine, budget)
    runner = RolloutRunner(loop, make_environment, limits or Limits())
    return asyncio.run(runner.run(task, session)), session


class Counter:
    """Counts as it is told; at 10 the episode is over."""

    def reset(self, start: int = 0, **task) -> str:
        self.value, self.closed = start, False
        return f"Count from {start} to 10."

    def add(self, number: int) -> str:
        """Add a number."""
        self.value += number
        return str(self.value)

    def is_done(self) -> bool:
        return self.value >= 10

    def get_reward(self) -> float:
        return float(self.value == 10)

    def close(self) -> None:
        self.closed = True


class Echo(BaseEnvironment):
    """Says back what it hears, scores it, and ends at "bye"."""

    async def reset(self, task):
        return Observation([user("Say something.")])

    async def step(self, message):
        done = message.text == "bye"
        return Observation([user(f"You said {message.text}")], reward=0.25, done=done, components={"talk": 1.0})


def test_one_turn(renderer):
    engine = ScriptedEngine(renderer, ["42"])
    (trajectory,), session = roll(SingleTurnLoop(setup()), engine)
    assert (trajectory.end, trajectory.failure, trajectory.metrics["turns"]) == ("done", None, 1)
    assert trajectory.messages[-1]["content"] == "42"
    check_accounting(engine, session)


def test_a_tool_is_called_and_its_result_is_not_trained(renderer):
    engine = ScriptedEngine(renderer, [CALL, "42"])
    (trajectory,), session = roll(ToolLoop(setup(multiply)), engine)
    assert [message["role"] for message in trajectory.messages] == ["user", "assistant", "tool", "assistant"]
    assert trajectory.messages[2]["content"] == "42"
    assert (trajectory.metrics["turns"], trajectory.metrics["tool_calls"], trajectory.metrics["forks"]) == (2, 1, 0)
    trained = renderer.decode(trajectory.token_ids[trajectory.sampled_mask])
    assert trained == f"{CALL}<|im_end|>42<|im_end|>"
    check_accounting(engine, session)


@pytest.mark.parametrize(("loop", "shown"), [("single_turn", ["lookup"]), ("tool", ["multiply", "lookup"])])
def test_tools_of_the_dataset_are_shown(renderer, loop, shown):
    """Those of the column ``tools`` after those that run; a name that both have is shown once."""
    schemas = [
        {"type": "function", "function": {"name": name, "description": "From the file.", "parameters": {}}}
        for name in ("lookup", *(["multiply"] if loop == "tool" else []))
    ]
    chosen = SingleTurnLoop(setup()) if loop == "single_turn" else ToolLoop(setup(multiply))
    engine = ScriptedEngine(renderer, ["42"])
    (trajectory,), _ = roll(chosen, engine, task={**TASK, "tools": schemas})
    text = renderer.decode(trajectory.token_ids)
    assert [name for name in shown if f'"{name}"' in text] == shown
    assert text.count('"multiply"') == (loop == "tool")
    assert text.count("From the file.") == 1


def test_malformed_and_unknown_calls_are_answered(renderer):
    script = ["<tool_call>{</tool_call>", CALL.replace("multiply", "divide"), "never mind"]
    (trajectory,), _ = roll(ToolLoop(setup(multiply)), ScriptedEngine(renderer, script))
    answers = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    assert "JSON" in answers[0]
    assert "'divide'" in answers[1]
    assert (trajectory.end, trajectory.metrics["tool_errors"]) == ("done", 2)


def test_an_endless_talker_ends_with_its_turns(renderer):
    engine = ScriptedEngine(renderer, lambda _: CALL)
    (trajectory,), _ = roll(ToolLoop(setup(multiply)), engine, budget=Budget(max_assistant_turns=3))
    assert (trajectory.end, trajectory.metrics["turns"]) == ("max_turns", 3)


def test_an_answer_in_the_last_turn_is_done(renderer):
    engine = ScriptedEngine(renderer, [CALL, "42"])
    (trajectory,), _ = roll(ToolLoop(setup(multiply)), engine, budget=Budget(max_assistant_turns=2))
    assert (trajectory.end, trajectory.metrics["turns"]) == ("done", 2)


def test_the_environment_answers_the_last_turn(renderer):
    class Last(BaseEnvironment):
        async def reset(self, task):
            return Observation([{"role": "user", "content": "go"}])

        async def step(self, message):
            return Observation([{"role": "user", "content": "on"}], reward=1.0, done=message.text == "second")

    engine = ScriptedEngine(renderer, ["first", "second"])
    (trajectory,), _ = roll(
        EnvironmentLoop(setup()), engine, make_environment=Last, budget=Budget(max_assistant_turns=2)
    )
    assert trajectory.turn_rewards == {0: 1.0, 1: 1.0}
    assert trajectory.end == "done"


def test_a_reply_that_was_cut_is_scored_and_is_the_last(renderer):
    class Generous(BaseEnvironment):
        async def reset(self, task):
            return Observation([{"role": "user", "content": "go"}])

        async def step(self, message):
            return Observation([{"role": "user", "content": "on"}], reward=float(len(message.text) == 4))

    engine = ScriptedEngine(renderer, ["x" * 50, "never asked for"])
    budget = Budget(max_response_length=4)
    (trajectory,), _ = roll(EnvironmentLoop(setup()), engine, make_environment=Generous, budget=budget)
    assert (trajectory.end, trajectory.turn_rewards, trajectory.metrics["turns"]) == ("length", {0: 1.0}, 1)


def test_a_plain_class_is_an_environment(renderer):
    made = []

    def make():
        made.append(Counter())
        return PlainEnvironment(made[-1])

    add = '<tool_call>{"name": "add", "arguments": {"number": 4}}</tool_call>'
    engine = ScriptedEngine(renderer, [add, add, "enough"])
    task = {"prompt": [], "start": 2}
    (trajectory,), session = roll(EnvironmentLoop(setup()), engine, task, make)
    assert trajectory.end == "done"
    assert sum(trajectory.turn_rewards.values()) == 1.0
    assert made[0].closed
    assert trajectory.messages[0]["content"] == "Count from 2 to 10."
    check_accounting(engine, session)


def test_an_environment_scores_turns(renderer):
    engine = ScriptedEngine(renderer, ["hi", "bye"])
    (trajectory,), session = roll(EnvironmentLoop(setup()), engine, {"prompt": []}, Echo)
    assert trajectory.turn_rewards == {0: 0.25, 1: 0.25}
    assert trajectory.reward_components == {"talk": 2.0}
    check_accounting(engine, session)


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ({"reward": math.nan}, "reward = nan, which is not finite"),
        ({"reward": 1e38}, "reward = 1e+38, which is beyond the limit"),
        ({"reward": "good"}, "reward = 'good', which is not a number (str)"),
        ({"reward": 10**400}, "reward = inf"),
        ({"reward": 1j}, "reward = 1j, which is not a number"),
        ({"components": {"talk": None}}, "component talk = None"),
        ({"metrics": {"room": "kitchen"}}, "metric room = 'kitchen', which is not a number (str)"),
    ],
)
def test_a_value_of_an_environment_that_is_not_a_finite_number_is_a_bad_sample(renderer, seen, words):
    class Odd(Echo):
        async def step(self, message):
            return replace(await super().step(message), **seen)

    engine = ScriptedEngine(renderer, ["hi", "bye"])
    (trajectory,), _ = roll(EnvironmentLoop(setup()), engine, {"prompt": []}, Odd)
    assert trajectory.failure is not None
    assert trajectory.failure.boundary == "reward"
    assert words in trajectory.failure.message
    assert not has_failed(trajectory)
    columns = scoring_columns([trajectory])
    assert columns["reward_error"] == [trajectory.failure.message]
    assert math.isfinite(sum(agent_metrics([trajectory]).values()))
    assert bool(Jagged.of(assemble_trajectories([trajectory])["environment_scores"]).values.isfinite().all())


VALUES = [0.5, -1, True, np.float32(2), None, math.nan, -math.inf, 1e38, 10**400, "1.0", 1j, [1.0], ...]


def is_number(value, limit=1e12):
    value = value.item() if isinstance(value, np.generic) else value
    return isinstance(value, float | int) and abs(value) <= limit


@settings(max_examples=60, deadline=None)
@given(
    rewards=st.lists(st.sampled_from(VALUES), min_size=2, max_size=2),
    component=st.sampled_from(VALUES),
    metric=st.sampled_from(VALUES),
)
def test_any_mixture_of_an_environments_values_is_finite_or_one_bad_sample(renderer, rewards, component, metric):
    values = iter(rewards)

    class Odd(Echo):
        async def step(self, message):
            seen = await super().step(message)
            return replace(seen, reward=next(values), components={"talk": component}, metrics={"room": metric})

    engine = ScriptedEngine(renderer, ["hi", "bye"])
    (trajectory,), _ = roll(EnvironmentLoop(setup()), engine, {"prompt": []}, Odd)
    are_numbers = all(reward is None or is_number(reward) for reward in rewards)
    is_good = are_numbers and is_number(component) and is_number(metric, 1e300)
    assert (trajectory.failure is None) == is_good
    assert not has_failed(trajectory)
    columns = scoring_columns([trajectory])
    assert columns.get("reward_error", [""]) == ["" if is_good else trajectory.failure.message]
    scores = Jagged.of(assemble_trajectories([trajectory])["environment_scores"]).values
    assert bool(scores.isfinite().all())
    if is_good:
        assert float(scores.sum()) == sum(float(reward) for reward in rewards if reward is not None)
    assert all(math.isfinite(value) for value in agent_metrics([trajectory]).values())


class Broken(Echo):
    async def step(self, message):
        raise ValueError("no world")


class Hung(Echo):
    async def reset(self, task):
        await asyncio.Event().wait()


class Unbuildable(Echo):
    def __init__(self):
        raise OSError("no disk")


@pytest.mark.parametrize(("kind", "words"), [(Broken, "no world"), (Hung, "0.05 s"), (Unbuildable, "no disk")])
def test_a_failing_environment_is_named(renderer, kind, words):
    engine = ScriptedEngine(renderer, ["hi"])
    (trajectory,), _ = roll(EnvironmentLoop(setup()), engine, {"prompt": []}, kind, Limits(environment_s=0.05))
    assert trajectory.end == "error"
    assert trajectory.failure is not None
    assert trajectory.failure.boundary == "environment"
    assert words in trajectory.failure.message


def test_a_failing_engine_renderer_and_loop_are_named(renderer):
    async def dead(request):
        raise RolloutError("replica 0 died")

    class Odd(BaseAgentLoop):
        async def run(self, task, session, environment):
            raise IndexError("odd")

    class Endless(BaseAgentLoop):
        async def run(self, task, session, environment):
            while True:
                await asyncio.sleep(0.001)

    engine = ScriptedEngine(renderer, ["hi"] * 9)
    ends = {}
    for name, loop, task in [
        ("loop", Odd(setup()), TASK),
        ("renderer", SingleTurnLoop(setup()), {"prompt": [{"role": "user", "content": [{"type": "image"}]}]}),
        ("endless", Endless(setup()), TASK),
    ]:
        (trajectory,), _ = roll(loop, engine, task, limits=Limits(rollout_s=0.1))
        ends[name] = (trajectory.end, trajectory.failure.boundary)
    session = make_session(engine)
    session._generate = dead
    (trajectory,) = asyncio.run(RolloutRunner(SingleTurnLoop(setup()), None, Limits()).run(TASK, session))
    ends["engine"] = (trajectory.end, trajectory.failure.boundary)
    assert ends == {
        "loop": ("error", "loop"),
        "renderer": ("error", "renderer"),
        "endless": ("timeout", "loop"),
        "engine": ("error", "engine"),
    }


def test_a_failed_rollout_keeps_its_conversation_and_its_numbers(renderer):
    class Mortal(Echo):
        async def step(self, message):
            raise ConnectionError("gone")

    engine = ScriptedEngine(renderer, [CALL, "42"])
    (trajectory,), _ = roll(EnvironmentLoop(setup(multiply)), engine, make_environment=Mortal)
    assert trajectory.failure.boundary == "environment"
    roles = [message["role"] for message in trajectory.messages]
    assert roles == ["user", "user", "assistant", "tool", "assistant"]
    assert trajectory.messages[3]["content"] == "42"
    assert trajectory.metrics["tool_calls"] == trajectory.metrics["tool/multiply/calls"] == 1
    assert trajectory.metrics["turns"] == 2


def test_a_strangers_failed_loop_shows_its_last_request(renderer):
    class Careless(BaseAgentLoop):
        async def run(self, task, session, environment):
            await session.sample(task["prompt"])
            raise IndexError("odd")

    (trajectory,), _ = roll(Careless(setup()), ScriptedEngine(renderer, ["hi"]))
    assert [message["content"] for message in trajectory.messages] == ["6 times 7", "hi"]


def test_a_prompt_without_room_is_shown(renderer):
    (trajectory,), _ = roll(
        SingleTurnLoop(setup()), ScriptedEngine(renderer, ["hi"]), budget=Budget(max_total_tokens=2)
    )
    assert (trajectory.end, trajectory.failure) == ("length", None)
    assert [message["content"] for message in trajectory.messages] == ["6 times 7"]


def test_five_bad_rollouts_of_64_leave_the_others_alone(renderer):
    """One hung tool, one raising tool, one endless loop, one environment that dies, one oversized answer."""

    async def act(kind: str) -> str:
        """Do as told."""
        if kind == "hang":
            await asyncio.Event().wait()
        if kind == "raise":
            raise RuntimeError("broken")
        return "x" * 100_000 if kind == "flood" else "fine"

    class World(Echo):
        async def reset(self, task):
            return Observation([user(f"do {task['kind']}")])

        async def step(self, message):
            if "die" in message.text:
                raise ConnectionError("gone")
            return Observation(done=True, reward=1.0)

    def script(prompt: str) -> str:
        kind = prompt.split("do ")[1].split("<|im_end|>")[0]
        again = kind == "loop" or (prompt.count("assistant") == 1 and kind != "die")
        return (
            f'<tool_call>{{"name": "act", "arguments": {{"kind": "{kind}"}}}}</tool_call>' if again else f"did {kind}"
        )

    kinds = ["hang", "raise", "loop", "die", "flood", *["well"] * 59]
    engine = ScriptedEngine(renderer, script)
    loop = EnvironmentLoop(setup(act, limits=ToolLimits(timeout_s=3.0, max_length=50)))
    runner = RolloutRunner(loop, World, Limits(rollout_s=20))

    async def run():
        sessions = [
            make_session(engine, Budget(max_assistant_turns=4), session_id=f"s{i}", max_model_len=4000)
            for i in range(len(kinds))
        ]
        return await asyncio.gather(
            *(runner.run({"prompt": [], "kind": kind}, session) for kind, session in zip(kinds, sessions, strict=True))
        )

    start = time.monotonic()
    found = {kind: trajectories[0] for kind, trajectories in zip(kinds, asyncio.run(run()), strict=True)}
    assert time.monotonic() - start < 60
    assert {kind: each.end for kind, each in found.items()} == {
        "hang": "done",
        "raise": "done",
        "loop": "max_turns",
        "die": "error",
        "flood": "done",
        "well": "done",
    }
    assert found["die"].failure.boundary == "environment"
    for kind, words in (("hang", "within 3 s"), ("raise", "RuntimeError: broken"), ("flood", "left out")):
        assert words in found[kind].messages[2]["content"]


def test_a_cancelled_rollout_closes_its_environment(renderer):
    closed = []

    class Slow(Echo):
        async def step(self, message):
            await asyncio.Event().wait()

        async def close(self):
            closed.append(True)

    async def run():
        engine = ScriptedEngine(renderer, ["hi"])
        session = make_session(engine)
        task = asyncio.ensure_future(
            RolloutRunner(EnvironmentLoop(setup()), Slow, Limits()).run({"prompt": []}, session)
        )
        while not session.turns:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return session

    session = asyncio.run(run())
    assert closed == [True]
    assert session.trajectories()[0].end == "aborted"


def test_the_outcome_of_a_strangers_loop_reaches_its_trajectories(renderer):
    class Twice(BaseAgentLoop):
        async def run(self, task, session, environment):
            await session.sample(task["prompt"])
            await session.sample([user("unrelated")])
            return Outcome(reward=0.5, metrics={"seen": 2.0})

    found, session = roll(Twice(setup()), ScriptedEngine(renderer, ["a", "b"]))
    assert [each.reward for each in found] == [0.5, 0.5]
    assert {each.rollout_id for each in found} == {session.session_id}
    assert found[0].metrics["forks"] == 1
