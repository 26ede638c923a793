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
    """The sampling parameters that shape the distribution; rows with the same recipe are sampled together."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float = 0.0

    @classmethod
    def of(cls, sampling: SamplingParams, vocab_size: int) -> Recipe:
        """Return the recipe in canonical form, so that equal distributions have equal recipes.

        ``top_k`` is 0 if it excludes nothing; a greedy recipe has no other parameters.
        """
        if sampling.temperature == 0:
            return cls(0.0, 1.0, 0)
        top_k = sampling.top_k if 0 < sampling.top_k < vocab_size else 0
        return cls(float(sampling.temperature), float(sampling.top_p), top_k, float(sampling.min_p))


def choose_tokens(logits: Tensor, recipe: Recipe, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: floating ``[B, V]``; computed in float32 for every dtype.
        recipe: temperature, then min-p, then top-k, then top-p, the same for all rows.
        uniforms: float64 ``[B]`` in [0, 1), the only source of randomness; unused if greedy.

    Returns:
        Tokens int64 ``[B]``, and their log-probs float32 ``[B]`` under the distribution they were drawn from; if
        greedy, under the plain softmax.
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
        # The mass before the first candidate is exactly 0, so the first candidate always stays.
        scores = scores.masked_fill(probs.cumsum(-1) - probs >= recipe.top_p, -torch.inf)
    log_probs = scores.log_softmax(-1)
    # In float64: rounding of float32 prefix sums would bias a large vocabulary.
    mass = log_probs.exp().double().cumsum(-1)
    below = uniforms[:, None] * mass[:, -1:]
    # The first candidate whose cumulative mass exceeds the draw, so never one of mass zero; clamped for NaN logits.
    chosen = torch.searchsorted(mass, below, right=True).clamp_(max=mass.shape[1] - 1)
    picked = log_probs.gather(-1, chosen)[:, 0]
    tokens = chosen if candidates is None else candidates.gather(-1, chosen)
    return tokens[:, 0], picked


def make_streams(seeds: Tensor, indices: Tensor) -> Tensor:
    """Return a random stream for each sequence ``indices`` of the requests ``seeds``; all int64 ``[B]``."""
    return _scramble(_scramble(seeds) + indices)


def draw_uniforms(streams: Tensor, position: int) -> Tensor:
    """Return the streams' numbers at a position, float64 ``[B]`` in [0, 1), multiples of 2^-53.

    They are a hash of stream and position, so a row's draws do not depend on other rows.
    """
    return (_shift(_scramble(streams + _wrap((position + 1) * 0x9E3779B97F4A7C15)), 11)).double() * 2.0**-53


def _scramble(values: Tensor) -> Tensor:
    """Apply the finaliser of SplitMix64 on int64, whose arithmetic wraps."""
    values = (values ^ _shift(values, 30)) * _wrap(0xBF58476D1CE4E5B9)
    values = (values ^ _shift(values, 27)) * _wrap(0x94D049BB133111EB)
    return values ^ _shift(values, 31)


def _shift(values: Tensor, bits: int) -> Tensor:
    """Shift right, filling with zeros."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _wrap(value: int) -> int:
    """Return the int64 with the same 64 bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


class _LogitShift:
    """Bias and repetition penalty of each row, applied to logits first; rows without them are unchanged.

    Args:
        params: sampling parameters of every row, ``[B]``.
        vocab_size: ``V`` of the logits.
        device: device of the logits.
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
        if any(param.logit_bias for param in params):
            bias = torch.zeros(len(params), vocab_size)
            for row, options in enumerate(params):
                for token, value in options.logit_bias:
                    bias[row, token] = value
            self._bias = bias.to(device)
        if any(param.repetition_penalty != 1 for param in params):
            seen = torch.zeros(len(params), vocab_size, dtype=torch.bool)
            for row, prompt in enumerate(prompts or ()):
                seen[row, torch.frombuffer(prompt, dtype=torch.int32).long()] = True
            self._seen = seen.to(device)
            self._penalties = torch.tensor([param.repetition_penalty for param in params], device=device)[:, None]

    def apply(self, logits: Tensor) -> Tensor:
        """Return the logits ``[B, V]`` with bias and penalty applied."""
        if self._bias is not None:
            logits = logits.float() + self._bias
        if self._penalties is not None:
            scores = logits.float()
            punished = torch.where(scores > 0, scores / self._penalties, scores * self._penalties)
            logits = torch.where(self._seen, punished, scores)
        return logits

    def add(self, tokens: Tensor) -> None:
        """Mark new tokens, int64 ``[B]``, as seen."""
        if self._penalties is not None:
            self._seen.scatter_(1, tokens[:, None], True)  # torch takes the value by position

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows."""
        if self._bias is not None:
            self._bias = self._bias[rows]
        if self._penalties is not None:
            self._seen, self._penalties = self._seen[rows], self._penalties[rows]


class TokenSampler:
    """Sampler that applies each row's own recipe, with one vectorised call per distinct recipe.

    Args:
        params: sampling parameters of every row, ``[B]``.
        vocab_size: ``V`` of the logits.
        streams: random stream of every row, see :func:`make_streams`; on the logits' device.
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
        for param in params:  # rows of one request share one object, so comparing ids is enough
            code = known.get(id(param))
            if code is None:
                code = known[id(param)] = index.setdefault(Recipe.of(param, vocab_size), len(index))
            codes.append(code)
        self._recipes = tuple(index)
        self._codes = torch.tensor(codes, device=streams.device)
        self._members = self._find_members()

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens int64 ``[B]`` and log-probs float32 ``[B]`` for logits ``[B, V]`` at the next position."""
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
        """Keep only these rows, int64 ``[B']`` of current row numbers."""
        self._codes, self._streams = self._codes[rows], self._streams[rows]
        self._shift.keep(rows)
        self._members = self._find_members()

    def _find_members(self) -> list[Tensor]:
        return [(self._codes == code).nonzero()[:, 0] for code in range(len(self._recipes))]
