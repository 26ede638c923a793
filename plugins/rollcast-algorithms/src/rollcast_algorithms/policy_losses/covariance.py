"""Clip-Cov and KL-Cov, losses that treat the few tokens separately whose update would cost the most entropy.

Such tokens are those with a large covariance of log-prob and advantage over the batch::

    cov_t = (A_t - mean(A)) · (log π_t - mean(log π))

These tokens depend on the whole batch, so both losses select them in ``prepare``
(:func:`rollcast.contracts.algorithm.policy_loss`) and read the resulting column in the update: the result does not
depend on the split of the batch. Shapes and errors are those of :mod:`rollcast_algorithms.policy_losses.clipped`; a
missing prepared column raises ValueError too.

Source of both: Cui et al. 2025, The Entropy Mechanism of Reinforcement Learning for Reasoning Language
Models, arXiv:2505.22617.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rollcast.contracts.algorithm import PolicyLossInputs, PolicyLossOutput, policy_loss
from rollcast_algorithms.policy_losses._tokens import Tokens, read_tokens

__all__ = ["clip_cov", "kl_cov", "prepare_clip_cov", "prepare_kl_cov"]

_CLIP_COV = {"clip_cov_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0}
_KL_COV = {"kl_cov_ratio": 0.0002, "ppo_kl_coef": 0.1}


def prepare_clip_cov(inputs: PolicyLossInputs) -> Mapping[str, Tensor]:
    """Compute the column ``dropped``, 1 at the tokens that :func:`clip_cov` leaves out.

    Candidates are tokens with a covariance between ``clip_cov_lb`` and ``clip_cov_ub`` that PPO does not clip. From
    them, ``clip_cov_ratio`` of the number of all tokens (at least one) is drawn, by a hash of the token's numbers: the
    draw does not depend on the position of the row, and differs between steps.
    """
    options = {**_CLIP_COV, **inputs.options}
    _check_share("clip_cov_ratio", options["clip_cov_ratio"])
    tokens = read_tokens(inputs)
    covariance = _covariance(tokens)
    _, clipped = _ppo(inputs, tokens)
    eligible = tokens.chosen & ~clipped
    eligible &= (covariance > options["clip_cov_lb"]) & (covariance < options["clip_cov_ub"])
    count = max(int(options["clip_cov_ratio"] * int(tokens.chosen.sum())), 1)
    # float64 represents all 2^31 hashes exactly.
    draw = torch.where(eligible, _hash(tokens).double(), -1.0)
    return {"dropped": (_largest(draw, count) & eligible).to(torch.float32)}


@policy_loss(prepare=prepare_clip_cov, scales_with_advantage=True, options=_CLIP_COV)
def clip_cov(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """Compute PPO's clipped surrogate without a few tokens of high covariance (Clip-Cov).

    ::

        L = max(-A · ratio, -A · clamp(ratio, 1 - low, 1 + high)) · (1 - dropped)

    Options: ``clip_cov_ratio`` (0.0002), ``clip_cov_lb`` (1.0), ``clip_cov_ub`` (5.0), see
    :func:`prepare_clip_cov`. Metrics: ``clip_fraction`` (dropped), ``kl``.
    """
    tokens = read_tokens(inputs)
    dropped = _prepared("clip_cov", "dropped", inputs, tokens)
    losses, _ = _ppo(inputs, tokens)
    return PolicyLossOutput(
        torch.where(dropped, 0.0, losses), {"clip_fraction": dropped.to(losses.dtype), "kl": tokens.kl}
    )


def prepare_kl_cov(inputs: PolicyLossInputs) -> Mapping[str, Tensor]:
    """Compute the column ``penalised``, 1 at the fraction ``kl_cov_ratio`` of tokens with the largest covariance."""
    options = {**_KL_COV, **inputs.options}
    _check_share("kl_cov_ratio", options["kl_cov_ratio"])
    tokens = read_tokens(inputs)
    count = max(int(options["kl_cov_ratio"] * int(tokens.chosen.sum())), 1)
    covariance = torch.where(tokens.chosen, _covariance(tokens), -torch.inf)
    return {"penalised": (_largest(covariance, count) & tokens.chosen).to(torch.float32)}


@policy_loss(prepare=prepare_kl_cov, options=_KL_COV)
def kl_cov(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """Compute the importance-weighted policy gradient with a KL penalty on a few tokens (KL-Cov).

    ::

        L = -A · ratio + penalised · ppo_kl_coef · |log π - log π_old|

    Options: ``kl_cov_ratio`` (0.0002), ``ppo_kl_coef`` (0.1), see :func:`prepare_kl_cov`. Metrics:
    ``kl_penalised`` (tokens with the penalty), ``kl_abs`` (``|log π - log π_old|``).
    """
    options = {**_KL_COV, **inputs.options}
    tokens = read_tokens(inputs)
    penalised = _prepared("kl_cov", "penalised", inputs, tokens)
    distance = tokens.raw_log_ratio.abs()
    losses = -tokens.advantages * tokens.log_ratio.exp()
    losses = losses + torch.where(penalised, options["ppo_kl_coef"] * distance, 0.0)
    return PolicyLossOutput(losses, {"kl_penalised": penalised.to(losses.dtype), "kl_abs": distance.detach()})


def _ppo(inputs: PolicyLossInputs, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Return PPO's losses without dual clip, and a mask of the tokens whose clip is active."""
    ratio = tokens.log_ratio.exp()
    surrogate = -tokens.advantages * ratio
    bounded = -tokens.advantages * ratio.clamp(1.0 - inputs.clip_ratio_low, 1.0 + inputs.clip_ratio_high)
    return torch.maximum(surrogate, bounded), bounded > surrogate


