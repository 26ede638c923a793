"""The conformance suite of servers of OpenAI's API: each parameter is honoured or refused, and none is dropped.

The checks follow the API's reference as the package ``openai`` has it, and use its client. A server that refuses a
parameter answers with an error object that names the parameter, and samples nothing.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest

from rollcast_serving.testing.openai_bodies import changed_bodies, malformed_bodies
from rollcast_serving.testing.openai_cases import (
    ACCEPTED,
    ADD,
    BAD_MESSAGES,
    CALL,
    MALFORMED,
    REFUSED,
    REFUSED_COMPLETIONS,
    SUB,
    TEXT,
    USER,
)
from rollcast_serving.testing.openai_server import ServedApi

__all__ = ["OpenAISuite", "Raw"]


class Raw:
    """Plain HTTP to a server, for what its client cannot send.

    Args:
        served: the server.
    """

    def __init__(self, served: ServedApi) -> None:
        url = urlsplit(served.base_url)
        self._path, self._key = url.path, served.api_key
        self._connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=30)

    def send(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, str, Any]:
        """Return the status, the content type and the JSON of an answer."""
        own = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        self._connection.request(method, self._path + path, body, {**own, **(headers or {})})
        answer = self._connection.getresponse()
        data = answer.read()
        return answer.status, answer.headers.get_content_type(), json.loads(data)

    def post(self, body: bytes) -> tuple[int, Any]:
        """Return the status and the JSON of the answer to a chat completion."""
        status, kind, answer = self.send("POST", "/chat/completions", body)
        assert kind == "application/json"
        return status, answer

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def check_error(body: Any, param: str | None = None) -> None:
    """Check the form of an error, and that it names a parameter."""
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    if param is not None:
        assert str(error["param"]).replace("[", ".").split(".")[0] == param
        assert param in error["message"]
        assert error["code"]


class OpenAISuite:
    """Checks for servers of OpenAI's API; subclass it and override the fixture ``served``.

    The server's rollout is a :class:`~rollcast_serving.testing.openai_server.ScriptedRollout` with the tokenizer of
    :func:`~rollcast_serving.testing.openai_server.build_byte_tokenizer`, and its own stop string is ``<own stop>``.

    Attributes:
        has_tools: True if the server offers tools to the model.
        has_seeds: True if requests can set a seed.
        malformed: number of malformed bodies that are tried.
    """

    has_tools: ClassVar[bool] = True
    has_seeds: ClassVar[bool] = False
    malformed: ClassVar[int] = 500

    @pytest.fixture(scope="class")
    @classmethod
    def served(cls) -> Iterator[ServedApi]:
        """Return the server under test; override it."""
        pytest.fail(f"{cls.__name__} needs a fixture served, a running server")

    @pytest.fixture(scope="class")
    @classmethod
    def openai(cls) -> Any:
        """Return the package ``openai``."""
        return pytest.importorskip("openai")

    @pytest.fixture(scope="class")
    @classmethod
    def api(cls, served: ServedApi, openai: Any) -> Iterator[Any]:
        """Yield OpenAI's client of the server."""
        plain = openai.DefaultHttpxClient(verify=False)  # loading certificates takes longer than all checks
        with openai.OpenAI(
            base_url=served.base_url, api_key=served.api_key, max_retries=0, timeout=30, http_client=plain
        ) as client:
            yield client

    @pytest.fixture(scope="class")
    @classmethod
    def raw(cls, served: ServedApi) -> Iterator[Raw]:
        """Yield plain HTTP to the server."""
        raw = Raw(served)
        yield raw
        raw.close()

    def chat(self, api: Any, served: ServedApi, *texts: str, **params: Any) -> Any:
        """Return a chat completion in which the model says some texts."""
        served.say(*texts)
        return api.chat.completions.create(**{"model": served.model, "messages": [USER], **params})

    def refuse(self, openai: Any, served: ServedApi, call: Any, param: str | None, status: int = 400) -> Any:
        """Check that a call is refused, with an error that names a parameter, and samples nothing; return the error."""
        before = served.sampled
        with pytest.raises(openai.APIStatusError) as caught:
            call()
        assert caught.value.status_code == status
        check_error(caught.value.response.json(), param)
        assert served.sampled == before
        return caught.value

    # ---- parameters ----

    def test_every_parameter_of_the_reference_is_read(self, openai: Any, raw: Raw, served: ServedApi) -> None:
        """Check that no parameter in the client's types is dropped: a value that none can have is refused by name."""
        from openai.types import completion_create_params as completions
        from openai.types.chat import completion_create_params as chats

        before = served.sampled
        for path, reference, required in (
            ("/chat/completions", chats.CompletionCreateParamsBase, {"messages": [USER]}),
            ("/completions", completions.CompletionCreateParamsBase, {"prompt": "a"}),
        ):
            for name in reference.__annotations__:
                body = {"model": served.model, **required, name: [["no such value"]]}
                status, _, answer = raw.send("POST", path, json.dumps(body).encode())
                assert status == 400, (path, name)
                check_error(answer, name)
        assert served.sampled == before

    @pytest.mark.parametrize("name", ACCEPTED)
    def test_accepted(self, api: Any, served: ServedApi, name: str) -> None:
        """Check values that change nothing."""
        answer = self.chat(api, served, **ACCEPTED[name])
        assert answer.choices[0].message.content == "fine"

    @pytest.mark.parametrize("name", REFUSED)
    def test_refused(self, openai: Any, api: Any, served: ServedApi, name: str) -> None:
        """Check values that no server without constrained sampling can honour, or that the reference excludes."""
        params, param = REFUSED[name]
        if "tools" in params and not self.has_tools:
            param = "tools"
        self.refuse(openai, served, lambda: self.chat(api, served, **params), param)

    @pytest.mark.parametrize("name", BAD_MESSAGES)
    def test_refused_messages(self, openai: Any, api: Any, served: ServedApi, name: str) -> None:
        """Check conversations that the reference excludes."""
        self.refuse(openai, served, lambda: self.chat(api, served, messages=BAD_MESSAGES[name]), "messages")

    @pytest.mark.parametrize("name", REFUSED_COMPLETIONS)
    def test_refused_completions(self, openai: Any, api: Any, served: ServedApi, name: str) -> None:
        """Check parameters of completions that are refused."""
        params, param = REFUSED_COMPLETIONS[name]
        asked = {"model": served.model, "prompt": "a", **params}
        self.refuse(openai, served, lambda: api.completions.create(**asked), param)

    def test_sampling_parameters_arrive(self, api: Any, served: ServedApi) -> None:
        """Check that the rollout gets the request's sampling parameters."""
        bias = {"7": -100, "5": 2}
        params = {"temperature": 0.25, "top_p": 0.5, "max_completion_tokens": 9, "logit_bias": bias}
        extra = {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5, "stop_token_ids": [4], "ignore_eos": True}
        self.chat(api, served, **params, extra_body=extra)
        sampling = served.rollout.requests[-1].sampling
        assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.25, 0.5, 9)
        assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (3, 0.1, 1.5)
        assert dict(sampling.logit_bias) == {7: -100, 5: 2}
        assert 4 in sampling.stop_token_ids
        assert sampling.ignore_eos is True

    def test_max_tokens_cuts(self, api: Any, served: ServedApi) -> None:
        """Check the end of a reply at the limit."""
        (choice,) = self.chat(api, served, "abcdef", max_tokens=3).choices
        assert (choice.message.content, choice.finish_reason) == ("abc", "length")

    def test_seed(self, openai: Any, api: Any, served: ServedApi) -> None:
        """Check that a seed reaches the rollout, or is refused."""
        if not self.has_seeds:
            self.refuse(openai, served, lambda: self.chat(api, served, seed=5), "seed")
            return
        for seed in (5, -5, 2**63 - 1):
            self.chat(api, served, seed=seed)
            assert served.rollout.requests[-1].seed == seed % 2**63
        self.refuse(openai, served, lambda: self.chat(api, served, seed=2**63), "seed")

    @pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids"])
    def test_tokens_outside_the_vocabulary(self, openai: Any, api: Any, served: ServedApi, name: str) -> None:
        """Check that ids that the model does not have are refused with the key."""
        value = {"logit_bias": {"99999": 1}, "stop_token_ids": [99999]}[name]
        error = self.refuse(openai, served, lambda: self.chat(api, served, extra_body={name: value}), None)
        assert name in error.body["message"]

    def test_n(self, api: Any, served: ServedApi) -> None:
        """Check several choices, with their indices and the usage of all."""
        answer = self.chat(api, served, "a", "bb", "ccc", n=3)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert sorted(str(choice.message.content) for choice in answer.choices) == ["a", "bb", "ccc"]
        assert answer.usage.completion_tokens == 2 + 3 + 4

    # ---- stops ----

    @pytest.mark.parametrize(
        ("text", "stop", "shown"),
        [
            ("Hello world", "wor", "Hello "),
            ("Hello world", ["xyz", "world"], "Hello "),
            ("Hello world", ["o w", "lo"], "Hel"),
            ("stop it", "stop", ""),
            (" one\n\nUser: two", "\n\nUser:", " one"),
            ("né€ 😀 so", "😀", "né€ "),
            ("n€€€x", ["€€", "€x"], "n"),
            ("a\n\n\n\nb", "\n\n\n\n", "a"),
            ("no such", "never", "no such"),
        ],
    )
    def test_stop(self, api: Any, served: ServedApi, text: str, stop: Any, shown: str) -> None:
        """Check that the text ends before the stop string, in chats, completions and streams."""
        (choice,) = self.chat(api, served, text, stop=stop).choices
        assert (choice.message.content, choice.finish_reason) == (shown, "stop")
        served.say(text)
        (choice,) = api.completions.create(model=served.model, prompt="a", stop=stop).choices
        assert (choice.text, choice.finish_reason) == (shown, "stop")
        events = list(self.chat(api, served, text, stop=stop, stream=True))
        assert "".join(choice.delta.content or "" for event in events for choice in event.choices) == shown

    def test_own_stop(self, api: Any, served: ServedApi) -> None:
        """Check that the server's own stop strings apply with and without the request's."""
        for stop in (None, "z"):
            (choice,) = self.chat(api, served, "ab<own stop>z", stop=stop).choices
            assert choice.message.content == "ab"

    def test_stop_token(self, api: Any, served: ServedApi) -> None:
        """Check that a stop token ends the text and is not part of it."""
        ids = served.rollout._tokenizer.encode("!", add_special_tokens=False)
        (choice,) = self.chat(api, served, "ab!c", extra_body={"stop_token_ids": ids}).choices
        assert (choice.message.content, choice.finish_reason) == ("ab", "stop")

    # ---- answers ----

    def test_chat_completion(self, api: Any, served: ServedApi) -> None:
        """Check the fields of an answer."""
        answer = self.chat(api, served, TEXT)
        assert answer.object == "chat.completion"
        assert answer.id.startswith("chatcmpl-")
        assert answer.model == served.model
        assert isinstance(answer.created, int)
        (choice,) = answer.choices
        assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
        assert (choice.message.role, choice.message.content, choice.message.refusal) == ("assistant", TEXT, None)
        assert choice.message.tool_calls is None
        usage = answer.usage
        assert usage.completion_tokens == len(TEXT.encode()) + 1
        assert usage.prompt_tokens > 0
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert self.chat(api, served).id != answer.id

    def test_whitespace_is_kept(self, api: Any, served: ServedApi) -> None:
        """Check that a text keeps the white space at its ends."""
        assert self.chat(api, served, "\n  a \n").choices[0].message.content == "\n  a \n"

    @pytest.mark.parametrize("stop", [None, " "])
    def test_log_probs(self, api: Any, served: ServedApi, stop: str | None) -> None:
        """Check that there is an entry for each token, and that the bytes join to the text."""
        answer = self.chat(api, served, TEXT, logprobs=True, stop=stop)
        (choice,) = answer.choices
        entries = choice.logprobs.content
        assert len(entries) == answer.usage.completion_tokens
        assert bytes(byte for entry in entries for byte in entry.bytes).decode() == choice.message.content
        assert all(entry.logprob < 0 and entry.top_logprobs == [] and entry.token for entry in entries)

    def test_messages_of_all_roles(self, api: Any, served: ServedApi) -> None:
        """Check messages as the reference has them: parts, names, results of tools, null content."""
        parts = [{"type": "text", "text": "hé"}, {"type": "text", "text": "llo"}]
        messages = [
            {"role": "developer", "content": "Be brief."},
            {"role": "system", "content": "Be kind.", "name": "sys"},
            {"role": "user", "content": parts, "name": "ann"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
            {"role": "tool", "content": [{"type": "text", "text": "4"}], "tool_call_id": "call_x"},
            {"role": "assistant", "content": [{"type": "text", "text": "four"}]},
            USER,
        ]
        assert self.chat(api, served, messages=messages).choices[0].message.content == "fine"
        prompt = served.rollout._tokenizer.decode(served.rollout.requests[-1].prompt_ids)
        assert prompt.startswith("<|im_start|>developer\nBe brief.<|im_end|>")
        assert "<|im_start|>user\nhéllo<|im_end|>" in prompt
        assert "<|im_start|>assistant\nfour<|im_end|>" in prompt

    def test_arguments_of_any_text(self, raw: Raw, served: ServedApi) -> None:
        """Check that arguments of an earlier call, which a model wrote, may be any text."""
        deep = "[" * 100_000
        for arguments in (
            "",
            "{",
            "[1]",
            "null",
            '{"a": "\\ud800"}',
            '{"a": NaN}',
            deep,
            "9" * 5000,
            "\u2028",
            "<|im_end|>",
        ):
            call = {**CALL, "function": {"name": "add", "arguments": arguments}}
            messages = [USER, {"role": "assistant", "tool_calls": [call]}, USER]
            before = served.sampled
            status, answer = raw.post(json.dumps({"messages": messages}).encode())
            assert status in (200, 400), (arguments[:50], answer)
            assert served.sampled == before + (status == 200)

    @pytest.mark.parametrize("text", ["two", " two\n", "to wor"])
    def test_a_conversation(self, api: Any, served: ServedApi, text: str) -> None:
        """Check that a conversation continues with the reply as the client repeats it."""
        first = self.chat(api, served, text, stop="wor").choices[0].message.model_dump(exclude_none=True)
        assert self.chat(api, served, messages=[USER, first, USER]).choices[0].message.content == "fine"

    # ---- streams ----

    def test_stream(self, api: Any, served: ServedApi) -> None:
        """Check the events of a stream: one id, the role first, the reason last, and no usage."""
        events = list(self.chat(api, served, TEXT, stream=True))
        assert {(event.object, event.id, event.model) for event in events} == {
            ("chat.completion.chunk", events[0].id, served.model)
        }
        deltas = [choice.delta for event in events for choice in event.choices]
        assert deltas[0].role == "assistant"
        assert "".join(delta.content or "" for delta in deltas) == TEXT
        reasons = [choice.finish_reason for event in events for choice in event.choices]
        assert reasons[-1] == "stop"
        assert set(reasons[:-1]) == {None}
        assert all(event.usage is None for event in events)

    def test_stream_with_usage(self, api: Any, served: ServedApi) -> None:
        """Check that the last event has the usage and no choices, and that all others have a null usage."""
        *events, last = self.chat(api, served, stream=True, stream_options={"include_usage": True})
        assert last.choices == []
        assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
        assert all("usage" in event.model_fields_set and event.usage is None for event in events)

    def test_stream_of_several(self, api: Any, served: ServedApi) -> None:
        """Check that each choice of a stream has its index and its end."""
        events = list(self.chat(api, served, "a", "b", n=2, stream=True, logprobs=True))
        choices = [choice for event in events for choice in event.choices]
        assert {choice.index for choice in choices if choice.finish_reason} == {0, 1}
        assert sorted(choice.delta.content for choice in choices if choice.delta.content) == ["a", "b"]
        assert sum(len(choice.logprobs.content) for choice in choices if choice.logprobs) == 4

    def test_stream_is_an_event_stream(self, raw: Raw, served: ServedApi) -> None:
        """Check the content type and the end of a stream."""
        body = {"model": served.model, "messages": [USER], "stream": True}
        connection = raw._connection
        own = {"Authorization": f"Bearer {served.api_key}", "Content-Type": "application/json"}
        connection.request("POST", f"{raw._path}/chat/completions", json.dumps(body), own)
        answer = connection.getresponse()
        lines = answer.read().decode().split("\n\n")
        assert answer.headers.get_content_type() == "text/event-stream"
        assert lines[-2:] == ["data: [DONE]", ""]
        assert all(line.startswith("data: ") for line in lines[:-1])

    def test_a_refused_stream_is_an_error(self, openai: Any, api: Any, served: ServedApi) -> None:
        """Check that an error comes before the stream, as JSON."""
        self.refuse(openai, served, lambda: self.chat(api, served, stream=True, temperature=3), "temperature")

    # ---- completions ----

    def test_completion(self, api: Any, served: ServedApi) -> None:
        """Check the fields of a completion, for a text and for token ids."""
        for prompt in ("a", [5, 6, 7], [[5, 6]], ["a"]):
            served.say(TEXT)
            answer = api.completions.create(model=served.model, prompt=prompt, logprobs=0)
            (choice,) = answer.choices
            assert (answer.object, choice.text, choice.finish_reason) == ("text_completion", TEXT, "stop")
            assert answer.usage.completion_tokens == len(choice.logprobs.tokens) == len(TEXT.encode()) + 1
            offsets = choice.logprobs.text_offset
            assert offsets[0] == 0
            assert offsets == sorted(offsets)
            assert len(offsets) == len(choice.logprobs.token_logprobs)

    def test_completion_defaults(self, api: Any, served: ServedApi) -> None:
        """Check values of completions that change nothing."""
        params = {"best_of": 1, "echo": False, "frequency_penalty": 0, "presence_penalty": 0, "user": "u", "n": 1}
        answer = api.completions.create(model=served.model, prompt="a", suffix=None, **params)
        assert answer.choices[0].logprobs is None

    def test_completion_stream(self, api: Any, served: ServedApi) -> None:
        """Check the events of a completion's stream."""
        served.say(TEXT)
        events = list(
            api.completions.create(model=served.model, prompt="a", stream=True, stream_options={"include_usage": True})
        )
        assert "".join(choice.text for event in events for choice in event.choices) == TEXT
        assert events[-1].usage.completion_tokens == len(TEXT.encode()) + 1

    # ---- tools ----

    def say_call(self, name: str = "add", **arguments: Any) -> str:
        """Return the text of a call, in the server's tool format."""
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments or {'a': 1}})}</tool_call>"

    def test_tools(self, openai: Any, api: Any, served: ServedApi) -> None:
        """Check that tools are offered and called, or refused."""
        if not self.has_tools:
            self.refuse(openai, served, lambda: self.chat(api, served, tools=[ADD]), "tools")
            return
        for stream in (False, True):
            text = "Let me see." + self.say_call(a=1) + self.say_call(a=2)
            answer = self.chat(api, served, text, tools=[ADD], stream=stream)
            if stream:
                choices = [choice for event in answer for choice in event.choices]
                calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
                assert [call.index for call in calls] == [0, 1]
                reason, content = choices[-1].finish_reason, "".join(part.delta.content or "" for part in choices)
            else:
                (choice,) = answer.choices
                calls, reason, content = choice.message.tool_calls, choice.finish_reason, choice.message.content
            assert [(call.type, call.function.name) for call in calls] == [("function", "add")] * 2
            assert [json.loads(call.function.arguments) for call in calls] == [{"a": 1}, {"a": 2}]
            assert (reason, content) == ("tool_calls", "Let me see.")

    def test_call_ids_are_unique(self, api: Any, served: ServedApi) -> None:
        """Check that no two calls of a conversation have one id."""
        if not self.has_tools:
            pytest.skip("the server has no tools")
        messages: list[Any] = [USER]
        ids: list[str] = []
        for _ in range(3):
            text = self.say_call(a=1) + self.say_call(a=2)
            message = self.chat(api, served, text, messages=messages, tools=[ADD]).choices[0].message
            ids += [call.id for call in message.tool_calls]
            results = [{"role": "tool", "content": "4", "tool_call_id": call.id} for call in message.tool_calls]
            messages += [message.model_dump(exclude_none=True), *results]
        ids += [
            call.id
            for choice in self.chat(api, served, text, text, tools=[ADD], n=2).choices
            for call in choice.message.tool_calls
        ]
        assert len(ids) == len(set(ids)) == 10

    @pytest.mark.parametrize("params", [{}, {"tools": [ADD], "tool_choice": "none"}], ids=["no tools", "none"])
    def test_no_calls(self, api: Any, served: ServedApi, params: Mapping[str, Any]) -> None:
        """Check that a request without tools, or with ``tool_choice`` none, gets text and no calls."""
        if params and not self.has_tools:
            pytest.skip("the server has no tools")
        for stream in (False, True):
            answer = self.chat(api, served, self.say_call(), **params, stream=stream)
            choices = [choice for event in answer for choice in event.choices] if stream else answer.choices
            messages = [choice.delta if stream else choice.message for choice in choices]
            assert all(not message.tool_calls for message in messages)
            assert "".join(message.content or "" for message in messages) == self.say_call()
            assert choices[-1].finish_reason == "stop"

    def test_auto_is_the_default(self, api: Any, served: ServedApi) -> None:
        """Check that ``auto`` lets the model call a tool or not."""
        if not self.has_tools:
            pytest.skip("the server has no tools")
        for choice in ("auto", None):
            params = {} if choice is None else {"tool_choice": choice, "parallel_tool_calls": True}
            assert self.chat(api, served, self.say_call(), tools=[ADD], **params).choices[0].message.tool_calls
            assert self.chat(api, served, tools=[ADD], **params).choices[0].message.content == "fine"

    def test_allowed_tools(self, api: Any, served: ServedApi) -> None:
        """Check that only the allowed tools are offered and called."""
        if not self.has_tools:
            pytest.skip("the server has no tools")
        allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "sub"}}]}
        params: dict[str, Any] = {
            "tools": [ADD, SUB],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed},
        }
        answer = self.chat(api, served, self.say_call("sub"), **params).choices[0].message
        assert [call.function.name for call in answer.tool_calls] == ["sub"]
        prompt = served.rollout._tokenizer.decode(served.rollout.requests[-1].prompt_ids)
        assert '"sub"' in prompt
        assert '"add"' not in prompt
        answer = self.chat(api, served, self.say_call("add"), **params).choices[0].message
        assert (answer.tool_calls, answer.content) == (None, self.say_call("add"))

    def test_strict_functions(self, openai: Any, api: Any, served: ServedApi) -> None:
        """Check that a strict function is only called with arguments of its schema."""
        if not self.has_tools:
            pytest.skip("the server has no tools")
        strict = {**ADD, "function": {**ADD["function"], "strict": True}}  # type: ignore[dict-item]
        assert self.chat(api, served, self.say_call(a=1), tools=[strict]).choices[0].message.tool_calls
        message = self.chat(api, served, self.say_call(a="x"), tools=[strict]).choices[0].message
        assert (message.tool_calls, message.content) == (None, self.say_call(a="x"))
        for parameters in ({"type": "no such type"}, {"$ref": "#/$defs/none"}, {"$ref": "http://127.0.0.1:9/schema"}):
            wrong = {**strict, "function": {**strict["function"], "parameters": parameters}}  # type: ignore[dict-item]
            self.refuse(openai, served, partial(self.chat, api, served, tools=[wrong]), "tools")

    # ---- models and HTTP ----

    def test_models(self, api: Any, served: ServedApi) -> None:
        """Check the list of models, and one of them."""
        models = list(api.models.list())
        assert served.model in [model.id for model in models]
        assert all((model.object, bool(model.owned_by)) == ("model", True) for model in models)
        assert api.models.retrieve(served.model).id == served.model

    def test_an_unknown_model(self, openai: Any, api: Any, served: ServedApi) -> None:
        """Check that a model that is not served is not found, wherever it is named."""
        for call in (
            lambda: self.chat(api, served, model="gpt-no-such"),
            lambda: api.completions.create(model="gpt-no-such", prompt="a"),
            lambda: api.models.retrieve("gpt-no-such"),
        ):
            error = self.refuse(openai, served, call, "model", 404)
            assert isinstance(error, openai.NotFoundError)
            assert error.code == "model_not_found"
            assert "gpt-no-such" in str(error)

    def test_a_wrong_key(self, openai: Any, api: Any, served: ServedApi) -> None:
        """Check that a wrong key is refused."""
        other = api.with_options(api_key="wrong")
        error = self.refuse(openai, served, lambda: self.chat(other, served), None, 401)
        assert isinstance(error, openai.AuthenticationError)
        assert error.code == "invalid_api_key"

    @pytest.mark.parametrize(
        ("method", "path", "status"),
        [
            ("GET", "/chat/completions", 405),
            ("DELETE", "/completions", 405),
            ("POST", "/models", 405),
            ("POST", "/no/such/path", 404),
            ("GET", "/chat/completions/chatcmpl-1", 404),
            ("POST", "/responses", 404),
            ("POST", "/embeddings", 404),
        ],
    )
    def test_no_such_route(self, raw: Raw, served: ServedApi, method: str, path: str, status: int) -> None:
        """Check that a path or method that does not exist is an error with a JSON body."""
        code, kind, answer = raw.send(method, path, b"{}" if method == "POST" else None)
        assert (code, kind) == (status, "application/json")
        check_error(answer)

    def test_a_wrong_content_type(self, raw: Raw, served: ServedApi) -> None:
        """Check that a body of another content type is refused."""
        before, body = served.sampled, json.dumps({"model": served.model, "messages": [USER]}).encode()
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            status, _, answer = raw.send("POST", "/chat/completions", body, {"Content-Type": kind})
            assert status == 415
            check_error(answer)
        assert served.sampled == before
        assert (
            raw.send("POST", "/chat/completions", body, {"Content-Type": "application/json; charset=utf-8"})[0] == 200
        )

    @pytest.mark.parametrize("name", MALFORMED)
    def test_a_malformed_body(self, raw: Raw, served: ServedApi, name: str) -> None:
        """Check that a body that is no JSON object is refused."""
        before = served.sampled
        status, answer = raw.post(MALFORMED[name])
        assert status == 400
        check_error(answer)
        assert served.sampled == before

    def test_malformed_bodies_of_a_seed(self, raw: Raw, served: ServedApi) -> None:
        """Check that malformed bodies are refused with 400, quickly, and that none is sampled."""
        before = served.sampled
        for number, body in enumerate(malformed_bodies(33, self.malformed, served.model)):
            status, answer = raw.post(body)
            assert status == 400, (number, body[:500], answer)
            check_error(answer)
        assert served.sampled == before
        assert raw.post(json.dumps({"model": served.model, "messages": [USER]}).encode())[0] == 200

    def test_changed_bodies_of_a_seed(self, raw: Raw, served: ServedApi) -> None:
        """Check that a body with one value replaced is answered or refused, and sampled only if it is answered."""
        answered = 0
        for number, body in enumerate(changed_bodies(33, self.malformed, served.model)):
            before = served.sampled
            status, answer = raw.post(body)
            assert status in (200, 400, 404), (number, body, answer)
            assert served.sampled == before + (status == 200)
            answered += status == 200
            if status != 200:
                check_error(answer)
        assert 0 < answered < self.malformed
