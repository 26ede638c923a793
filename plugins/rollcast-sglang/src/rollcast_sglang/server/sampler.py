"""Sampling inside SGLang: log-probs of the sampled distribution, and a seed for each request."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler
from torch import Tensor

from rollcast_sglang.server.sampling import filter_probs, pick_tokens, uniform_numbers

__all__ = ["RequestSampler"]


class RequestSampler(Sampler):  # type: ignore[misc]  # SGLang is untyped
    """SGLang's sampler with another way to draw tokens.

    SGLang's own sampler reports log-probs from before top-k and top-p, applies both to the same distribution instead of
    one after the other, and draws from a generator that all requests share.
    """

    def _sample_from_probs(
        self, probs: Tensor, sampling_info: Any, positions: Tensor, simple_sampling_case: bool
    ) -> tuple[Tensor, None]:
        greedy = sampling_info.top_ks <= 1
        if not simple_sampling_case:
            # In place: the caller computes the log-probs from this tensor.
            filter_probs(probs, sampling_info.top_ks, sampling_info.top_ps, greedy)
        tokens = pick_tokens(probs, uniform_numbers(sampling_info.sampling_seed, positions))
        if sampling_info.is_any_greedy:
            tokens = torch.where(greedy, probs.argmax(-1), tokens)
        return tokens.to(torch.int32), None