def _covariance(tokens: Tokens) -> Tensor:
    """Return each token's share of the covariance over the batch, without gradient."""
    count = tokens.chosen.sum().clamp(min=1)
    log_probs = tokens.log_probs.detach()
    return (tokens.advantages - tokens.advantages.sum() / count) * (log_probs - log_probs.sum() / count)


def _largest(values: Tensor, count: int) -> Tensor:
    """Return a mask of the ``count`` largest values, bool ``[B, T]``."""
    flat = values.flatten()
    picked = torch.zeros_like(flat, dtype=torch.bool)
    picked[flat.topk(min(count, len(flat))).indices] = True
    return picked.view_as(values)


def _hash(tokens: Tokens) -> Tensor:
    """Return a 31-bit hash of each token's advantage and old log-prob, int64 ``[B, T]``."""
    mixed = tokens.advantages.float().view(torch.int32).long() * 0x9E3779B1
    mixed = mixed ^ (tokens.old_log_probs.float().view(torch.int32).long() * 0x85EBCA77)
    for shift in (15, 13, 16):
        mixed = (mixed ^ ((mixed >> shift) & 0xFFFF_FFFF)) * 0x2C1B3C6D & 0x7FFF_FFFF_FFFF
    return (mixed >> 8) & 0x7FFF_FFFF


def _check_share(name: str, share: float) -> None:
    if not share > 0:
        raise ValueError(f"{name} must be greater than 0, got {share}")


def _prepared(part: str, name: str, inputs: PolicyLossInputs, tokens: Tokens) -> Tensor:
    """Return the prepared column as bool ``[B, T]``, False where the mask is zero."""
    column = inputs.prepared.get(name)
    if column is None:
        raise ValueError(
            f"{part} compares the tokens of the whole batch, so it needs the prepared column {name!r}; "
            "give inputs.prepared what prepare_policy_loss gives for the batch before it is split"
        )
    if column.shape != tokens.chosen.shape:
        raise ValueError(f"prepared {name!r} is {list(column.shape)}, but the mask is {list(tokens.chosen.shape)}")
    return tokens.chosen & (column > 0.5)
