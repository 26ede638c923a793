"""Formats of models' tool calls: parsing text to calls, with errors for the model if they are malformed."""
# ruff: noqa: RUF001, RUF002, ARG001, ARG005  # DeepSeek's markers are full-width; all parsers have one signature

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from rollcast.errors import RendererError
from rollcast_data.chat_template import ToolCall, ToolSchema

__all__ = ["FORMATS", "Parsed", "arguments_by_schema", "tool_format", "tool_parameters"]


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


class Parse(Protocol):
    """A parser of a reply's text, given the tools that the model was offered."""

    def __call__(self, text: str, tools: Sequence[ToolSchema] = ()) -> Parsed: ...


def tool_format(name: str) -> Parse:
    """Return the parser of a format.

    Raises:
        RendererError: the format does not exist; the message names those that do.
    """
    if name not in FORMATS:
        raise RendererError(f"agent.tool_format={name} is unknown; valid: {', '.join(FORMATS)}")
    return FORMATS[name]


# ---- shared ----


def _joined(text: str, tool_calls: Iterator[_Found]) -> Parsed:
    """Cut the well-formed calls out of the text and number all calls."""
    texts: list[str] = []
    calls: list[ToolCall] = []
    at = 0
    for piece in tool_calls:
        texts.append(text[at : piece.start])
        if any(call.error for call in piece.calls):
            texts.append(text[piece.start : piece.stop])
        calls += piece.calls
        at = piece.stop
    texts.append(text[at:])
    numbered = tuple(
        ToolCall(call.name, call.arguments, call.call_id or f"call_{number}", call.error)
        for number, call in enumerate(calls)
    )
    return Parsed("".join(texts).strip(), numbered)


def _from_json(body: str, arguments_key: str = "arguments") -> tuple[ToolCall, ...]:
    """Return the calls of a JSON object or list of objects with ``name`` and arguments."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        return (ToolCall("", error=f"The tool call is not valid JSON: {error}"),)
    return tuple(_from_mapping(call, arguments_key) for call in (value if isinstance(value, list) else [value]))


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
        kind = type(arguments).__name__
        return ToolCall(name, error=f"The arguments of {name} are a {kind}; they must be an object.", call_id=call_id)
    return ToolCall(name, dict(arguments), call_id)


def tool_parameters(tools: Sequence[ToolSchema]) -> dict[str, Mapping[str, Any]]:
    """Return the schema of each tool's arguments by the tool's name."""
    functions = [tool.get("function", tool) for tool in tools]
    return {
        str(function.get("name")): function.get("parameters") or {} for function in functions if function.get("name")
    }


def _types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """Return JSON Schema's names of the types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return set()
    if isinstance(reference := schema.get("$ref"), str):
        node: Any = root
        for part in reference.removeprefix("#/").split("/"):
            node = node.get(part) if isinstance(node, Mapping) else None
        return _types(node, root, depth + 1)
    if "type" in schema:
        return {schema["type"]} if isinstance(schema["type"], str) else set(schema["type"])
    if "enum" in schema or "const" in schema:
        return set().union(*(_types_of(value) for value in schema.get("enum", [schema.get("const")])))
    parts = [part for key in ("anyOf", "oneOf", "allOf") for part in schema.get(key, ())]
    return set().union(*(_types(part, root, depth + 1) for part in parts))


def _types_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number", *(["integer"] if value.is_integer() else [])}
    kinds: Iterable[tuple[Any, str]] = ((str, "string"), (Mapping, "object"), (list, "array"), (type(None), "null"))
    return {name for kind, name in kinds if isinstance(value, kind)}


def _by_schema(text: str, types: set[str]) -> Any:
    """Return an argument that was written without quotes, as a value of a type that its schema allows.

    Text stays as it was written where the schema says string or nothing, and where it fits no other type.
    """
    others = types - {"string"}
    if not others:
        return text
    word = text.strip()
    values = [read(word) for read in (_read_word, _read_json, _read_literal)]
    return next((value for value in values if value is not _UNREAD and _types_of(value) & others), text)


