"""Conversion of sampling parameters and sequences between the rollout contract and vLLM."""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from rollcast.contracts.rollout import RolloutRequest, RolloutSequence
from rollcast.errors import RequestError, RolloutError
from rollcast_serving.engines.routing import RecordedLayers
from rollcast_serving.stops import StopMatcher, count_until_stop

__all__ = [
    "SMALLEST_TEMPERATURE",
    "SequenceReader",
    "build_params",
    "check_temperature",
    "read_sequence",
    "spread_seed",
    "states_versions",
]

#: Smallest temperature that vLLM supports; it raises smaller ones to this value.
SMALLEST_TEMPERATURE = 0.01


def check_temperature(request: RolloutRequest) -> None:
    """Check that vLLM would not silently change the temperature.

    Raises:
        RequestError: it is between 0 and :data:`SMALLEST_TEMPERATURE`.
    """
    temperature = request.sampling.temperature
    if 0 < temperature < SMALLEST_TEMPERATURE:
        raise RequestError(
            f"request {request.request_id!r}: temperature is {temperature}; vLLM samples with "
            f"{SMALLEST_TEMPERATURE} or more, or greedily with 0"
        )


def spread_seed(seed: int) -> int:
    """Return a seed below 2**62 whose sums with sequence numbers, which vLLM adds, do not collide between
    neighbours.
    """
    digest = hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def build_params(request: RolloutRequest, stop_ids: Sequence[int], seed: int | None, number: int | None = None) -> Any:
    """Return vLLM's ``SamplingParams`` that return the sampled tokens with their log-probs.

    Args:
        request: request to send.
        stop_ids: all ids that end a sequence; vLLM adds none of its own.
        seed: seed of the request, or None for the engine's.
        number: index of the sequence to sample alone, with an output per step; None samples all, with one final output.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    return SamplingParams(
        n=sampling.n if number is None else 1,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(sampling.top_k, 0),
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        max_tokens=sampling.max_tokens,
        # vLLM itself adds a sequence's number when it samples several.
        seed=None if seed is None else spread_seed(seed) + (number or 0),
        stop_token_ids=list(stop_ids),
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY if number is None else RequestOutputKind.DELTA,
    )


class SequenceReader:
    """One sequence, assembled from vLLM's outputs, up to a stop string.

    Args:
        request: request that the sequence answers.
        matcher: matcher of the request's stop strings; None without any.
        layers: layers whose routers' choices are recorded; None for none.
    """

    def __init__(
        self, request: RolloutRequest, matcher: StopMatcher | None = None, layers: RecordedLayers | None = None
    ) -> None:
        self._request, self._matcher, self._layers = request, matcher, layers
        self._routed: Any = None
        self._tokens, self._log_probs, self._versions = array("i"), array("f"), array("q")
        self._reason: str | None = None
        self._kept: int | None = None

    @property
    def is_over(self) -> bool:
        """True once vLLM has ended the sequence."""
        return self._reason is not None

    @property
    def has_stopped(self) -> bool:
        """True once a stop string is complete; the caller must then make vLLM end the sequence."""
        return self._kept is not None

    def add(self, completion: Any, version: int | None = None) -> None:
        """Add the tokens of a ``CompletionOutput``.

        Args:
            completion: the output.
            version: weight version of all its tokens; None for the versions that it states.
        """
        tokens = array("i", completion.token_ids)
        if self._matcher is not None and self._kept is None:
            count = count_until_stop(self._matcher, tokens)
            self._kept = None if count is None else len(self._tokens) + count
        self._tokens += tokens
        if tokens:
            self._log_probs += array("f", completion.logprobs.logprobs)
        self._reason = completion.finish_reason
        self._routed = completion.routed_experts  # only in the last output
        if version is not None:
            self._versions += array("q", [version]) * len(tokens)
            return
        for span in completion.weight_versions or ():  # only in the last output
            self._versions += array("q", [int(span.version)]) * (span.end - span.start)

    def sequence(self) -> RolloutSequence:
        """Return the sequence; call it when it is over.

        Raises:
            RolloutError: vLLM failed, or returned fewer log-probs, versions or choices of routers than tokens.
        """
        counts = [len(part) for part in (self._tokens, self._log_probs, self._versions)]
        reason = self._reason
        if reason not in {"stop", "length", "abort"} or len(set(counts)) > 1:
            raise RolloutError(
                f"request {self._request.request_id!r}: vLLM answered with finish reason {reason!r}, {counts[0]} "
                f"tokens, {counts[1]} log-probs and {counts[2]} weight versions"
            )
        kept_tokens, end = self._kept, "stop" if self.has_stopped else reason
        tokens, log_probs, versions = (
            self._tokens[:kept_tokens],
            self._log_probs[:kept_tokens],
            self._versions[:kept_tokens],
        )
        routed = None if self._layers is None or not tokens else self._choices(len(tokens), self._layers)
        return RolloutSequence(tokens, log_probs, cast(Literal["stop", "length", "abort"], end), versions, routed)

    def _choices(self, new: int, layers: RecordedLayers) -> NDArray[np.int16]:
        request_id, count = self._request.request_id, len(self._request.prompt_ids) + new
        if self._routed is None:
            raise RolloutError(f"request {request_id!r}: vLLM returned no experts for its {count} tokens")
        return layers.select(self._routed, count, request_id)


def states_versions() -> bool:
    """Return True if vLLM's outputs state the weight version of each token, as since 0.32."""
    from vllm.outputs import CompletionOutput

    return any(field.name == "weight_versions" for field in dataclasses.fields(CompletionOutput))


def read_sequence(
    request: RolloutRequest, completion: Any, layers: RecordedLayers | None = None, version: int | None = None
) -> RolloutSequence:
    """Return the sequence of a final ``CompletionOutput``; takes and raises the same as :class:`SequenceReader`."""
    reader = SequenceReader(request, layers=layers)
    reader.add(completion, version)
    return reader.sequence()
