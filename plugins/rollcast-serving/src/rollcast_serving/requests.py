"""Checks of a request against a model's limits, with the same messages in every rollout."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollcast.contracts.rollout import RolloutCapabilities, RolloutRequest
from rollcast.errors import CapabilityError, RequestError

__all__ = ["ModelLimits", "as_tokens", "check_request"]


def as_tokens(ids: Iterable[int]) -> array[int]:
    """Return token ids as an int32 array; one that is int32 already is returned itself, numpy's is not taken apart.

    Raises:
        TypeError: a value is no integer.
        OverflowError: a value does not fit into int32.
    """
    if isinstance(ids, array) and ids.typecode == "i":
        return ids
    if not isinstance(ids, array) and not hasattr(ids, "__array__"):
        return array("i", ids)
    values = np.asarray(ids)
    if values.dtype.kind not in "iu" or values.ndim != 1:
        raise TypeError(f"an array of {values.dtype} with {values.ndim} dimensions is no row of token ids")
    narrow = values.astype(np.int32)
    if not np.array_equal(narrow, values):
        raise OverflowError("a token id does not fit into int32")
    return array("i", narrow.tobytes())


@dataclass(frozen=True)
class ModelLimits:
    """Limits of a model.

    Attributes:
        vocab_size: token ids are below it.
        max_positions: largest number of prompt and response tokens; None if unknown.
        key: name of the setting behind ``max_positions``, for messages.
    """

    vocab_size: int
    max_positions: int | None
    key: str = "max_position_embeddings"

    @classmethod
    def of(cls, config: Any) -> ModelLimits:
        """Return the limits that a transformers config states."""
        text = config.get_text_config()
        return cls(int(text.vocab_size), getattr(text, "max_position_embeddings", None))


def check_request(
    request: RolloutRequest, limits: ModelLimits, capabilities: RolloutCapabilities | None = None
) -> array[int]:
    """Check a request and return its prompt's ids, int32.

    Args:
        request: request to check.
        limits: limits of the model.
        capabilities: features of the rollout; None for one without multi-modal data.

    Raises:
        CapabilityError: the request carries multi-modal data, which the rollout does not take; names the request.
        RequestError: the model cannot serve the request; names the request and the problem.
    """
    if request.multi_modal_data and not (capabilities or RolloutCapabilities()).multi_modal:
        raise CapabilityError(
            f"request {request.request_id!r} carries multi_modal_data ({', '.join(sorted(request.multi_modal_data))}), "
            "but this rollout takes token ids only (capabilities.multi_modal); choose a rollout.name that takes it"
        )
    try:
        prompt = as_tokens(request.prompt_ids)
    except (TypeError, OverflowError) as error:
        raise RequestError(f"request {request.request_id!r}: prompt_ids are not token ids: {error}") from error
    problem = _sampling_problem(request) or _prompt_problem(prompt, request.sampling.max_tokens, limits)
    if problem is not None:
        raise RequestError(f"request {request.request_id!r}: {problem}")
    return prompt


def _sampling_problem(request: RolloutRequest) -> str | None:
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


def _prompt_problem(prompt: array[int], max_tokens: int, limits: ModelLimits) -> str | None:
    if not prompt:
        return "the prompt is empty"
    ids = np.frombuffer(prompt, np.int32)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= limits.vocab_size:
        wrong = low if low < 0 else high
        place = prompt.index(wrong)
        return f"token id {wrong} at prompt position {place} is not in the vocabulary of {limits.vocab_size} tokens"
    needed = len(prompt) + max_tokens
    if limits.max_positions is not None and needed > limits.max_positions:
        return (
            f"a prompt of {len(prompt)} tokens and {max_tokens} new ones need {needed} positions; "
            f"the model has {limits.max_positions} ({limits.key})"
        )
    return None
