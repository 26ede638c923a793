"""Between the contract's sampling parameters and sequences, and vLLM's."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal, cast

from rollcast.contracts.rollout import RolloutRequest, RolloutSequence
from rollcast.errors import RequestError, RolloutError

__all__ = ["SMALLEST_TEMPERATURE", "build_params", "check_temperature", "read_sequence", "spread_seed"]

#: vLLM samples with this temperature where a smaller one is asked for.
SMALLEST_TEMPERATURE = 0.01


def check_temperature(request: RolloutRequest) -> None:
    """Refuse what vLLM would silently sample with another temperature.

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
    """A seed below 2**62 for vLLM, which adds a sequence's number to it: seeds of neighbours must not meet."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def build_params(request: RolloutRequest, stop_ids: Sequence[int], seed: int | None) -> Any:
    """Return vLLM's ``SamplingParams`` for one final output with the sampled tokens' log-probs.

    Args:
        request: request to send.
        stop_ids: every id that ends a sequence; vLLM adds none of its own.
        seed: seed of the request, or None for the engine's.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    return SamplingParams(
        n=sampling.n,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(sampling.top_k, 0),
        max_tokens=sampling.max_tokens,
        seed=None if seed is None else spread_seed(seed),
        stop_token_ids=list(stop_ids),
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def read_sequence(request_id: str, completion: Any) -> RolloutSequence:
    """A finished ``CompletionOutput`` as the contract's sequence.

    Raises:
        RolloutError: vLLM failed at it, or gave fewer log-probs or versions than tokens.
    """
    tokens = list(completion.token_ids)
    log_probs = list(completion.logprobs.logprobs) if tokens else []
    versions: list[int] = []
    for span in completion.weight_versions or ():
        versions += [int(span.version)] * (span.end - span.start)
    reason = completion.finish_reason
    if reason not in {"stop", "length", "abort"} or not len(tokens) == len(log_probs) == len(versions):
        raise RolloutError(
            f"request {request_id!r}: vLLM answered with finish reason {reason!r}, {len(tokens)} tokens, "
            f"{len(log_probs)} log-probs and {len(versions)} weight versions"
        )
    return RolloutSequence(tokens, log_probs, cast(Literal["stop", "length", "abort"], reason), versions)
