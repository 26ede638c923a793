"""Losses that treat the few tokens apart whose update would cost the most entropy: Clip-Cov, KL-Cov.

Such tokens are those with a large covariance of log-prob and advantage over the batch::

    cov_t = (A_t - mean(A)) · (log π_t - mean(log π))

Which they are depends on the whole batch, and so both losses leave that to a preparation
(:func:`rollcast.contracts.algorithm.policy_loss`), and read its column in the update: the result is
the same however the batch is split. Shapes and errors are those of
:mod:`rollcast_algorithms.policy_losses.clipped`; besides, ValueError without the prepared column.

Source of both: Cui et al. 2025, The Entropy Mechanism of Reinforcement Learning for Reasoning Language
Models, arXiv:2505.22617.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rollcast.contracts.algorithm import PolicyLossInputs, PolicyLossOutput, policy_loss
from rollcast_algorithms._options import read_options
from rollcast_algorithms.policy_losses._tokens import Tokens, read_tokens

__all__ = ["clip_cov", "kl_cov", "prepare_clip_cov", "prepare_kl_cov"]

_CLIP_COV = {"clip_cov_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0}
_KL_COV = {"kl_cov_ratio": 0.0002, "ppo_kl_coef": 0.1}


def prepare_clip_cov(inputs: PolicyLossInputs) -> Mapping[str, Tensor]:
    """Column ``dropped``: 1 at the tokens that :func:`clip_cov` leaves out.

    Of the tokens whose covariance lies between ``clip_cov_lb`` and ``clip_cov_ub``, and which PPO's
    clip leaves alone, a share ``clip_cov_ratio`` of all tokens (at least one) is drawn. The draw is by
    a hash of the token's numbers: it is the same wherever the row stands, and another in each step.
    """
    options = read_options("clip_cov", inputs.options, _CLIP_COV)
    _check_share("clip_cov_ratio", options["clip_cov_ratio"])
    tokens = read_tokens(inputs)
    covariance = _covariance(tokens)
    _, clipped = _ppo(inputs, tokens)
    eligible = tokens.chosen & ~clipped
    eligible &= (covariance > options["clip_cov_lb"]) & (covariance < options["clip_cov_ub"])
    count = max(int(options["clip_cov_ratio"] * int(tokens.chosen.sum())), 1)
    # float64 holds all 2^31 hashes exactly.
    draw = torch.where(eligible, _hash(tokens).double(), -1.0)
    return {"dropped": (_largest(draw, count) & eligible).to(torch.float32)}


@policy_loss(prepare=prepare_clip_cov)
def clip_cov(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """PPO's clipped surrogate, from which a few tokens of high covariance are dropped (Clip-Cov).

    ::

        L = max(-A · ratio, -A · clamp(ratio, 1 - low, 1 + high)) · (1 - dropped)

    Options: ``clip_cov_ratio`` (0.0002), ``clip_cov_lb`` (1.0), ``clip_cov_ub`` (5.0), see
    :func:`prepare_clip_cov`. Metrics: ``clip_fraction`` (dropped), ``kl``.
    """
    read_options("clip_cov", inputs.options, _CLIP_COV)
    tokens = read_tokens(inputs)
    dropped = _prepared("clip_cov", "dropped", inputs, tokens)
    losses, _ = _ppo(inputs, tokens)
    return PolicyLossOutput(
        torch.where(dropped, 0.0, losses), {"clip_fraction": dropped.to(losses.dtype), "kl": tokens.kl}
    )


def prepare_kl_cov(inputs: PolicyLossInputs) -> Mapping[str, Tensor]:
    """Column ``penalised``: 1 at the share ``kl_cov_ratio`` of tokens with the largest covariance."""
    options = read_options("kl_cov", inputs.options, _KL_COV)
    _check_share("kl_cov_ratio", options["kl_cov_ratio"])
    tokens = read_tokens(inputs)
    count = max(int(options["kl_cov_ratio"] * int(tokens.chosen.sum())), 1)
    covariance = torch.where(tokens.chosen, _covariance(tokens), -torch.inf)
    return {"penalised": (_largest(covariance, count) & tokens.chosen).to(torch.float32)}


@policy_loss(prepare=prepare_kl_cov)
def kl_cov(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """The importance-weighted policy gradient, with a KL penalty on a few tokens (KL-Cov).

    ::

        L = -A · ratio + penalised · ppo_kl_coef · |log π - log π_old|

    Options: ``kl_cov_ratio`` (0.0002), ``ppo_kl_coef`` (0.1), see :func:`prepare_kl_cov`. Metrics:
    ``kl_penalised`` (tokens with the penalty), ``kl_abs`` (``|log π - log π_old|``).
    """
    options = read_options("kl_cov", inputs.options, _KL_COV)
    tokens = read_tokens(inputs)
    penalised = _prepared("kl_cov", "penalised", inputs, tokens)
    distance = tokens.raw_log_ratio.abs()
    losses = -tokens.advantages * tokens.log_ratio.exp()
    losses = losses + torch.where(penalised, options["ppo_kl_coef"] * distance, 0.0)
    return PolicyLossOutput(losses, {"kl_penalised": penalised.to(losses.dtype), "kl_abs": distance.detach()})


def _ppo(inputs: PolicyLossInputs, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """PPO's losses without dual clip, and where the clip is active."""
    ratio = tokens.log_ratio.exp()
    surrogate = -tokens.advantages * ratio
    bounded = -tokens.advantages * ratio.clamp(1.0 - inputs.clip_ratio_low, 1.0 + inputs.clip_ratio_high)
    return torch.maximum(surrogate, bounded), bounded > surrogate


