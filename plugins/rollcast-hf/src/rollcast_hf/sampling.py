"""Choosing the next token of every row, each row with its own sampling parameters.

Axes: ``B`` rows, ``V`` vocabulary, ``K`` candidates of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rollcast.contracts.rollout import SamplingParams

__all__ = ["Recipe", "TokenSampler", "choose_tokens", "draw_uniforms", "make_streams"]


class Recipe(NamedTuple):
    """The part of the sampling parameters that shapes the distribution; rows that share it go together."""

    temperature: float
    top_p: float
    top_k: int

    @classmethod
    def of(cls, sampling: SamplingParams, vocab_size: int) -> Recipe:
        """The recipe in its plainest form, so that equal distributions have equal recipes.

        ``top_k`` is 0 where it excludes nothing; a greedy recipe has no other parameters.
        """
        if sampling.temperature == 0:
            return cls(0.0, 1.0, 0)
        top_k = sampling.top_k if 0 < sampling.top_k < vocab_size else 0
        return cls(float(sampling.temperature), float(sampling.top_p), top_k)


def choose_tokens(logits: Tensor, recipe: Recipe, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: floating ``[B, V]``; the arithmetic is float32 whatever the dtype.
        recipe: temperature, then top-k, then top-p, all rows alike.
        uniforms: float64 ``[B]`` in [0, 1), the only source of randomness. Greedy needs none.

    Returns:
        Tokens int64 ``[B]``, and their log-probs float32 ``[B]`` under the distribution they were
        drawn from; for greedy, under the plain softmax.
    """
    scores = logits.float()
    if recipe.temperature == 0:
        tokens = scores.argmax(-1)
        return tokens, scores.gather(-1, tokens[:, None])[:, 0] - scores.logsumexp(-1)
    if recipe.temperature != 1:
        scores = scores / recipe.temperature
    candidates: Tensor | None = None
    if recipe.top_k:
        scores, candidates = scores.topk(recipe.top_k, dim=-1)
    elif recipe.top_p < 1:
        scores, candidates = scores.sort(dim=-1, descending=True)
    if recipe.top_p < 1:
        probs = scores.softmax(-1)
        # The mass before a candidate is exactly 0 for the first one, so that one always stays.
        scores = scores.masked_fill(probs.cumsum(-1) - probs >= recipe.top_p, -torch.inf)
    log_probs = scores.log_softmax(-1)
    # In float64: the rounding of float32 prefix sums would bias a large vocabulary.
    mass = log_probs.exp().double().cumsum(-1)
    below = uniforms[:, None] * mass[:, -1:]
    # The first candidate whose mass exceeds the draw, so never one without any; clamped for logits that are NaN.
    chosen = torch.searchsorted(mass, below, right=True).clamp_(max=mass.shape[1] - 1)
    picked = log_probs.gather(-1, chosen)[:, 0]
    tokens = chosen if candidates is None else candidates.gather(-1, chosen)
    return tokens[:, 0], picked


def make_streams(seeds: Tensor, indices: Tensor) -> Tensor:
    """A random stream for each of the sequences ``indices`` of the requests ``seeds``; all int64 ``[B]``."""
    return _scramble(_scramble(seeds) + indices)


def draw_uniforms(streams: Tensor, position: int) -> Tensor:
    """The streams' numbers at a position, float64 ``[B]`` in [0, 1), multiples of 2^-53.

    They are a hash of stream and position: what a row draws depends on no other row.
    """
    return (_shift(_scramble(streams + _wrap((position + 1) * 0x9E3779B97F4A7C15)), 11)).double() * 2.0**-53


def _scramble(values: Tensor) -> Tensor:
    """The finaliser of SplitMix64 on int64, whose arithmetic wraps."""
    values = (values ^ _shift(values, 30)) * _wrap(0xBF58476D1CE4E5B9)
    values = (values ^ _shift(values, 27)) * _wrap(0x94D049BB133111EB)
    return values ^ _shift(values, 31)


def _shift(values: Tensor, bits: int) -> Tensor:
    """To the right, with zeros coming in."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _wrap(value: int) -> int:
    """The int64 of the same 64 bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


class TokenSampler:
    """Applies each row's own recipe, one vectorised call for each distinct recipe.

    Args:
        params: of every row, ``[B]``.
        vocab_size: the ``V`` of the logits to come.
        streams: of every row, see :func:`make_streams`; on the logits' device.
    """

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int, streams: Tensor) -> None:
        self._streams = streams
        self._position = 0
        index: dict[Recipe, int] = {}
        known: dict[int, int] = {}
        codes = []
        for each in params:  # rows of one request share one object: looking at its id is enough
            code = known.get(id(each))
            if code is None:
                code = known[id(each)] = index.setdefault(Recipe.of(each, vocab_size), len(index))
            codes.append(code)
        self._recipes = tuple(index)
        self._codes = torch.tensor(codes, device=streams.device)
        self._members = self._find_members()

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens int64 ``[B]`` and log-probs float32 ``[B]`` for logits ``[B, V]`` at the next position."""
        uniforms = draw_uniforms(self._streams, self._position)
        self._position += 1
        if len(self._recipes) == 1:
            return choose_tokens(logits, self._recipes[0], uniforms)
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        log_probs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        for recipe, rows in zip(self._recipes, self._members, strict=True):
            if len(rows):
                tokens[rows], log_probs[rows] = choose_tokens(logits[rows], recipe, uniforms[rows])
        return tokens, log_probs

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only, int64 ``[B']`` of present row numbers."""
        self._codes, self._streams = self._codes[rows], self._streams[rows]
        self._members = self._find_members()

    def _find_members(self) -> list[Tensor]:
        return [(self._codes == code).nonzero()[:, 0] for code in range(len(self._recipes))]
