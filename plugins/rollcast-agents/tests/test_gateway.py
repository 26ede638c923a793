"""The gateway: what OpenAI's own client and plain HTTP see, secrets, retries, streams."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace

import aiohttp
import pytest
from agent_tools import ScriptedEngine, check_accounting, make_renderer, make_session, user

from rollcast.contracts.rollout import SamplingParams
from rollcast_agents.contracts.agent_loop import AgentLoopSetup
from rollcast_agents.contracts.session import Budget
from rollcast_agents.gateway import Gateway
from rollcast_agents.loops.program import ProgramLoop
from rollcast_agents.runner import Limits, RolloutRunner

openai = pytest.importorskip("openai")

CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "multiply", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return make_renderer(tmp_path_factory.mktemp("tokenizer"))


@asynccontextmanager
async def serving(renderer, *sessions):
    gateway = Gateway(renderer, "policy", SamplingParams(max_tokens=200))
    await gateway.start()
    opened = [gateway.open(session) for session in sessions]
    try:
        yield [each.__enter__() for each in opened]
    finally:
        for each in opened:
            each.__exit__(None, None, None)
        await gateway.close()


def client(access, **options):
    return openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, **options)


def test_the_public_client_holds_a_conversation_with_tools(renderer):
    engine = ScriptedEngine(renderer, [CALL, "It is 42."])
    session = make_session(engine)

    async def run():
        async with serving(renderer, session) as (access,), client(access) as api:
            messages = [user("6 times 7")]
            first = (await api.chat.completions.create(model="policy", messages=messages, tools=TOOLS)).choices[0]
            assert first.finish_reason == "tool_calls"
            (call,) = first.message.tool_calls
            assert json.loads(call.function.arguments) == {"a": 6, "b": 7}
            messages += [
                first.message.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": call.id, "content": "42"},
            ]
            return await api.chat.completions.create(
                model="policy", messages=messages, tools=TOOLS, logprobs=True, extra_body={"return_token_ids": True}
            )

    second = asyncio.run(run())
    choice = second.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("It is 42.", "stop")
    assert session.forks == 0
    (trajectory,) = session.trajectories()
    assert choice.prompt_token_ids + choice.token_ids == trajectory.token_ids.tolist()
    assert len(choice.logprobs.content) == len(choice.token_ids) == second.usage.completion_tokens
    check_accounting(engine, session)


@pytest.mark.parametrize(
    ("text", "params"),
    [
        (" two words\n", {}),
        ("two words", {"stop": "words"}),
        (f"so: {CALL}", {"tools": TOOLS}),
        (f"so: {CALL}", {"tools": TOOLS, "tool_choice": "none"}),
        (CALL, {}),
    ],
)
def test_a_reply_is_recognised_as_the_client_repeats_it(renderer, text, params):
    """The conversation goes on in one trajectory, with the tokens that were sampled."""
    engine = ScriptedEngine(renderer, [text, "fine"])
    session = make_session(engine)

    async def run():
        async with serving(renderer, session) as (access,), client(access) as api:
            create = partial(api.chat.completions.create, model="policy", **params)
            first = (await create(messages=[user("hi")])).choices[0].message.model_dump(exclude_none=True)
            await create(messages=[user("hi"), first, user("go on")])

    asyncio.run(run())
    assert session.forks == 0
    (trajectory,) = session.trajectories()
    assert renderer.decode(trajectory.segments[1].token_ids).removesuffix("<|im_end|>") == text
    if "stop" not in params:  # this engine generates on behind a stop string
        check_accounting(engine, session)


def test_a_stream_says_the_same(renderer):
    engine = ScriptedEngine(renderer, [CALL, "Fine."])
    session = make_session(engine)

    async def run():
        async with serving(renderer, session) as (access,), client(access) as api:
            texts, calls, reasons = [], [], []
            for _ in range(2):
                stream = await api.chat.completions.create(
                    model="policy",
                    messages=[user("go")],
                    tools=TOOLS,
                    stream=True,
                    stream_options={"include_usage": True},
                )
                async for event in stream:
                    for choice in event.choices:
                        texts.append(choice.delta.content or "")
                        calls += choice.delta.tool_calls or []
                        reasons += [choice.finish_reason] if choice.finish_reason else []
                    usage = event.usage
                assert usage.completion_tokens > 0
            return "".join(texts), calls, reasons

    text, calls, reasons = asyncio.run(run())
    assert text == "Fine."
    assert [call.function.name for call in calls] == ["multiply"]
    assert reasons == ["tool_calls", "stop"]
    check_accounting(engine, session)


def test_a_secret_opens_its_session_and_nothing_else(renderer):
    sessions = [make_session(ScriptedEngine(renderer, ["a"]), session_id=name) for name in ("s0", "s1")]

    async def run():
        async with serving(renderer, *sessions) as (one, two), aiohttp.ClientSession() as http:
            assert one.api_key != two.api_key
            codes = []
            for key in (one.api_key + "x", "", two.api_key):
                headers = {"Authorization": f"Bearer {key}"}
                body = {"messages": [user("hi")]}
                async with http.post(f"{one.base_url}/chat/completions", json=body, headers=headers) as answer:
                    codes.append(answer.status)
                for path in ("/sessions", "/update_weights", "/health"):
                    async with http.post(one.base_url + path, json={}, headers=headers) as answer:
                        assert answer.status in (401, 404)
            return codes

    assert asyncio.run(run()) == [401, 401, 200]
    assert [session.turns for session in sessions] == [0, 1]


def test_a_closed_session_answers_no_more(renderer):
    session = make_session(ScriptedEngine(renderer, ["a"]))

    async def run():
        gateway = Gateway(renderer, "policy", SamplingParams())
        await gateway.start()
        with gateway.open(session) as access:
            pass
        async with client(access, max_retries=0) as api:
            with pytest.raises(openai.AuthenticationError):
                await api.chat.completions.create(model="policy", messages=[user("hi")])
        await gateway.close()

    asyncio.run(run())


def test_a_retry_is_replayed_and_not_sampled_again(renderer):
    engine = ScriptedEngine(renderer, ["one", "two"])
    session = make_session(engine)
    body = {"messages": [user("hi")]}

    async def run():
        async with serving(renderer, session) as (access,), aiohttp.ClientSession() as http:

            async def post(**headers):
                given = {"Authorization": f"Bearer {access.api_key}", **headers}
                async with http.post(f"{access.base_url}/chat/completions", json=body, headers=given) as answer:
                    return (await answer.json())["choices"][0]["message"]["content"]

            return [await post(), await post(**{"x-stainless-retry-count": "1"}), await post()]

    assert asyncio.run(run()) == ["one", "one", "two"]
    assert len(engine.requests) == 2


def slowed(renderer, script, count):
    """Return a session whose engine answers once ``count`` requests wait, and the engine."""
    engine, ready = ScriptedEngine(renderer, script), asyncio.Event()
    session, waiting = make_session(engine), []

    async def slow(request):
        waiting.append(request)
        if len(waiting) >= count:
            ready.set()
        await ready.wait()
        await asyncio.sleep(0.5 if count == 1 else 0)
        return await engine(request)

    session._generate = slow
    return session, engine


def test_a_client_that_left_finds_its_answer(renderer):
    """The retry of OpenAI's client gets what its first attempt sampled; a later equal request is another sample."""
    session, engine = slowed(renderer, ["one", "two"], 1)

    async def run():
        async with serving(renderer, session) as (access,), client(access, max_retries=2) as api:
            create = partial(api.chat.completions.create, model="policy", messages=[user("hi")])
            answers = [await create(timeout=0.3), await create()]
            return [answer.choices[0].message.content for answer in answers]

    assert asyncio.run(run()) == ["one", "two"]
    assert len(engine.requests) == 2