def arguments_by_schema(texts: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that were written without quotes, as values of the types in their tool's schema.

    Args:
        texts: argument's name → its text; other values are unchanged.
        schema: schema of the tool's arguments.
    """
    own = schema.get("properties") or {}
    return {
        key: _by_schema(text, _types(own.get(key), schema)) if isinstance(text, str) else text
        for key, text in texts.items()
    }


_UNREAD = object()
_MAX_DEPTH = 20


def _read_word(word: str) -> Any:
    """Read Python's and JSON's names of booleans and null."""
    return {"true": True, "false": False, "null": None, "none": None}.get(word.lower(), _UNREAD)


def _read_json(word: str) -> Any:
    try:
        return json.loads(word)
    except (ValueError, RecursionError):
        return _UNREAD


def _read_literal(word: str) -> Any:
    """Read a Python literal, as chat templates write lists and objects without a JSON filter."""
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return _UNREAD


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


def _hermes(text: str, tools: Sequence[ToolSchema] = ()) -> Parsed:
    """Parse ``<tool_call>{"name": …, "arguments": …}</tool_call>`` (Hermes, Qwen2.5, Qwen3)."""

    def calls() -> Iterator[_Found]:
        for start, stop, body in _between(text, "<tool_call>", "</tool_call>"):
            unclosed = (ToolCall("", error="The tool call is not closed by </tool_call>."),)
            yield _Found(start, stop, unclosed if body is None else _from_json(body))

    return _joined(text, calls())


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\n?(.*?)\n?(?:</function>)\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _qwen3_coder(text: str, tools: Sequence[ToolSchema] = ()) -> Parsed:
    """Parse ``<tool_call><function=f><parameter=x>…</parameter></function></tool_call>`` (Qwen3-Coder).

    The format writes text without quotes, so the tool's schema decides about the type of each argument.
    """
    schemas = tool_parameters(tools)

    def calls() -> Iterator[_Found]:
        for start, stop, body in _between(text, "<tool_call>", "</tool_call>"):
            match = _FUNCTION.fullmatch(body) if body is not None else None
            if match is None:
                message = (
                    "A tool call is <tool_call><function=NAME><parameter=KEY>…</parameter></function></tool_call>."
                )
                yield _Found(start, stop, (ToolCall("", error=message),))
                continue
            name = match[1].strip()
            texts = {key.strip(): value for key, value in _PARAMETER.findall(match[2])}
            yield _Found(start, stop, (ToolCall(name, arguments_by_schema(texts, schemas.get(name, {}))),))

    return _joined(text, calls())


_LLAMA_BEGIN = re.compile(r'\{\s*"name"\s*:\s*"([^"]*)"\s*,\s*"(?:parameters|arguments)"')
_LLAMA_KEYS = frozenset({"name", "parameters", "arguments", "type", "id"})


def _llama3_json(text: str, tools: Sequence[ToolSchema] = ()) -> Parsed:
    """Parse ``{"name": …, "parameters": …}``, optionally after ``<|python_tag|>``, several joined by ``;`` (Llama
    3).

    Without the marker, an object is a call only if it names a tool and has a call's keys: an answer may be JSON too.
    """
    body = text.strip().removeprefix("<|python_tag|>").strip()
    known = tool_parameters(tools)
    if "<|python_tag|>" not in text and not _is_llama_call(body, known):
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


def _is_llama_call(body: str, known: Collection[str]) -> bool:
    """Return True if text without a marker is a call of a known tool, perhaps a malformed one."""
    try:
        value, _ = json.JSONDecoder().raw_decode(body)
    except (ValueError, RecursionError):
        begin = _LLAMA_BEGIN.match(body)
        return begin is not None and begin[1] in known
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in known:
        return False
    return not set(value) - _LLAMA_KEYS and ("parameters" in value or "arguments" in value)


_PYTHON_BEGIN = re.compile(r"\[\s*([A-Za-z_][\w.]*)\s*\(")


def _llama3_pythonic(text: str, tools: Sequence[ToolSchema] = ()) -> Parsed:
    """Parse ``[f(x=1), g(y="a")]`` with literal arguments (Llama 3.2 and 4).

    Without the marker ``<|python_tag|>``, a list is one of calls only if its first element calls a known tool: an
    answer may be a list too.
    """
    body = text.strip().removeprefix("<|python_tag|>").strip()
    begin = _PYTHON_BEGIN.match(body)
    if "<|python_tag|>" not in text and (begin is None or begin[1] not in tool_parameters(tools)):
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
    literals = _JsonNames()
    return ToolCall(
        name, {str(keyword.arg): ast.literal_eval(literals.visit(keyword.value)) for keyword in node.keywords}
    )


class _JsonNames(ast.NodeTransformer):
    """Replacement of JSON's ``true``, ``false`` and ``null`` by Python's constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        values = {"true": True, "false": False, "null": None}
        return ast.Constant(values[node.id]) if node.id in values else node


_MISTRAL_CALL = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*([\w-]+)\s*)?(?:\[ARGS\])?\s*(\{.*\})\s*", re.DOTALL)


