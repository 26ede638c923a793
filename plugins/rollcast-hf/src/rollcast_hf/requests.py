"""Requests on their way: checked, queued, and turned into outputs."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollcast.contracts.rollout import RolloutOutput, RolloutRequest, RolloutSequence
from rollcast_hf.decoding import DecodedRow, DecodeRow
from rollcast_hf.errors import RequestError

__all__ = ["Job", "ModelLimits", "admit"]


@dataclass(frozen=True)
class ModelLimits:
    """What a model can take: ids below ``vocab_size``, and positions (None: no limit is known)."""

    vocab_size: int
    max_positions: int | None

    @classmethod
    def of(cls, config: Any) -> ModelLimits:
        """The limits that a transformers config states."""
        text = config.get_text_config()
        return cls(int(text.vocab_size), getattr(text, "max_position_embeddings", None))


@dataclass(eq=False)
class Job:
    """A request in the queue or under way, and the future that its caller waits for."""

    request: RolloutRequest
    row: DecodeRow
    future: asyncio.Future[RolloutOutput] = field(repr=False)
    is_aborted: bool = False

    @property
    def rows(self) -> int:
        """How many sequences it asks for."""
        return self.request.sampling.n

    def finish(self, decoded: Sequence[DecodedRow]) -> None:
        """Hand the sequences over, unless the caller has gone."""
        sequences = [RolloutSequence(row.token_ids, row.log_probs, row.finish_reason, row.versions) for row in decoded]
        if not self.future.done():
            self.future.set_result(RolloutOutput(self.request.request_id, sequences, self.request.sampling))

    def fail(self, error: Exception) -> None:
        """Hand an error over, unless the caller has gone."""
        if not self.future.done():
            self.future.set_exception(error)

    def abort(self) -> None:
        """Hand over that nothing was generated."""
        self.finish([DecodedRow([], [], [], "abort")] * self.rows)


def admit(request: RolloutRequest, limits: ModelLimits, eos_token_id: int) -> DecodeRow:
    """Check a request, and give the row that each of its sequences starts from.

    Raises:
        RequestError: it cannot be served; says which request, and what is wrong.
    """
    complaint = _complain_about_sampling(request)
    if complaint is None:
        try:
            prompt = array("q", request.prompt_ids)
        except (TypeError, OverflowError) as error:
            raise RequestError(f"request {request.request_id!r}: prompt_ids are not token ids: {error}") from error
        complaint = _complain_about_prompt(prompt, request.sampling.max_tokens, limits)
    if complaint is not None:
        raise RequestError(f"request {request.request_id!r}: {complaint}")
    stops = request.sampling.stop_token_ids
    return DecodeRow(prompt, request.sampling, tuple(stops) if request.sampling.ignore_eos else (*stops, eos_token_id))


def _complain_about_sampling(request: RolloutRequest) -> str | None:
    sampling = request.sampling
    if sampling.n < 1:
        return f"n is {sampling.n}, which is not at least 1"
    if sampling.max_tokens < 1:
        return f"max_tokens is {sampling.max_tokens}, which is not at least 1"
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        return f"temperature is {sampling.temperature}, which is not 0 (greedy) or above"
    if not 0 < sampling.top_p <= 1:
        return f"top_p is {sampling.top_p}, which is not in (0, 1]"
    if sampling.top_k < -1:
        return f"top_k is {sampling.top_k}, which is not a number of candidates, or -1 or 0 for all"
    return None


def _complain_about_prompt(prompt: array[int], max_tokens: int, limits: ModelLimits) -> str | None:
    if not prompt:
        return "the prompt is empty"
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= limits.vocab_size:
        wrong = low if low < 0 else high
        return (
            f"token id {wrong} at prompt position {prompt.index(wrong)} is not in the vocabulary "
            f"of {limits.vocab_size} tokens"
        )
    if limits.max_positions is not None and len(prompt) + max_tokens > limits.max_positions:
        return (
            f"a prompt of {len(prompt)} tokens and {max_tokens} new ones need {len(prompt) + max_tokens} positions; "
            f"the model has {limits.max_positions} (max_position_embeddings)"
        )
    return None