def _covariance(tokens: Tokens) -> Tensor:
    """Each token's share of the covariance over the batch, without gradient."""
    count = tokens.chosen.sum().clamp(min=1)
    log_probs = tokens.log_probs.detach()
    return (tokens.advantages - tokens.advantages.sum() / count) * (log_probs - log_probs.sum() / count)


def _largest(values: Tensor, count: int) -> Tensor:
    """Bool ``[B, T]``: the ``count`` largest."""
    flat = values.flatten()
    picked = torch.zeros_like(flat, dtype=torch.bool)
    picked[flat.topk(min(count, len(flat))).indices] = True
    return picked.view_as(values)


def _hash(tokens: Tokens) -> Tensor:
    """31 bits a token from the bits of its advantage and old log-prob, int64 ``[B, T]``."""
    mixed = tokens.advantages.float().view(torch.int32).long() * 0x9E3779B1
    mixed = mixed ^ (tokens.old_log_probs.float().view(torch.int32).long() * 0x85EBCA77)
    for shift in (15, 13, 16):
        mixed = (mixed ^ ((mixed >> shift) & 0xFFFF_FFFF)) * 0x2C1B3C6D & 0x7FFF_FFFF_FFFF
    return (mixed >> 8) & 0x7FFF_FFFF


def _check_share(name: str, share: float) -> None:
    if not share > 0:
        raise ValueError(f"{name} must be greater than 0, got {share}")


def _prepared(part: str, name: str, inputs: PolicyLossInputs, tokens: Tokens) -> Tensor:
    """The prepared column as bool ``[B, T]``, False where the mask is zero."""
    column = inputs.prepared.get(name)
    if column is None:
        raise ValueError(
            f"{part} compares the tokens of the whole batch, so it needs the prepared column {name!r}; "
            "give inputs.prepared what prepare_policy_loss gives for the batch before it is split"
        )
    if column.shape != tokens.chosen.shape:
        raise ValueError(f"prepared {name!r} is {list(column.shape)}, but the mask is {list(tokens.chosen.shape)}")
    return tokens.chosen & (column > 0.5)
