"""Choosing the next token of every row, each row with its own sampling parameters.

Axes: ``B`` rows, ``V`` vocabulary, ``K`` candidates of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rollcast.contracts.rollout import SamplingParams

__all__ = ["Recipe", "TokenSampler", "choose_tokens"]


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


def choose_tokens(logits: Tensor, recipe: Recipe, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: floating ``[B, V]``; the arithmetic is float32 whatever the dtype.
        recipe: temperature, then top-k, then top-p, all rows alike.
        generator: on the logits' device; the only source of randomness. Greedy draws nothing.

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
    # Exponential race: the smallest Exp(1) / p wins with probability p. It needs no prefix sums,
    # whose float32 rounding would bias a large vocabulary.
    chosen = log_probs.exp().div_(_draw_exponential(log_probs, generator)).argmax(-1, keepdim=True)
    picked = log_probs.gather(-1, chosen)[:, 0]
    tokens = chosen if candidates is None else candidates.gather(-1, chosen)
    return tokens[:, 0], picked


def _draw_exponential(like: Tensor, generator: torch.Generator) -> Tensor:
    if like.device.type != "cpu":
        return torch.empty_like(like).exponential_(generator=generator)
    # A third of exponential_'s time on a CPU. In float64, because the coarse steps of float32
    # uniforms would keep tokens below 6e-8 from ever being drawn.
    uniform = torch.empty(like.shape, dtype=torch.float64).uniform_(generator=generator)
    return uniform.log_().neg_().float()


class TokenSampler:
    """Applies each row's own recipe, one vectorised call for each distinct recipe.

    Args:
        params: of every row, ``[B]``.
        vocab_size: the ``V`` of the logits to come.
        generator: on the logits' device.
    """

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int, generator: torch.Generator) -> None:
        self._generator = generator
        index: dict[Recipe, int] = {}
        known: dict[int, int] = {}
        codes = []
        for each in params:  # rows of one request share one object: looking at its id is enough
            code = known.get(id(each))
            if code is None:
                code = known[id(each)] = index.setdefault(Recipe.of(each, vocab_size), len(index))
            codes.append(code)
        self._recipes = tuple(index)
        self._codes = torch.tensor(codes, device=generator.device)
        self._members = self._find_members()

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens int64 ``[B]`` and log-probs float32 ``[B]`` for logits ``[B, V]``."""
        if len(self._recipes) == 1:
            return choose_tokens(logits, self._recipes[0], self._generator)
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        log_probs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        for recipe, rows in zip(self._recipes, self._members, strict=True):
            if len(rows):
                tokens[rows], log_probs[rows] = choose_tokens(logits[rows], recipe, self._generator)
        return tokens, log_probs

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only, int64 ``[B']`` of present row numbers."""
        self._codes = self._codes[rows]
        self._members = self._find_members()

    def _find_members(self) -> list[Tensor]:
        return [(self._codes == code).nonzero()[:, 0] for code in range(len(self._recipes))]
