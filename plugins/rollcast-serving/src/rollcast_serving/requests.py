"""Checks of a request against a model's limits, with the same messages in every rollout."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rollcast.contracts.rollout import RolloutCapabilities, RolloutRequest, SamplingParams
from rollcast.contracts.sections import RolloutConfig
from rollcast.errors import CapabilityError, ConfigError, RequestError

__all__ = [
    "OPTIONAL_SAMPLING",
    "SAMPLING_KEYS",
    "ModelLimits",
    "as_tokens",
    "check_request",
    "check_sampling",
    "check_token_ids",
    "configured_sampling",
    "cut_keys",
    "fit_request",
]

#: Sampling parameters that only some rollouts support; see ``RolloutCapabilities.sampling``.
OPTIONAL_SAMPLING = frozenset({"min_p", "repetition_penalty", "logit_bias"})
#: Keys of the ``rollout`` section that affect sampling.
SAMPLING_KEYS = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias"),
    *("stop", "stop_token_ids", "ignore_eos", "on_long_prompt"),
)
#: Maximum absolute bias; vLLM clips larger ones.
_MAX_BIAS = 100.0
_MAX_PENALTY = 10.0


def as_tokens(ids: Iterable[int]) -> array[int]:
    """Return token ids as an int32 array; an int32 array is returned as is, and a numpy array is converted at once.

    Raises:
        TypeError: a value is not an integer.
        OverflowError: a value does not fit into int32.
    """
    if isinstance(ids, array) and ids.typecode == "i":
        return ids
    if not isinstance(ids, array) and not hasattr(ids, "__array__"):
        return array("i", ids)
    values = np.asarray(ids)
    if values.dtype.kind not in "iu" or values.ndim != 1:
        raise TypeError(f"an array of {values.dtype} with {values.ndim} dimensions is not a row of token ids")
    narrow = values.astype(np.int32)
    if not np.array_equal(narrow, values):
        raise OverflowError("a token id does not fit into int32")
    return array("i", narrow.tobytes())


@dataclass(frozen=True)
class ModelLimits:
    """Limits of a model.

    Attributes:
        vocab_size: size of the vocabulary; token ids are below it.
        max_positions: maximum number of prompt and response tokens; None if unknown.
        key: name of the setting behind ``max_positions``, for messages.
    """

    vocab_size: int
    max_positions: int | None
    key: str = "max_position_embeddings"

    @classmethod
    def of(cls, config: Any) -> ModelLimits:
        """Return the limits in a transformers config."""
        text = config.get_text_config()
        return cls(int(text.vocab_size), getattr(text, "max_position_embeddings", None))


def configured_sampling(rollout: RolloutConfig, max_tokens: int, validation: bool = False) -> SamplingParams:
    """Return the sampling parameters of the ``rollout`` section.

    Args:
        rollout: config section.
        max_tokens: maximum number of new tokens.
        validation: True for the sampling of ``rollout.val_kwargs``, with the section's stops and bias.
    """
    chosen = rollout.val_kwargs if validation else rollout
    return SamplingParams(
        temperature=chosen.temperature,
        top_p=chosen.top_p,
        top_k=chosen.top_k,
        max_tokens=max_tokens,
        stop_token_ids=tuple(rollout.stop_token_ids),
        stop=tuple(rollout.stop),
        ignore_eos=rollout.ignore_eos,
        min_p=chosen.min_p,
        repetition_penalty=chosen.repetition_penalty,
        logit_bias=tuple(sorted((int(token), float(bias)) for token, bias in rollout.logit_bias.items())),
    )


def cut_keys(sampling: SamplingParams) -> list[str]:
    """Return the keys that make the sampled distribution differ from the model's at the sampling temperature."""
    cuts = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0}
    return [*(name for name, applies in cuts.items() if applies), *sampling.optional()]


def check_sampling(what: str, sampling: SamplingParams, capabilities: RolloutCapabilities) -> None:
    """Check that a rollout supports the sampling parameters.

    Args:
        what: name of the request or section, for the message.
        sampling: requested parameters.
        capabilities: features of the rollout.

    Raises:
        CapabilityError: a parameter is set that is not among ``capabilities.sampling``; the message names it.
    """
    absent = [name for name in sampling.optional() if name not in capabilities.sampling]
    if absent:
        has = ", ".join(sorted(capabilities.sampling)) or "none"
        raise CapabilityError(
            f"{what} sets {', '.join(f'{name}={getattr(sampling, name)}' for name in absent)}, which this rollout does "
            f"not support (capabilities.sampling: {has}); remove it, or choose a rollout.name that supports it"
        )


