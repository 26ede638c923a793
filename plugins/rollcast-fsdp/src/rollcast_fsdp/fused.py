"""Log-probs, entropy and Σp² computed from hidden states and the vocabulary head, without full logits.

Forward and backward process the positions in chunks, each with the whole vocabulary; the backward pass recomputes the
logits of each chunk. Axes: ``M`` positions, ``m`` positions of a chunk, ``H`` hidden size, ``V`` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["CHUNK_SIZE", "VocabularyStats", "linear_stats"]

#: Positions of a chunk, unless ``log_probs_chunk_size`` says otherwise.
CHUNK_SIZE = 512


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
    chunk_size: int = CHUNK_SIZE,
) -> VocabularyStats:
    """Return statistics of ``softmax((hidden @ weight.T + bias) / temperature)``, all differentiable.

    Besides inputs and gradients, two or three tensors of ``[m, V]`` are in memory at a time. The gradient of a weight
    that is not float32 is summed over the chunks in float32, ``[V, H]``, and rounded once.

    Args:
        hidden: hidden states, ``[M, H]``.
        weight: ``[V, H]`` of the same dtype, in which logits are computed before the conversion to float32.
        bias: ``[V]``, or None.
        tokens: tokens whose log-probs are computed, int64 ``[M]``.
        temperature: sampling temperature, above 0.
        entropy, sum_pi_squared: True to compute them in addition to log-probs.
        chunk_size: ``m``, at least 1.
    """
    result: Any = _LinearStats.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, tokens, _Options(temperature, entropy, sum_pi_squared, chunk_size)
    )
    return VocabularyStats(*result)


@dataclass(frozen=True)
class _Options:
    temperature: float
    entropy: bool
    squares: bool
    chunk_size: int

    def chunks(self, positions: int) -> Iterator[slice]:
        for start in range(0, positions, self.chunk_size):
            yield slice(start, min(start + self.chunk_size, positions))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


class _LinearStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, options: _Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        log_probs = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy, squares, shift, log_total, mean = (torch.zeros_like(log_probs) for _ in range(5))
        for chunk in options.chunks(len(hidden)):
            logits = _logits(hidden[chunk], weight, bias, options.temperature)
            # Relative to the largest, so that entropy is no small difference of large numbers.
            shift[chunk] = largest = logits.amax(1)
            logits.sub_(largest.unsqueeze(1))
            chosen = logits.gather(1, tokens[chunk].unsqueeze(1)).squeeze(1)
            probs = logits.exp()
            total = probs.sum(1)
            log_total[chunk] = total.log()
            log_probs[chunk] = chosen - log_total[chunk]
            if options.squares:
                squares[chunk] = (torch.linalg.vector_norm(probs, dim=1) / total).square()
            if options.entropy:
                mean[chunk] = probs.mul_(logits).sum(1) / total
                entropy[chunk] = log_total[chunk] - mean[chunk]
            del logits, probs  # or they would stay until the next chunk has its own
        ctx.save_for_backward(hidden, weight, bias, tokens, shift, log_total, mean, squares)
        ctx.options = options
        return log_probs, entropy, squares

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens, *stats = ctx.saved_tensors
        options: _Options = ctx.options
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        to_hidden = torch.empty_like(hidden) if wants_hidden else None
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        to_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias and bias is not None else None
        for chunk in options.chunks(len(hidden)):
            logits = _logits(hidden[chunk], weight, bias, options.temperature)
            slope = _slope(
                logits, tokens[chunk], [stat[chunk] for stat in stats], [g[chunk] for g in gradients], options
            )
            slope = slope.to(weight.dtype)
            if to_hidden is not None:
                torch.mm(slope, weight, out=to_hidden[chunk])
            if to_weight is not None:
                _add_product(to_weight, slope.T, hidden[chunk])
            if to_bias is not None:
                to_bias += slope.sum(0, dtype=torch.float32)
            del logits, slope
        rounded = None if to_weight is None else to_weight.to(weight.dtype)
        return to_hidden, rounded, None if to_bias is None else to_bias.to(bias.dtype), None, None


def _slope(logits: Tensor, tokens: Tensor, stats: list[Tensor], gradients: list[Tensor], options: _Options) -> Tensor:
    """Return the gradient of a chunk's logits before the temperature, ``[m, V]``; ``logits`` are overwritten.

    With p the probability of a word: d log p_y = [word is y] - p;  d entropy = -p (z - mean);  d Σp² = 2 p (p - Σp²).
    """
    shift, log_total, mean, squares = (stat.unsqueeze(1) for stat in stats)
    of_log_probs, of_entropy, of_squares = (gradient.unsqueeze(1) for gradient in gradients)
    logits.sub_(shift)
    probs = (logits - log_total).exp_()
    if options.entropy:
        factor = logits.sub_(mean).mul_(-of_entropy).sub_(of_log_probs)
    else:
        factor = -of_log_probs
    if options.squares:
        factor = factor + (probs - squares).mul_(2 * of_squares)
    slope = probs.mul_(factor)
    slope.scatter_add_(1, tokens.unsqueeze(1), of_log_probs)
    return slope if options.temperature == 1.0 else slope.div_(options.temperature)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product to a float32 sum."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
