"""Log-probs, entropy and Σp² computed from hidden states and the vocabulary head, without full logits.

Forward and backward process the vocabulary in blocks; the backward pass recomputes the logits of each block. Axes:
``M`` positions, ``H`` hidden size, ``V`` vocabulary, ``v`` words of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["VocabularyStats", "linear_stats"]

#: Maximum number of logits in a block; in float32 these are 16 MiB.
_BLOCK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class VocabularyStats:
    """Statistics of the distributions over the vocabulary at ``M`` positions, float32 ``[M]`` each; zero if not
    requested.
    """

    log_probs: Tensor
    entropy: Tensor
    sum_pi_squared: Tensor


def linear_stats(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    temperature: float = 1.0,
    entropy: bool = True,
    sum_pi_squared: bool = True,
    block_elements: int = _BLOCK_ELEMENTS,
) -> VocabularyStats:
    """Return statistics of ``softmax((hidden @ weight.T + bias) / temperature)``, all differentiable.

    Besides inputs and gradients, at most a few blocks of logits are in memory at a time.

    Args:
        hidden: hidden states, ``[M, H]``.
        weight: ``[V, H]`` of the same dtype, in which logits are computed before the conversion to float32.
        bias: ``[V]``, or None.
        tokens: tokens whose log-probs are computed, int64 ``[M]``.
        temperature: sampling temperature, above 0.
        entropy, sum_pi_squared: True to compute them in addition to log-probs.
        block_elements: maximum number of logits in a block; a block has at least one word.
    """
    result: Any = _LinearStats.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, tokens, _Options(temperature, entropy, sum_pi_squared, block_elements)
    )
    return VocabularyStats(*result)


@dataclass(frozen=True)
class _Options:
    temperature: float
    entropy: bool
    squares: bool
    block_elements: int


def _blocks(positions: int, vocabulary: int, elements: int) -> Iterator[slice]:
    size = min(vocabulary, max(1, elements // max(positions, 1)))
    for start in range(0, vocabulary, size):
        yield slice(start, min(start + size, vocabulary))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, block: slice) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight[block], None if bias is None else bias[block]).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


class _LinearStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, options: _Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Sums over all blocks are kept in double precision: it is only one number per position.
        chosen = torch.zeros(len(hidden), dtype=torch.float64, device=hidden.device)
        total = torch.full_like(chosen, -torch.inf)  # logsumexp of the blocks so far; below, that of doubled logits
        doubled = torch.full_like(chosen, -torch.inf)
        mean = torch.zeros_like(chosen)  # mean of the logits under the distribution so far
        # A constant per row is subtracted from the logits, so that entropy is not a small difference of large numbers.
        shift: Tensor | None = None
        for block in _blocks(len(hidden), len(weight), options.block_elements):
            logits = _logits(hidden, weight, bias, options.temperature, block)
            shift = logits.amax(1) if shift is None else shift
            logits.sub_(shift.unsqueeze(1))
            inside = (tokens >= block.start) & (tokens < block.stop)
            place = (tokens - block.start).clamp(0, logits.size(1) - 1).unsqueeze(1)
            chosen = torch.where(inside, logits.gather(1, place).squeeze(1).double(), chosen)
            part = logits.logsumexp(1).double()
            joined = torch.logaddexp(total, part)
            if options.squares:
                doubled = torch.logaddexp(doubled, (2 * logits).logsumexp(1).double())
            if options.entropy:
                share = (logits - part.float().unsqueeze(1)).exp_().mul_(logits).sum(1)
                mean = mean * (total - joined).exp() + share * (part - joined).exp()
            total = joined
        squares = (doubled - 2 * total).exp() if options.squares else torch.zeros_like(total)
        entropy = total - mean if options.entropy else torch.zeros_like(total)
        log_probs, entropy, squares = (chosen - total).float(), entropy.float(), squares.float()
        ctx.save_for_backward(hidden, weight, bias, tokens, total.float(), mean.float(), squares, shift)
        ctx.options = options
        return log_probs, entropy, squares

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens, total, mean, squares, shift = ctx.saved_tensors
        options: _Options = ctx.options
        of_log_probs, of_entropy, of_squares = (gradient.unsqueeze(1) for gradient in gradients)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        to_hidden = torch.zeros_like(hidden, dtype=torch.float32) if wants_hidden else None
        to_weight = torch.empty_like(weight) if wants_weight else None
        to_bias = torch.empty_like(bias) if wants_bias and bias is not None else None
        for block in _blocks(len(hidden), len(weight), options.block_elements):
            logits = _logits(hidden, weight, bias, options.temperature, block)
            logits.sub_(shift.unsqueeze(1))
            probs = (logits - total.unsqueeze(1)).exp_()
            # With p the probability of a word: d log p_y = [word is y] - p;  d entropy = -p (z - mean);  d Σp² = 2 p (p
            # - Σp²).
            slope = -of_log_probs
            if options.entropy:
                slope = logits.sub_(mean.unsqueeze(1)).mul_(-of_entropy).add_(slope)
            if options.squares:
                slope = slope + (probs - squares.unsqueeze(1)).mul_(2 * of_squares)
            slope = probs.mul_(slope)
            inside = ((tokens >= block.start) & (tokens < block.stop)).nonzero().squeeze(1)
            slope[inside, tokens[inside] - block.start] += of_log_probs[inside, 0]
            slope = slope.div_(options.temperature).to(weight.dtype)
            if to_hidden is not None:
                to_hidden += slope @ weight[block]
            if to_weight is not None:
                torch.mm(slope.T, hidden, out=to_weight[block])
            if to_bias is not None:
                to_bias[block] = slope.sum(0)
        return None if to_hidden is None else to_hidden.to(hidden.dtype), to_weight, to_bias, None, None
