"""What a model can take, and requests held against it; the same for every rollout."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from typing import Any

from rollcast.contracts.rollout import RolloutRequest
from rollcast.errors import RequestError

__all__ = ["ModelLimits", "check_request"]


@dataclass(frozen=True)
class ModelLimits:
    """What a model can take: ids below ``vocab_size``, and positions (None: no limit is known).

    ``key`` names what sets the positions, for the message.
    """

    vocab_size: int
    max_positions: int | None
    key: str = "max_position_embeddings"

    @classmethod
    def of(cls, config: Any) -> ModelLimits:
        """The limits that a transformers config states."""
        text = config.get_text_config()
        return cls(int(text.vocab_size), getattr(text, "max_position_embeddings", None))


def check_request(request: RolloutRequest, limits: ModelLimits) -> array[int]:
    """Refuse a request that a model cannot serve.

    Returns:
        The prompt's ids.

    Raises:
        RequestError: says which request, and what is wrong.
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
    return prompt


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
    if request.seed is not None and not 0 <= request.seed < 2**63:
        return f"seed is {request.seed}, which is not 0 to 2**63 - 1"
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
            f"the model has {limits.max_positions} ({limits.key})"
        )
    return None