@pytest.mark.parametrize("at_once", [True, False])
def test_equal_requests_are_samples_of_their_own(renderer, at_once):
    """Best-of-n sends equal requests, at once or one after the other."""
    session, engine = slowed(renderer, ["one", "two", "three"], 3 if at_once else 0)

    async def run():
        async with serving(renderer, session) as (access,), client(access, max_retries=0) as api:
            create = partial(api.chat.completions.create, model="policy", messages=[user("hi")])
            calls = [create() for _ in range(3)]
            answers = await asyncio.gather(*calls) if at_once else [await call for call in calls]
            return {answer.choices[0].message.content for answer in answers}

    assert asyncio.run(run()) == {"one", "two", "three"}
    check_accounting(engine, session)
    assert len(session.trajectories()) == 3


def test_retries_of_equal_requests_are_answered_apart(renderer):
    """Two equal requests whose clients left have two answers; their retries get one each."""
    session, engine = slowed(renderer, ["one", "two", "three"], 2)

    async def run():
        async with serving(renderer, session) as (access,), aiohttp.ClientSession() as http:

            async def post(attempt, timeout):
                headers = {"Authorization": f"Bearer {access.api_key}", "x-stainless-retry-count": str(attempt)}
                options = {"json": {"messages": [user("hi")]}, "headers": headers}
                async with asyncio.timeout(timeout), http.post(f"{access.base_url}/chat/completions", **options) as got:
                    return (await got.json())["choices"][0]["message"]["content"]

            first = asyncio.create_task(post(0, 10))
            await asyncio.sleep(0.1)
            first.cancel()
            second = asyncio.create_task(post(0, 0.1))
            await asyncio.wait([first, second])
            return [await post(1, 10), await post(1, 10)]

    assert sorted(asyncio.run(run())) == ["one", "two"]
    assert len(engine.requests) == 2


