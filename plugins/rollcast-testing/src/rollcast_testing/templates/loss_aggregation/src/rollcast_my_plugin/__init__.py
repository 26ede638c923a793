"""The loss aggregation ``my_plugin``: between a mean and a sum over the tokens of a sequence."""

import torch
from torch import Tensor

from rollcast.contracts.algorithm import Denominators


def my_plugin(losses: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """Return ``Σ_i (Σ_t l_it / sqrt(n_i)) / S``, a scalar; its sum over micro-batches is the loss of the mini-batch.

    Args:
        losses, mask: ``[B, T]``; where the mask is 0, losses may be anything.
        denominators: counts over the whole mini-batch, and the lengths of sequences of several rows.
    """
    chosen = mask != 0
    sums = torch.where(chosen, losses.float(), 0.0).sum(-1)
    own = denominators.sequence_tokens
    lengths = chosen.sum(-1) if own is None else own.to(mask.device)
    total = (sums / lengths.clamp(min=1).sqrt()).sum()
    # The product keeps the graph, because every rank runs backward.
    return total / denominators.sequences if denominators.sequences else total * 0.0
