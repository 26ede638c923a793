"""Choosing the next token of every row, each row with its own sampling parameters.

Axes: ``B`` rows, ``V`` vocabulary, ``K`` candidates of a row.
"""

from __future__ import annotations

import math
from array import array
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
    min_p: float = 0.0

    @classmethod
    def of(cls, sampling: SamplingParams, vocab_size: int) -> Recipe:
        """The recipe in its plainest form, so that equal distributions have equal recipes.

        ``top_k`` is 0 where it excludes nothing; a greedy recipe has no other parameters.
        """
        if sampling.temperature == 0:
            return cls(0.0, 1.0, 0)
        top_k = sampling.top_k if 0 < sampling.top_k < vocab_size else 0
        return cls(float(sampling.temperature), float(sampling.top_p), top_k, float(sampling.min_p))


def choose_tokens(logits: Tensor, recipe: Recipe, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: floating ``[B, V]``; the arithmetic is float32 whatever the dtype.
        recipe: temperature, then min-p, then top-k, then top-p, all rows alike.
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
    if recipe.min_p:
        least = scores.amax(-1, keepdim=True) + math.log(recipe.min_p)
        scores = scores.masked_fill(scores < least, -torch.inf)
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


class _LogitShift:
    """Bias and repetition penalty of each row, applied to logits before anything else; nothing for rows without.

    Args:
        params: of every row, ``[B]``.
        vocab_size: the ``V`` of the logits to come.
        device: of the logits.
        prompts: token ids of every row; None counts no prompt token as seen.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        vocab_size: int,
        device: torch.device,
        prompts: Sequence[array[int]] | None,
    ) -> None:
        self._bias: Tensor | None = None
        self._penalties: Tensor | None = None
        self._seen = torch.zeros(0, dtype=torch.bool)
        if any(each.logit_bias for each in params):
            bias = torch.zeros(len(params), vocab_size)
            for row, each in enumerate(params):
                for token, value in each.logit_bias:
                    bias[row, token] = value
            self._bias = bias.to(device)
        if any(each.repetition_penalty != 1 for each in params):
            seen = torch.zeros(len(params), vocab_size, dtype=torch.bool)
            for row, prompt in enumerate(prompts or ()):
                seen[row, torch.frombuffer(prompt, dtype=torch.int32).long()] = True
            self._seen = seen.to(device)
            self._penalties = torch.tensor([each.repetition_penalty for each in params], device=device)[:, None]

    def apply(self, logits: Tensor) -> Tensor:
        """Return the logits ``[B, V]`` with bias and penalty, or themselves."""
        if self._bias is not None:
            logits = logits.float() + self._bias
        if self._penalties is not None:
            scores = logits.float()
            punished = torch.where(scores > 0, scores / self._penalties, scores * self._penalties)
            logits = torch.where(self._seen, punished, scores)
        return logits

    def add(self, tokens: Tensor) -> None:
        """Count new tokens, int64 ``[B]``, as seen."""
        if self._penalties is not None:
            self._seen.scatter_(1, tokens[:, None], True)  # torch takes the value by position

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only."""
        if self._bias is not None:
            self._bias = self._bias[rows]
        if self._penalties is not None:
            self._seen, self._penalties = self._seen[rows], self._penalties[rows]


class TokenSampler:
    """Applies each row's own recipe, one vectorised call for each distinct recipe.

    Args:
        params: of every row, ``[B]``.
        vocab_size: the ``V`` of the logits to come.
        streams: of every row, see :func:`make_streams`; on the logits' device.
        prompts: token ids of every row, which a repetition penalty counts as seen.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        vocab_size: int,
        streams: Tensor,
        prompts: Sequence[array[int]] | None = None,
    ) -> None:
        self._streams = streams
        self._shift = _LogitShift(params, vocab_size, streams.device, prompts)
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
        tokens, log_probs = self._choose(self._shift.apply(logits))
        self._shift.add(tokens)
        return tokens, log_probs

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
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
        self._shift.keep(rows)
        self._members = self._find_members()

    def _find_members(self) -> list[Tensor]:
        return [(self._codes == code).nonzero()[:, 0] for code in range(len(self._recipes))]