def test_an_idempotency_key_names_a_request(renderer):
    session, engine = slowed(renderer, ["one", "two"], 0)

    async def run():
        async with serving(renderer, session) as (access,), client(access) as api:

            async def create(key, text="hi"):
                headers = {"Idempotency-Key": key}
                answer = await api.chat.completions.create(model="policy", messages=[user(text)], extra_headers=headers)
                return answer.choices[0].message.content

            texts = [await create("a"), await create("a"), await create("b")]
            with pytest.raises(openai.BadRequestError) as caught:
                await create("a", "ho")
            return texts, caught.value.code

    assert asyncio.run(run()) == (["one", "one", "two"], "idempotency_key_in_use")
    assert len(engine.requests) == 2


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [user("a")], "tools": ["x"]}, "tools"),
        ({"messages": [user("a")], "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [user("a")], "temperature": "hot"}, "hot"),
        ({"messages": [user("a")], "n": 0}, "n: "),
        ({"messages": [{"role": "king", "content": "a"}]}, "king"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ([], "JSON object"),
        ({"messages": [user("a" * 5000)]}, "no room"),
    ],
)
def test_a_bad_request_is_named(renderer, body, words):
    session = make_session(ScriptedEngine(renderer, lambda _: "a"), Budget(max_total_tokens=1000))

    async def run():
        async with serving(renderer, session) as (access,), aiohttp.ClientSession() as http:
            headers = {"Authorization": f"Bearer {access.api_key}"}
            async with http.post(f"{access.base_url}/chat/completions", json=body, headers=headers) as answer:
                return answer.status, (await answer.json())["error"]["message"]

    status, message = asyncio.run(run())
    assert status == 400
    assert words in message


def test_completions_take_text_and_ids(renderer):
    engine = ScriptedEngine(renderer, ["one", "two"])
    session = make_session(engine)

    async def run():
        async with serving(renderer, session) as (access,), client(access) as api:
            first = await api.completions.create(model="policy", prompt="Say ", extra_body={"return_token_ids": True})
            choice = first.choices[0]
            ids = choice.prompt_token_ids + choice.token_ids
            second = await api.completions.create(model="policy", prompt=ids, stop=["w"])
            return choice.text, second.choices[0].text

    assert asyncio.run(run()) == ("one", "t")
    (trajectory,) = session.trajectories()
    assert renderer.decode(trajectory.token_ids) == "Say one<|im_end|>tw"


def run_program(renderer, program, kind, script, **task):
    engine = ScriptedEngine(renderer, script)
    session = make_session(engine)

    async def run():
        gateway = Gateway(renderer, "policy", SamplingParams(max_tokens=200))
        await gateway.start()
        loop = ProgramLoop(AgentLoopSetup(SimpleNamespace(program=program, program_kind=kind), None, gateway))
        try:
            return await RolloutRunner(loop, None, Limits(rollout_s=60)).run({"prompt": [], **task}, session)
        finally:
            await gateway.close()

    (trajectory,) = asyncio.run(run())
    check_accounting(engine, session)
    return trajectory


async def ask_once(task, base_url, api_key):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as api:
        answer = await api.chat.completions.create(model="policy", messages=[user(task["question"])])
    return float(answer.choices[0].message.content == task["answer"])


def test_an_async_function_is_a_program(renderer, monkeypatch):
    monkeypatch.setitem(sys.modules, "a_program", SimpleNamespace(ask_once=ask_once))
    trajectory = run_program(renderer, "a_program:ask_once", "function", ["42"], question="6*7", answer="42")
    assert (trajectory.end, trajectory.reward) == ("done", 1.0)
    assert trajectory.messages[-1]["content"] == "42"


def test_a_command_is_a_program(renderer, tmp_path):
    script = tmp_path / "agent.py"
    script.write_text(
        "import json, os, sys, urllib.request\n"
        "task = json.load(sys.stdin)\n"
        "body = json.dumps({'messages': [{'role': 'user', 'content': task['question']}]}).encode()\n"
        "headers = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY'], 'Content-Type': 'application/json'}\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "answer = json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))\n"
        "print(json.dumps({'reward': len(answer['choices'][0]['message']['content'])}))\n"
    )
    trajectory = run_program(renderer, f"{sys.executable} {script}", "command", ["four"], question="?")
    assert (trajectory.end, trajectory.reward) == ("done", 4.0)


def test_a_failing_command_is_named(renderer, tmp_path):
    command = f"{sys.executable} -c 'import sys; sys.exit(\"no luck\")'"
    engine = ScriptedEngine(renderer, [])
    session = make_session(engine)

    async def run():
        gateway = Gateway(renderer, "policy", SamplingParams())
        await gateway.start()
        loop = ProgramLoop(AgentLoopSetup(SimpleNamespace(program=command, program_kind="command"), None, gateway))
        try:
            return await RolloutRunner(loop, None, Limits()).run({"prompt": []}, session)
        finally:
            await gateway.close()

    (trajectory,) = asyncio.run(run())
    assert (trajectory.end, trajectory.failure.boundary) == ("error", "program")
    assert "no luck" in trajectory.failure.message