def _mistral(text: str, tools: Sequence[ToolSchema] = ()) -> Parsed:
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


def _deepseek(text: str, tools: Sequence[ToolSchema] = ()) -> Parsed:
    """Parse DeepSeek's ``<｜tool▁call▁begin｜>``: fenced JSON (V3, R1), or the name before the separator (V3.1)."""

    def calls() -> Iterator[_Found]:
        for start, stop, body in _between(text, _DEEPSEEK_BEGIN, _DEEPSEEK_END):
            match = None
            if body is not None:
                match = _DEEPSEEK_BODY.fullmatch(body.strip()) or _DEEPSEEK_V31.fullmatch(body.strip())
            if match is None:
                yield _Found(start, stop, (ToolCall("", error="The tool call is malformed."),))
            else:
                yield _Found(start, stop, (_with_arguments(match[1].strip(), match[2]),))

    text = text.replace("<｜tool▁calls▁begin｜>", "").replace("<｜tool▁calls▁end｜>", "")
    return _joined(text, calls())


_HARMONY = re.compile(
    r"<\|channel\|>(\w+)(?:\s+to=([\w.\-]+))?(?:\s*<\|constrain\|>\s*\w+)?(?:\s+\w+)?<\|message\|>(.*?)"
    r"(?=<\|end\|>|<\|call\|>|<\|return\|>|<\|start\|>|\Z)",
    re.DOTALL,
)


def _gpt_oss(text: str, tools: Sequence[ToolSchema] = ()) -> Parsed:
    """Parse harmony's channels: calls in ``commentary to=functions.f``, the answer in ``final`` (GPT-OSS)."""
    calls: list[ToolCall] = []
    texts: list[str] = []
    thoughts: list[str] = []
    messages = _HARMONY.findall(text)
    if not messages:
        return Parsed(text.strip(), ())
    for channel, recipient, body in messages:
        if recipient:
            call = _with_arguments(recipient.removeprefix("functions."), body.strip())
            calls.append(ToolCall(call.name, call.arguments, f"call_{len(calls)}", call.error))
            texts += [body] if call.error else []
        else:
            (thoughts if channel == "analysis" else texts).append(body)
    return Parsed("\n".join(texts).strip(), tuple(calls), "\n".join(thoughts).strip())


#: Parsers by format name; the names are those of verl and vLLM where they have one.
FORMATS: Mapping[str, Parse] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen3_coder,
    "llama3_json": _llama3_json,
    "pythonic": _llama3_pythonic,
    "mistral": _mistral,
    "deepseek": _deepseek,
    "gpt-oss": _gpt_oss,
    "none": lambda text, tools=(): Parsed(text.strip(), ()),
}