def check_token_ids(rollout: RolloutConfig, model_path: str, section: str = "rollout") -> None:
    """Check that the token ids of a ``rollout`` section are in the vocabulary of the model.

    A model without a readable ``config.json`` passes; what loads it reports the fault.

    Args:
        rollout: config section.
        model_path: folder of the model.
        section: name of the section, for the message.

    Raises:
        ConfigError: an id is not in the vocabulary; the message names the key.
    """
    try:
        content = json.loads((Path(model_path).expanduser() / "config.json").read_text(encoding="utf-8"))
        vocab_size = (content.get("text_config") or content).get("vocab_size")
    except (OSError, ValueError, AttributeError, RecursionError):
        return
    problem = _vocabulary_problem(configured_sampling(rollout, 1), vocab_size) if type(vocab_size) is int else None
    if problem is not None:
        raise ConfigError(f"{section}.{problem} (vocab_size in {model_path}); remove the id")


def fit_request(request: RolloutRequest, limits: ModelLimits, on_long_prompt: str) -> RolloutRequest:
    """Return the request with ``max_tokens`` limited to the positions that its prompt leaves, if the run wants that.

    Args:
        request: request to fit.
        limits: limits of the model.
        on_long_prompt: value of ``rollout.on_long_prompt``: ``refuse`` returns the request unchanged, ``clamp`` lowers
            ``max_tokens``. A prompt that leaves no position is unchanged too; :func:`check_request` refuses it.
    """
    if on_long_prompt != "clamp" or limits.max_positions is None:
        return request
    room = limits.max_positions - len(request.prompt_ids)
    if room < 1 or room >= request.sampling.max_tokens:
        return request
    return replace(request, sampling=replace(request.sampling, max_tokens=room))


def check_request(
    request: RolloutRequest, limits: ModelLimits, capabilities: RolloutCapabilities | None = None
) -> array[int]:
    """Check a request and return its prompt's ids, int32.

    Args:
        request: request to check.
        limits: limits of the model.
        capabilities: features of the rollout; None for no optional features.

    Raises:
        CapabilityError: the request has multi-modal data or a sampling parameter that the rollout does not support; the
            message names the request.
        RequestError: the model cannot serve the request; the message names the request and the problem.
    """
    capabilities = capabilities or RolloutCapabilities()
    check_sampling(f"request {request.request_id!r}", request.sampling, capabilities)
    if request.multi_modal_data and not capabilities.multi_modal:
        raise CapabilityError(
            f"request {request.request_id!r} carries multi_modal_data ({', '.join(sorted(request.multi_modal_data))}), "
            "but this rollout takes token ids only (capabilities.multi_modal); choose one that supports it"
        )
    try:
        prompt = as_tokens(request.prompt_ids)
    except (TypeError, OverflowError) as error:
        raise RequestError(f"request {request.request_id!r}: prompt_ids are not token ids: {error}") from error
    problem = (
        _sampling_problem(request)
        or _optional_problem(request.sampling)
        or _vocabulary_problem(request.sampling, limits.vocab_size)
        or _prompt_problem(prompt, request.sampling.max_tokens, limits)
    )
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


def _vocabulary_problem(sampling: SamplingParams, vocab_size: int) -> str | None:
    """Return the problem of a token id that the model does not have; None if there is none."""
    keys = {"stop_token_ids": sampling.stop_token_ids, "logit_bias": [token for token, _ in sampling.logit_bias]}
    for key, ids in keys.items():
        outside = next((token for token in ids if not 0 <= token < vocab_size), None)
        if outside is not None:
            return f"{key} names token id {outside}, and the vocabulary has {vocab_size} tokens"
    return None


def _optional_problem(sampling: SamplingParams) -> str | None:
    if not 0 <= sampling.min_p <= 1:
        return f"min_p is {sampling.min_p}, which is not in [0, 1]"
    if not (math.isfinite(sampling.repetition_penalty) and 0 < sampling.repetition_penalty <= _MAX_PENALTY):
        return f"repetition_penalty is {sampling.repetition_penalty}, which is not in (0, {_MAX_PENALTY:g}]"
    for token, bias in sampling.logit_bias:
        if not abs(bias) <= _MAX_BIAS:
            return f"logit_bias of token id {token} is {bias}, which is not in [-{_MAX_BIAS:g}, {_MAX_BIAS:g}]"
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
            f"the model has {limits.max_positions} ({limits.key}); lower data.max_response_length, or let responses to "
            "long prompts be shorter with rollout.on_long_prompt=clamp"
        )
    return None
