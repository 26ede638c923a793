"""Per-token quantities over a vocabulary that is split over ranks.

Axes: ``n`` positions, ``h`` hidden size, ``v`` words on this rank, ``V`` words in total.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["VocabularySlice", "head_quantities"]


@dataclass(frozen=True)
class VocabularySlice:
    """The slice of the vocabulary on this rank.

    Attributes:
        group: process group of the tensor-parallel ranks.
        start: number of the first word.
        words: number of words; further rows of the head are padding.
        scale: factor of the logits: one over the temperature.
        chunk: maximum number of positions processed at a time.
    """

    group: Any
    start: int
    words: int
    scale: float
    chunk: int


def head_quantities(hidden: Tensor, weight: Tensor, targets: Tensor, vocabulary: VocabularySlice) -> tuple[Tensor, ...]:
    """Return log-probs of ``targets``, entropies and ``sum p^2``, each float32 ``[n]`` and differentiable.

    Logits exist for ``vocabulary.chunk`` positions at a time; with more positions, the backward pass recomputes them.
    The gradient of ``hidden`` is this rank's part of a sum over the ranks.

    Args:
        hidden: hidden states, ``[n, h]``.
        weight: ``[v, h]`` or more rows.
        targets: words of the whole vocabulary, int64 ``[n]``.
        vocabulary: the slice of this rank.
    """
    quantities: tuple[Tensor, ...] = _HeadQuantities.apply(hidden, weight, targets, vocabulary)  # type: ignore[no-untyped-call]
    return quantities


class _HeadQuantities(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, vocabulary: VocabularySlice) -> Any:
        words = weight[: vocabulary.words]
        results, chunk = [], None
        for start in range(0, hidden.size(0), vocabulary.chunk):
            part = slice(start, start + vocabulary.chunk)
            logits = _logits(hidden[part], words, vocabulary.scale)
            is_kept = hidden.size(0) <= vocabulary.chunk and any(ctx.needs_input_grad)
            chunk = logits.clone() if is_kept else None
            results.append(_reduce(logits, targets[part], vocabulary))
            del logits  # or they would stay until the next chunk has its own
        table = torch.cat(results, 1) if results else hidden.new_zeros((4, 0), dtype=torch.float32)
        log_norm, log_probs, entropy, squares = table
        ctx.vocabulary = vocabulary
        ctx.set_materialize_grads(False)  # None tells, without a look at values, that a quantity is not in the loss
        ctx.save_for_backward(hidden, weight, targets, log_norm, entropy, squares, chunk)
        return log_probs, entropy, squares

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        hidden, weight, targets, log_norm, entropy, squares, chunk = ctx.saved_tensors
        vocabulary: VocabularySlice = ctx.vocabulary
        words = weight[: vocabulary.words]
        hidden_grad = torch.empty_like(hidden)
        weight_grad = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, hidden.size(0), vocabulary.chunk):
            part = slice(start, start + vocabulary.chunk)
            logits = _logits(hidden[part], words, vocabulary.scale) if chunk is None else chunk
            sums = torch.stack([log_norm[part], entropy[part], squares[part]])
            chosen = [None if gradient is None else gradient[part] for gradient in gradients]
            grad = _logits_gradient(logits, targets[part], sums, chosen, vocabulary).to(weight.dtype)
            hidden_grad[part] = grad @ words
            if weight_grad is not None:
                weight_grad[: vocabulary.words].addmm_(grad.T, hidden[part])
            del logits, grad
        return hidden_grad, weight_grad, None, None


def _logits(hidden: Tensor, words: Tensor, scale: float) -> Tensor:
    logits = (hidden @ words.T).float()
    return logits if scale == 1.0 else logits.mul_(scale)


def _own(targets: Tensor, vocabulary: VocabularySlice) -> tuple[Tensor, Tensor]:
    """Return a mask of the targets that are words of this rank, and their local index (0 for the others)."""
    places = targets - vocabulary.start
    mine = (places >= 0) & (places < vocabulary.words)
    return mine, places.where(mine, 0)


def _reduce(logits: Tensor, targets: Tensor, vocabulary: VocabularySlice) -> Tensor:
    """Return log normalizer, log-prob, entropy and sum of squares, float32 ``[4, n]``, over all ranks' words.

    The logits are overwritten.
    """
    peak = logits.amax(-1)
    if dist.get_world_size(vocabulary.group) > 1:
        dist.all_reduce(peak, dist.ReduceOp.MAX, vocabulary.group)
    shifted = logits.sub_(peak.unsqueeze(-1))
    weights = shifted.exp()
    mine, places = _own(targets, vocabulary)
    chosen = shifted.gather(-1, places.unsqueeze(-1)).squeeze(-1).where(mine, 0.0)
    # The squares without a tensor of them, and the products in place of the weights.
    parts = [weights.sum(-1), chosen, torch.linalg.vector_norm(weights, dim=-1).square()]
    sums = torch.stack([*parts, weights.mul_(shifted).sum(-1)])
    if dist.get_world_size(vocabulary.group) > 1:
        dist.all_reduce(sums, group=vocabulary.group)
    total, chosen, squares, mean = sums
    log_total = total.log()
    return torch.stack([log_total + peak, chosen - log_total, log_total - mean / total, squares / total.square()])


def _logits_gradient(
    logits: Tensor, targets: Tensor, sums: Tensor, gradients: Sequence[Tensor | None], vocabulary: VocabularySlice
) -> Tensor:
    """Return the gradient of this rank's unscaled logits, float32 ``[n, v]``; the logits are overwritten.

    Args:
        logits: ``[n, v]``.
        targets: int64 ``[n]``.
        sums: log normalizer, entropy and sum of squares, ``[3, n]``.
        gradients: gradients of log-prob, entropy and sum of squares, ``[n]``; None for one that is not in the loss.
        vocabulary: the slice of this rank.
    """
    log_norm, entropy, squares = sums.unsqueeze(-1)
    of_log_prob, of_entropy, of_squares = (
        torch.zeros_like(log_norm) if gradient is None else gradient.unsqueeze(-1) for gradient in gradients
    )
    log_p = logits.sub_(log_norm)
    p = log_p.exp()
    # d log p_y = [v = y] - p;  d H = -p (log p + H);  d sum p^2 = 2 p (p - sum p^2)
    inner = log_p.add_(entropy).mul_(-of_entropy).sub_(of_log_prob)
    if gradients[2] is not None:
        inner += 2.0 * of_squares * (p - squares)
    grad = p.mul_(inner)
    mine, places = _own(targets, vocabulary)
    grad.scatter_add_(-1, places.unsqueeze(-1), of_log_prob * mine.unsqueeze(-1))
    scaled: Tensor = grad.mul_(vocabulary.scale)
    return scaled
