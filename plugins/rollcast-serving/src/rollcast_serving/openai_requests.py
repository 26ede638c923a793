"""Requests of OpenAI's API: each parameter is honoured, or refused with an error that names it.

Bodies are checked before anything is sampled. A parameter that an endpoint cannot honour is accepted only with the
values that change nothing, such as ``"response_format": {"type": "text"}``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from rollcast.contracts.rollout import SamplingParams
from rollcast_serving.openai_errors import ApiError, model_not_found
from rollcast_serving.openai_messages import ApiMessage, StrictModel
from rollcast_serving.openai_tools import ApiTool, read_tools

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "Endpoint",
    "read_chat",
    "read_completion",
]

_MAX_STOPS = 4
_SHOWN = 80

#: Parameters that the endpoints cannot honour, with the values that change nothing; null always does.
_FIXED_CHAT: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "frequency_penalty": (0,),
    "function_call": (),
    "functions": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_FIXED_COMPLETION: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logprobs": (0,),
    "presence_penalty": (0,),
    "suffix": (),
}


@dataclass(frozen=True)
class Endpoint:
    """Features of an endpoint, as far as the endpoints differ.

    Attributes:
        models: names of the model, the first of which is the default.
        tools: True if the model can be offered tools.
        seeds: reason why requests cannot set a seed; empty if they can.
        several_prompts: True if a completion request may have several prompts.
    """

    models: tuple[str, ...]
    tools: bool = False
    seeds: str = ""
    several_prompts: bool = True


# ---- values ----


def _texts(value: Any) -> Any:
    """Return stop strings as a list; the API also takes one string."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("has to be a string, or a list of strings, none of them empty")
    if len(texts) > _MAX_STOPS:
        raise ValueError(f"has {len(texts)} stop strings; at most {_MAX_STOPS} are possible")
    return texts


def _biases(value: Any) -> Any:
    """Return the API's map of token ids, which are strings in JSON, with numbers."""
    if not isinstance(value, dict) or not all(token.isascii() and token.isdigit() for token in value):
        raise ValueError("has to be an object that maps token ids to numbers")
    return {int(token): bias for token, bias in value.items()}


def _prompt(value: Any) -> Any:
    """Return a completion's prompts as a list of texts and lists of token ids."""
    is_one = isinstance(value, str) or (isinstance(value, list) and all(_is_id(item) for item in value))
    prompts = [value] if is_one else value
    if not isinstance(prompts, list) or not prompts or not all(_is_prompt(prompt) for prompt in prompts):
        raise ValueError("has to be a text, texts, token ids of 0 to 2147483647, or lists of token ids")
    return prompts


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and bool(value) and all(map(_is_id, value)))


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_INT


