"""Formats of models' tool calls: parsing text to calls, with errors for the model if they are malformed."""
# ruff: noqa: RUF001, RUF002  # DeepSeek's markers are full-width

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from rollcast.contracts.renderer import ToolCall
from rollcast.errors import RendererError

__all__ = ["FORMATS", "Parsed", "tool_format"]


class Parsed(NamedTuple):
    """A reply's text without its well-formed calls, and its calls.

    Attributes:
        text: remaining text, including that of malformed calls.
        calls: calls in order, numbered by ``call_id``.
        reasoning: thinking, in formats that mark it.
    """

    text: str
    calls: tuple[ToolCall, ...]
    reasoning: str = ""


class _Found(NamedTuple):
    """A piece of text that contains calls."""

    start: int
    stop: int
    calls: tuple[ToolCall, ...]


Parse = Callable[[str], Parsed]


def tool_format(name: str) -> Parse:
    """Return the parser of a format.

    Raises:
        RendererError: the format does not exist; the message names those that do.
    """
    if name not in FORMATS:
        raise RendererError(f"agent.tool_format={name} is unknown; valid: {', '.join(FORMATS)}")
    return FORMATS[name]


# ---- shared ----


def _joined(text: str, found: Iterator[_Found]) -> Parsed:
    """Cut the well-formed calls out of the text and number all calls."""
    kept: list[str] = []
    calls: list[ToolCall] = []
    at = 0
    for piece in found:
        kept.append(text[at : piece.start])
        if any(call.error for call in piece.calls):
            kept.append(text[piece.start : piece.stop])
        calls += piece.calls
        at = piece.stop
    kept.append(text[at:])
    numbered = tuple(
        ToolCall(call.name, call.arguments, call.call_id or f"call_{number}", call.error)
        for number, call in enumerate(calls)
    )
    return Parsed("".join(kept).strip(), numbered)


