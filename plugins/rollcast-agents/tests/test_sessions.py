"""Sessions: what is recorded, when a context is extended and when it forks, budgets."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from agent_tools import CHATML, FORGETFUL, ScriptedEngine, check_accounting, make_renderer, make_session, user
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcast.contracts.rollout import RolloutOutput, RolloutRequest, SamplingParams
from rollcast.errors import RolloutError, SessionEnded
from rollcast_agents.assembly import assemble_trajectories
from rollcast_agents.chat import as_chat
from rollcast_agents.contracts.session import Budget


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return make_renderer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory):
    return make_renderer(tmp_path_factory.mktemp("forgetful"), FORGETFUL)


def talk(session, turns, start="hello"):
    """Have a conversation of some turns; return its messages."""

    async def run():
        messages = [user(start)]
        for turn in range(turns):
            reply = await session.sample(messages)
            messages += [as_chat(reply.message), user(f"more {turn}")]
        return messages

    return asyncio.run(run())


def test_a_conversation_is_one_trajectory(renderer):
    engine = ScriptedEngine(renderer, ["one", "two", "three"])
    session = make_session(engine)
    talk(session, 3)
    (trajectory,) = session.trajectories()
    assert [segment.sampled for segment in trajectory.segments] == [False, True] * 3
    assert session.forks == 0
    text = renderer.decode(trajectory.token_ids)
    assert text == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n<|im_start|>user\nmore 0<|im_end|>\n"
        "<|im_start|>assistant\ntwo<|im_end|>\n<|im_start|>user\nmore 1<|im_end|>\n<|im_start|>assistant\nthree<|im_end|>"
    )
    check_accounting(engine, session)


def test_experts_are_recorded_once_for_each_token(renderer):
    """The last token of a reply is read with the next prompt, and the last of all never."""
    session = make_session(ScriptedEngine(renderer, ["one", "two", "three"], routes=True))
    talk(session, 3)
    (trajectory,) = session.trajectories()
    batch = assemble_trajectories([trajectory])
    (routed,) = batch["routed_experts"].unbind()
    assert routed.dtype == torch.int16
    count = len(trajectory.token_ids)
    assert routed[:, 0, 0].tolist() == [*range(count - 1), -1]
    assert routed[:, 0, 1].tolist() == [7] * (count - 1) + [-1]


def test_experts_of_a_cut_reply_are_cut(renderer):
    session = make_session(ScriptedEngine(renderer, ["one END two"], routes=True))
    sampling = SamplingParams(max_tokens=200, stop=("END",))
    asyncio.run(session.sample([user("hello")], sampling=sampling))
    (trajectory,) = session.trajectories()
    assert len(trajectory.segments[-1].routed_experts) == len(trajectory.segments[-1].token_ids)
    assert renderer.decode(trajectory.token_ids).endswith("END")


def test_a_template_that_forgets_thinking_forks(forgetful):
    engine = ScriptedEngine(forgetful, ["<think>hm</think>one", "<think>so</think>two", "three"])
    session = make_session(engine)
    talk(session, 3)
    assert session.forks == 1 or session.forks == 2
    assert len(session.trajectories()) == session.forks + 1
    check_accounting(engine, session)


def test_an_edited_reply_forks(renderer):
    engine = ScriptedEngine(renderer, ["one", "two"])
    session = make_session(engine)

    async def run():
        await session.sample([user("hello")])
        await session.sample([user("hello"), {"role": "assistant", "content": "ONE"}, user("more")])

    asyncio.run(run())
    first, second = session.trajectories()
    assert first.sampled_tokens == 4
    assert "ONE" in renderer.decode(second.token_ids[: second.prompt_length])
    check_accounting(engine, session)


def test_a_prefill_and_its_reply_are_one_message(renderer):
    """In both forms that a client may send back: as two messages, or joined."""
    prefill = [user("hello"), {"role": "assistant", "content": "It"}]
    for after in (
        [*prefill, {"role": "assistant", "content": " is"}],
        [prefill[0], {**prefill[1], "content": "It is"}],
    ):
        engine = ScriptedEngine(renderer, [" is", "two", " three"])
        session = make_session(engine)

        async def run(session=session, after=after):
            await session.sample(prefill)
            reply = await session.sample([*after, user("more")])
            more = [*after, user("more"), as_chat(reply.message), user("last"), {"role": "assistant", "content": "And"}]
            await session.sample(more)

        asyncio.run(run())
        (trajectory,) = session.trajectories()
        text = renderer.decode(trajectory.token_ids)
        assert "assistant\nIt is<|im_end|>\n<|im_start|>user\nmore" in text
        assert text.endswith("assistant\nAnd three<|im_end|>")
        check_accounting(engine, session)


def test_parallel_calls_on_one_context_fork(renderer):
    engine = ScriptedEngine(renderer, ["one", "two", "three"])
    session = make_session(engine)

    async def run():
        await asyncio.gather(*(session.sample([user("hello")]) for _ in range(3)))

    asyncio.run(run())
    assert len(session.trajectories()) == 3
    check_accounting(engine, session)


def test_exact_ids_extend(renderer):
    engine = ScriptedEngine(renderer, ["one", "two"])
    session = make_session(engine)

    async def run():
        reply = await session.sample(renderer.encode("Say: "))
        more = np.concatenate([reply.prompt_ids, reply.token_ids, renderer.encode(" and ")])
        await session.sample(more)

    asyncio.run(run())
    (trajectory,) = session.trajectories()
    assert renderer.decode(trajectory.token_ids) == "Say: one<|im_end|> and two<|im_end|>"
    check_accounting(engine, session)


@pytest.mark.parametrize(
    ("budget", "end"),
    [
        (Budget(max_assistant_turns=2), "max_turns"),
        (Budget(max_total_tokens=60), "length"),
        (Budget(max_total_tokens=10), "length"),
    ],
)
def test_a_spent_budget_ends_the_session(renderer, budget, end):
    session = make_session(ScriptedEngine(renderer, lambda _: "a reply"), budget)
    with pytest.raises(SessionEnded) as raised:
        talk(session, 9)
    assert raised.value.end == end


def test_a_reply_is_cut_at_the_context_and_says_so(renderer):
    session = make_session(ScriptedEngine(renderer, ["x" * 500]), max_model_len=100)

    async def run():
        return await session.sample([user("hello")])

    reply = asyncio.run(run())
    assert (reply.finish_reason, reply.end) == ("length", "length")
    (trajectory,) = session.trajectories()
    assert len(trajectory.token_ids) == 100
    assert trajectory.end == "length"


def test_a_hung_engine_ends_with_the_time_limit(renderer):
    async def never(request: RolloutRequest) -> RolloutOutput:
        await asyncio.Event().wait()
        raise AssertionError

    engine = ScriptedEngine(renderer, [])
    session = make_session(engine, Budget(timeout_s=0.05))
    session._generate = never
    with pytest.raises(SessionEnded) as raised:
        talk(session, 1)
    assert raised.value.end == "timeout"
    assert session.end == "timeout"


def test_a_stop_string_ends_the_recorded_tokens(renderer):
    engine = ScriptedEngine(renderer, ["one STOP two"])
    session = make_session(engine)

    async def run():
        return await session.sample([user("hello")], sampling=SamplingParams(max_tokens=100, stop=("TO",)))

    reply = asyncio.run(run())
    assert renderer.decode(reply.token_ids) == "one STO"
    assert len(reply.log_probs) == len(reply.token_ids)
    assert reply.finish_reason == "stop"


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_log_prob_that_is_not_finite_fails_the_rollout(renderer, value):
    class Broken(ScriptedEngine):
        async def __call__(self, request):
            output = await super().__call__(request)
            sequence = output.sequences[0]
            return replace(output, sequences=[replace(sequence, log_probs=[*sequence.log_probs[:-1], value])])

    session = make_session(Broken(renderer, ["hi"]))
    with pytest.raises(RolloutError, match="request s0/0 with a log-prob that is not finite"):
        talk(session, 1)
    assert not session.trajectories()


def test_seeds_differ_by_turn_and_repeat_by_rollout(renderer):
    def seeds(seed):
        engine = ScriptedEngine(renderer, ["a", "b", "c"])
        talk(make_session(engine, seed=seed), 3)
        return [request.seed for request in engine.requests]

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2)}) == 6


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_token_is_trained_that_was_not_sampled(renderer, forgetful, data):
    """Random programs over a session: going on, going back, editing, raw ids, parallel calls, cut replies."""
    chosen = data.draw(st.sampled_from([renderer, forgetful]))
    words = [
        "yes",
        "<think>why</think>no",
        '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>',
        "<tool_call>{",
        "x" * 90,
    ]
    engine = ScriptedEngine(chosen, lambda _: data.draw(st.sampled_from(words)))
    session = make_session(engine, max_model_len=600)
    session._sampling = SamplingParams(max_tokens=60)

    async def run():
        known = [[user("hello")]]
        for _ in range(data.draw(st.integers(1, 6))):
            messages = data.draw(st.sampled_from(known))
            calls = data.draw(st.integers(1, 2))
            try:
                replies = await asyncio.gather(*(session.sample(messages) for _ in range(calls)))
            except SessionEnded:
                continue
            for reply in replies:
                said = as_chat(reply.message)
                if data.draw(st.booleans()):
                    said["content"] = data.draw(st.sampled_from([said["content"], "edited"]))
                known.append(
                    [*messages, said, data.draw(st.sampled_from([user("more"), {"role": "tool", "content": "1"}]))]
                )
                if data.draw(st.booleans()):
                    try:
                        await session.sample(np.concatenate([reply.prompt_ids, reply.token_ids, chosen.encode(" so")]))
                    except SessionEnded:
                        continue

    asyncio.run(run())
    check_accounting(engine, session)


def test_the_template_of_the_tests_is_stable(renderer):
    assert CHATML.count("im_start") == 3
    assert renderer.stop_token_ids == (2, 0)