_MAX_INT = 2**31 - 1
_Token = Annotated[int, Field(ge=0, le=_MAX_INT)]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class _StreamOptions(StrictModel):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class _Request(StrictModel):
    """Parameters of chat completions and completions, and the extensions of this endpoint."""

    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1, le=_MAX_INT)
    n: int | None = Field(None, ge=1, le=128)
    stop: Annotated[list[str], BeforeValidator(_texts)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    logit_bias: Annotated[dict[_Token, _Bias], BeforeValidator(_biases)] | None = None
    logprobs: int | bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    user: str | None = None
    # Extensions.
    top_k: int | None = Field(None, ge=-1, le=_MAX_INT)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    ignore_eos: bool | None = None
    stop_token_ids: list[_Token] | None = None
    return_token_ids: bool | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> _Request:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream=true")
        return self

    @property
    def count(self) -> int:
        """Number of choices for each prompt."""
        return self.n or 1

    @property
    def wants_log_probs(self) -> bool:
        """True if the answer has log-probs; completions ask for them with the number 0."""
        return self.logprobs is not None and self.logprobs is not False

    @property
    def includes_usage(self) -> bool:
        """True if the stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def limit(self) -> int | None:
        """Largest number of new tokens; None for the default."""
        return self.max_tokens

    def sampling(self, default: SamplingParams) -> SamplingParams:
        """Return the sampling parameters; the request's stops are added to the default's."""
        values: dict[str, Any] = {
            name: value
            for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "ignore_eos")
            if (value := getattr(self, name)) is not None
        }
        if self.limit is not None:
            values["max_tokens"] = self.limit
        if self.logit_bias is not None:
            values["logit_bias"] = tuple(sorted((token, float(bias)) for token, bias in self.logit_bias.items()))
        stops = tuple(dict.fromkeys((*default.stop, *(self.stop or ()))))
        stop_ids = tuple(dict.fromkeys((*default.stop_token_ids, *(self.stop_token_ids or ()))))
        return replace(default, **values, stop=stops, stop_token_ids=stop_ids, n=1)


class ChatRequest(_Request):
    """A valid request for chat completions."""

    messages: list[ApiMessage] = Field(min_length=1)
    tools: list[ApiTool] | None = Field(None, max_length=128)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    max_completion_tokens: int | None = Field(None, ge=1, le=_MAX_INT)
    metadata: _Metadata | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @model_validator(mode="after")
    def _check_limits(self) -> ChatRequest:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens cannot both be set")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(_Request):
    """A valid request for completions.

    Attributes:
        prompt: prompts, as texts or token ids.
    """

    prompt: Annotated[list[Any], BeforeValidator(_prompt)]
    logprobs: int | None = None


R = TypeVar("R", bound=_Request)


# ---- requests ----


def read_chat(body: Mapping[str, Any], endpoint: Endpoint) -> ChatRequest:
    """Return a chat request.

    Raises:
        ApiError: the endpoint cannot honour it; the error names the parameter.
    """
    request = _read(ChatRequest, body, endpoint, _FIXED_CHAT)
    if request.tools and not endpoint.tools:
        raise ApiError("tools is not supported by this endpoint", "tools", "unsupported_parameter")
    if request.tools and request.parallel_tool_calls is False:
        raise ApiError(
            "parallel_tool_calls=false is not supported: nothing limits the number of calls that the model writes; "
            "remove it, and handle each call of a reply",
            "parallel_tool_calls",
            "unsupported_value",
        )
    read_tools(request.tool_choice, body.get("tools") or [])
    return request


def read_completion(body: Mapping[str, Any], endpoint: Endpoint) -> CompletionRequest:
    """Return a completion request.

    Raises:
        ApiError: the endpoint cannot honour it; the error names the parameter.
    """
    request = _read(CompletionRequest, body, endpoint, _FIXED_COMPLETION)
    if len(request.prompt) > 1 and not endpoint.several_prompts:
        raise ApiError("prompt must be one text or one list of token ids at this endpoint", "prompt")
    return request


def _read(kind: type[R], body: Mapping[str, Any], endpoint: Endpoint, fixed: Mapping[str, tuple[Any, ...]]) -> R:
    for name, accepted in fixed.items():
        _check_fixed(name, body.get(name), accepted)
    try:
        request = kind.model_validate({name: value for name, value in body.items() if _is_read(kind, name, fixed)})
    except ValidationError as error:
        raise _api_error(error) from error
    if request.model is not None and request.model not in endpoint.models:
        raise model_not_found(request.model, endpoint.models)
    if request.seed is not None and endpoint.seeds:
        raise ApiError(f"seed is not supported by this endpoint: {endpoint.seeds}", "seed", "unsupported_parameter")
    return request


def _is_read(kind: type[R], name: str, fixed: Mapping[str, tuple[Any, ...]]) -> bool:
    return name in kind.model_fields or name not in fixed


def _check_fixed(name: str, value: Any, accepted: tuple[Any, ...]) -> None:
    """Check a parameter that can only have values that change nothing.

    Raises:
        ApiError: it has another value.
    """
    if value is None or any(_same(value, other) for other in accepted):
        return
    if not accepted:
        raise ApiError(f"{name} is not supported by this endpoint; remove it", name, "unsupported_parameter")
    only = " or ".join(json.dumps(other) for other in accepted)
    shown = json.dumps(value)[:_SHOWN]
    raise ApiError(f"{name} is {shown}; this endpoint supports only {only}", name, "unsupported_value")


def _same(value: Any, other: Any) -> bool:
    """True if two JSON values are equal, where true and 1 are not."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _api_error(error: ValidationError) -> ApiError:
    """Return the first fault of a request."""
    fault = error.errors(include_url=False)[0]
    param = ""
    for step in fault["loc"]:
        param += f"[{step}]" if isinstance(step, int) else f".{step}" if param else str(step)
    kind, value = fault["type"], fault["input"]
    if kind == "missing":
        return ApiError(f"{param} is required", param, "missing_required_parameter")
    if kind == "extra_forbidden":
        return ApiError(f"{param} is not a parameter of this endpoint", param, "unknown_parameter")
    message = fault["msg"].removeprefix("Value error, ")
    if kind == "model_type":
        message = "Input should be an object"
    code = "invalid_type" if kind.endswith(("_type", "_parsing")) else "invalid_value"
    for bound, name in (("greater_than", "below_min_value"), ("less_than", "above_max_value")):
        if kind.startswith(bound):
            code = f"{'integer' if isinstance(value, int) else 'decimal'}_{name}"
    if not param:
        return ApiError(
            message, next((word for word in message.split() if word in ChatRequest.model_fields), None), code
        )
    shown = f" (got {value!r:.{_SHOWN}})" if isinstance(value, (str, int, float)) else ""
    return ApiError(f"{param}: {message}{shown}", param, code)
