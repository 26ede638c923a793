"""Retries of clients: a request that a client repeats gets the answer that was sampled the first time.

Only the client's headers say that a request is a retry: ``Idempotency-Key`` names the request, and
``x-stainless-retry-count`` of OpenAI's clients counts its attempts. Equal requests without them are samples of their
own, such as the candidates of best-of-n.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from rollcast_serving.openai_errors import ApiError

__all__ = ["Answer", "Answers", "is_gone"]

_RETRY = "x-stainless-retry-count"
_KEY = "Idempotency-Key"


@dataclass(eq=False)
class Answer:
    """A request that is being answered, kept for retries.

    Attributes:
        task: samples the answer; continues if the client disconnects.
        body: fingerprint of the request.
        key: value of the header ``Idempotency-Key``; empty without one.
        attempt: number of the client's last attempt, from 0.
        request: the client's last attempt.
        delivered: True once the whole answer was sent to the client's last attempt.
    """

    task: asyncio.Task[dict[str, Any]]
    body: str
    key: str
    attempt: int
    request: web.Request
    delivered: bool = False

    @property
    def is_broken(self) -> bool:
        """True if sampling failed."""
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    @property
    def is_lost(self) -> bool:
        """True if the client disconnected before the answer was sent."""
        return not self.delivered and is_gone(self.request)


class Answers:
    """The answers of one session."""

    def __init__(self) -> None:
        self._answers: list[Answer] = []

    def find_or_start(
        self, request: web.Request, body: Mapping[str, Any], sample: Callable[[], Awaitable[dict[str, Any]]]
    ) -> Answer:
        """Return the answer that a retry repeats, or start a new one.

        Args:
            request: HTTP request.
            body: its body.
            sample: samples an answer.

        Raises:
            ApiError: the request has the key of a request with another body.
        """
        text = json.dumps([request.path, body], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        key, attempt = request.headers.get(_KEY, ""), _attempt_of(request)
        self._answers = [answer for answer in self._answers if not answer.is_broken]
        known = self._named(key, digest) if key else self._repeated(digest, attempt)
        if known is None:
            known = Answer(asyncio.ensure_future(sample()), digest, key, attempt, request)
            self._answers.append(known)
        known.attempt, known.request, known.delivered = attempt, request, False
        return known

    def cancel(self) -> None:
        """Interrupt sampling."""
        for answer in self._answers:
            answer.task.cancel()

    def _named(self, key: str, digest: str) -> Answer | None:
        known = next((answer for answer in self._answers if answer.key == key), None)
        if known is not None and known.body != digest:
            raise ApiError(f"the {_KEY} {key!r} was used by a request with another body", code="idempotency_key_in_use")
        return known

    def _repeated(self, digest: str, attempt: int) -> Answer | None:
        """Return the answer that an earlier attempt was waiting for; None for a first attempt.

        Several requests may be equal. An answer that no client has read can go to any of their retries, but to one
        only. An answer that was sent is repeated only if the retry can mean no other.
        """
        before = [
            answer for answer in self._answers if answer.body == digest and answer.attempt < attempt and not answer.key
        ]
        lost = next((answer for answer in before if answer.is_lost), None)
        return lost or (before[0] if len(before) == 1 else None)


def is_gone(request: web.Request) -> bool:
    """True if the client of a request has disconnected."""
    return request.transport is None or request.transport.is_closing()


def _attempt_of(request: web.Request) -> int:
    """Return the number of a client's attempt, from 0."""
    text = request.headers.get(_RETRY, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0
