"""Bodies of requests of OpenAI's API: JSON objects, read strictly."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from rollcast_serving.openai_errors import ApiError

__all__ = ["MAX_BODY", "children", "parse_object", "read_object"]

#: Largest size of a request's body in bytes.
MAX_BODY = 64 * 2**20
_MAX_DEPTH = 100
_SHOWN = 80


async def read_object(request: web.Request) -> dict[str, Any]:
    """Return the JSON object of a request.

    Raises:
        ApiError: the body cannot be read, or is not a JSON object.
    """
    if "Content-Type" in request.headers and request.content_type != "application/json":
        raise ApiError(
            f"the content type is {request.content_type!r}; it has to be 'application/json'",
            code="unsupported_content_type",
            status=415,
        )
    try:
        return parse_object(await request.read())
    except web.RequestPayloadError as error:
        raise ApiError("the body cannot be read: it is incomplete, or not in its content encoding") from error


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object that a body is.

    Raises:
        ApiError: the body is not an object in JSON of RFC 8259 and UTF-8, names a key twice, or is nested too deeply.
    """
    try:
        value = json.loads(
            body.decode(), parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_without_duplicates
        )
        if b"\\u" in body:
            json.dumps(value, ensure_ascii=False).encode()  # refuses lone surrogates
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError("the body has to be a JSON object", code="invalid_json")
    level, depth = list(value.values()), 1
    while level:
        depth += 1
        level = [inner for outer in level for inner in children(outer)]
        if depth > _MAX_DEPTH:
            raise ApiError(f"the body is nested deeper than {_MAX_DEPTH} levels", code="invalid_json")
    return value


def children(value: Any) -> Sequence[Any]:
    """Return the values in a JSON object or array; none of another value."""
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:_SHOWN]} is too large")
    return value


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the key {twice[:_SHOWN]!r} twice")
    return value