def _from_json(body: str, arguments_key: str = "arguments") -> tuple[ToolCall, ...]:
    """Return the calls of a JSON object or list of objects with ``name`` and arguments."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        return (ToolCall("", error=f"The tool call is not valid JSON: {error}"),)
    return tuple(_from_mapping(each, arguments_key) for each in (value if isinstance(value, list) else [value]))


def _from_mapping(value: Any, arguments_key: str) -> ToolCall:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str) or not value["name"]:
        return ToolCall("", error='A tool call is a JSON object with "name" and "arguments".')
    arguments = value.get(arguments_key, value.get("arguments", value.get("parameters", {})))
    return _with_arguments(value["name"], arguments, str(value.get("id") or ""))


def _with_arguments(name: str, arguments: Any, call_id: str = "") -> ToolCall:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            return ToolCall(name, error=f"The arguments of {name} are not valid JSON: {error}", call_id=call_id)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        found = type(arguments).__name__
        return ToolCall(name, error=f"The arguments of {name} are a {found}; they must be an object.", call_id=call_id)
    return ToolCall(name, dict(arguments), call_id)


def _between(text: str, opening: str, closing: str) -> Iterator[tuple[int, int, str | None]]:
    """Yield start, end and body of each piece between the markers; the body of an unclosed piece is None."""
    at = text.find(opening)
    while at >= 0:
        stop = text.find(closing, at + len(opening))
        if stop < 0:
            yield at, len(text), None
            return
        yield at, stop + len(closing), text[at + len(opening) : stop]
        at = text.find(opening, stop + len(closing))


# ---- formats ----


def _hermes(text: str) -> Parsed:
    """Parse ``<tool_call>{"name": …, "arguments": …}</tool_call>`` (Hermes, Qwen2.5, Qwen3)."""

    def found() -> Iterator[_Found]:
        for start, stop, body in _between(text, "<tool_call>", "</tool_call>"):
            unclosed = (ToolCall("", error="The tool call is not closed by </tool_call>."),)
            yield _Found(start, stop, unclosed if body is None else _from_json(body))

    return _joined(text, found())


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\n?(.*?)\n?(?:</function>)\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _qwen3_coder(text: str) -> Parsed:
    """Parse ``<tool_call><function=f><parameter=x>…</parameter></function></tool_call>`` (Qwen3-Coder).

    Values that parse as JSON are JSON; others are text.
    """

    def found() -> Iterator[_Found]:
        for start, stop, body in _between(text, "<tool_call>", "</tool_call>"):
            match = _FUNCTION.fullmatch(body) if body is not None else None
            if match is None:
                message = (
                    "A tool call is <tool_call><function=NAME><parameter=KEY>…</parameter></function></tool_call>."
                )
                yield _Found(start, stop, (ToolCall("", error=message),))
                continue
            arguments = {key.strip(): _json_or_text(value) for key, value in _PARAMETER.findall(match[2])}
            yield _Found(start, stop, (ToolCall(match[1].strip(), arguments),))

    return _joined(text, found())


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _llama3_json(text: str) -> Parsed:
    """Parse ``{"name": …, "parameters": …}``, optionally after ``<|python_tag|>``, several joined by ``;`` (Llama
    3).
    """
    body = text.strip().removeprefix("<|python_tag|>").strip()
    marked = "<|python_tag|>" in text
    if not (marked or body.startswith("{")):
        return Parsed(text.strip(), ())
    decoder = json.JSONDecoder()
    calls: list[ToolCall] = []
    at = 0
    while at < len(body):
        try:
            value, at = decoder.raw_decode(body, at)
        except (ValueError, RecursionError) as error:
            calls.append(ToolCall("", error=f"The tool call is not valid JSON: {error}"))
            break
        calls.append(_from_mapping(value, "parameters"))
        while at < len(body) and body[at] in "; \n\t":
            at += 1
    return _joined(text, iter([_Found(0, len(text), tuple(calls))]))


def _llama3_pythonic(text: str) -> Parsed:
    """Parse ``[f(x=1), g(y="a")]`` with literal arguments (Llama 3.2 and 4)."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not body.startswith("["):
        return Parsed(text.strip(), ())
    try:
        tree = ast.parse(body, mode="eval").body
        if not isinstance(tree, ast.List):
            raise ValueError("it is not a list")  # handled below, like a syntax error
        calls = tuple(_from_python(call) for call in tree.elts)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        calls = (ToolCall("", error=f"The tool calls are not a list of Python calls: {error}"),)
    return _joined(text, iter([_Found(0, len(text), calls)]))


def _from_python(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ValueError("an element is not a function call")
    name = ast.unparse(node.func)
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return ToolCall(name, error=f"The arguments of {name} must be given by name.")
    return ToolCall(name, {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords})


_MISTRAL_CALL = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*([\w-]+)\s*)?(?:\[ARGS\])?\s*(\{.*\})\s*", re.DOTALL)


def _mistral(text: str) -> Parsed:
    """Parse ``[TOOL_CALLS][{"name": …, "arguments": …}]`` and ``[TOOL_CALLS]f[ARGS]{…}`` (Mistral)."""
    start = text.find("[TOOL_CALLS]")
    if start < 0:
        return Parsed(text.strip(), ())
    body = text[start + len("[TOOL_CALLS]") :].strip()
    if body.startswith(("[", "{")):
        calls = _from_json(body)
    else:
        matches = [_MISTRAL_CALL.fullmatch(piece) for piece in body.split("[TOOL_CALLS]")]
        calls = tuple(
            ToolCall("", error="A tool call is [TOOL_CALLS]NAME[ARGS]{...}.")
            if match is None
            else _with_arguments(match[1], match[3], match[2] or "")
            for match in matches
        )
    return _joined(text, iter([_Found(start, len(text), calls)]))


_DEEPSEEK_BEGIN, _DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_BODY = re.compile(r"(?:function)?\s*<｜tool▁sep｜>\s*([^\n]+)\n```json\n(.*?)\n?```\s*", re.DOTALL)
_DEEPSEEK_V31 = re.compile(r"\s*([^\s<]+)\s*<｜tool▁sep｜>\s*(\{.*\})\s*", re.DOTALL)


def _deepseek(text: str) -> Parsed:
    """Parse DeepSeek's ``<｜tool▁call▁begin｜>``: fenced JSON (V3, R1), or the name before the separator (V3.1)."""

    def found() -> Iterator[_Found]:
        for start, stop, body in _between(text, _DEEPSEEK_BEGIN, _DEEPSEEK_END):
            match = None
            if body is not None:
                match = _DEEPSEEK_BODY.fullmatch(body.strip()) or _DEEPSEEK_V31.fullmatch(body.strip())
            if match is None:
                yield _Found(start, stop, (ToolCall("", error="The tool call is malformed."),))
            else:
                yield _Found(start, stop, (_with_arguments(match[1].strip(), match[2]),))

    text = text.replace("<｜tool▁calls▁begin｜>", "").replace("<｜tool▁calls▁end｜>", "")
    return _joined(text, found())


_HARMONY = re.compile(
    r"<\|channel\|>(\w+)(?:\s+to=([\w.\-]+))?(?:\s*<\|constrain\|>\s*\w+)?(?:\s+\w+)?<\|message\|>(.*?)"
    r"(?=<\|end\|>|<\|call\|>|<\|return\|>|<\|start\|>|\Z)",
    re.DOTALL,
)


def _gpt_oss(text: str) -> Parsed:
    """Parse harmony's channels: calls in ``commentary to=functions.f``, the answer in ``final`` (GPT-OSS)."""
    calls: list[ToolCall] = []
    kept: list[str] = []
    thoughts: list[str] = []
    messages = _HARMONY.findall(text)
    if not messages:
        return Parsed(text.strip(), ())
    for channel, recipient, body in messages:
        if recipient:
            call = _with_arguments(recipient.removeprefix("functions."), body.strip())
            calls.append(ToolCall(call.name, call.arguments, f"call_{len(calls)}", call.error))
            kept += [body] if call.error else []
        else:
            (thoughts if channel == "analysis" else kept).append(body)
    return Parsed("\n".join(kept).strip(), tuple(calls), "\n".join(thoughts).strip())


#: Parsers by format name; the names are those of verl and vLLM where they have one.
FORMATS: Mapping[str, Parse] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen3_coder,
    "llama3_json": _llama3_json,
    "pythonic": _llama3_pythonic,
    "mistral": _mistral,
    "deepseek": _deepseek,
    "gpt-oss": _gpt_oss,
    "none": lambda text: Parsed(text.strip(), ()),
}
