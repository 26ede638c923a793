"""Policy gradients without clipping, with a weight on ``log π`` or a penalty on the ratio.

Shapes and errors are those of :mod:`rollcast_algorithms.policy_losses.clipped`.
"""

from __future__ import annotations

import torch

from rollcast.contracts.algorithm import PolicyLossInputs, PolicyLossOutput
from rollcast_algorithms._options import read_options
from rollcast_algorithms.policy_losses._tokens import MAX_LOG_RATIO, Tokens, read_tokens

__all__ = ["DPPO_EPSILON", "dppo_kl", "dppo_tv", "dro", "gpg", "topr"]

DPPO_EPSILON = 1e-8
"""Constant added to the probability of all other tokens before the logarithm; verl's value."""


def gpg(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """Compute the plain policy gradient (GPG), which ignores the old log-probs.

    ::

        L = -A · log π

    Source: Chu et al. 2025, GPG, arXiv:2504.02546.
    """
    read_options("gpg", inputs.options, {})
    tokens = read_tokens(inputs)
    return PolicyLossOutput(-tokens.log_probs * tokens.advantages)


def dro(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """Compute the policy gradient with a quadratic penalty on the log-ratio (DRO).

    ::

        L = -(A · log π - (β / 2) · (log π - log π_old)²)

    Option: ``dro_beta``, β above 0; required. Metric: ``kl``.

    Source: Richemond et al. 2024, Offline Regularised Reinforcement Learning for Large Language Models
    Alignment, arXiv:2405.19107.

    Raises:
        ValueError: there is no ``dro_beta``, or it is not above 0.
    """
    beta = read_options("dro", inputs.options, {"dro_beta": None})["dro_beta"]
    if beta is None or not beta > 0:
        raise ValueError(f"dro needs dro_beta, a number above 0, got {beta}; set actor.policy_loss_kwargs.dro_beta")
    tokens = read_tokens(inputs)
    losses = -(tokens.log_probs * tokens.advantages - 0.5 * beta * tokens.raw_log_ratio.square())
    return PolicyLossOutput(losses, {"kl": tokens.kl})


def topr(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """Compute TOPR (tapered off-policy REINFORCE), which truncates the importance weights of bad responses only.

    With ``r_i`` the ratio of row i's whole response::

        r_i = exp(Σ_t (log π - log π_old))
        L   = -w · A · log π,    w = 1 where A ≥ 0,    w = sg(min(r_i, 1)) where A < 0

    A good response is learnt as in supervised training, however unlikely it has become; a bad response has no more
    effect once the policy no longer produces it.

    Metrics: ``clip_fraction`` (bad tokens whose ratio was above 1), ``kl``.

    Source: Le Roux et al. 2025, Tapered Off-Policy REINFORCE, arXiv:2503.14286.
    """
    read_options("topr", inputs.options, {})
    tokens = read_tokens(inputs)
    total = tokens.raw_log_ratio.detach().sum(-1, keepdim=True)
    bad = tokens.advantages < 0
    weight = torch.where(bad, total.clamp(-MAX_LOG_RATIO, 0.0).exp(), 1.0)
    metrics = {"clip_fraction": (bad & (total > 0)).to(weight.dtype), "kl": tokens.kl}
    return PolicyLossOutput(-weight * tokens.advantages * tokens.log_probs, metrics)


def dppo_tv(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """Compute the policy gradient inside a total-variation trust region (DPPO, binary TV).

    ::

        keep = π - π_old ≤  high    where A > 0
        keep = π - π_old ≥ -low     elsewhere
        L    = -keep · sg(min(ratio, c)) · A · log π

    ``clip_ratio_low`` and ``clip_ratio_high`` bound the change of the token's *probability*, and
    ``clip_ratio_c`` the importance weight (the paper uses 20).

    Metrics: ``clip_fraction`` (not kept), ``clip_fraction_lower`` (kept, with a truncated weight), ``kl``.

    Source: Qi et al. 2026, Rethinking the Trust Region in LLM Reinforcement Learning, arXiv:2602.04879.
    """
    read_options("dppo_tv", inputs.options, {})
    tokens = read_tokens(inputs)
    change = _probability(tokens.log_probs.detach()) - _probability(tokens.old_log_probs)
    keep = torch.where(tokens.advantages > 0, change <= inputs.clip_ratio_high, change >= -inputs.clip_ratio_low)
    return _truncated(inputs, tokens, keep)


def dppo_kl(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """Compute the policy gradient inside a KL trust region (DPPO, binary KL).

    With the divergence of "this token, or any other" between the two policies::

        KL   = π_old log(π_old / π) + (1 - π_old) log((1 - π_old + 1e-8) / (1 - π + 1e-8))
        keep = KL ≤ high  or  π ≤ π_old    where A > 0
        keep = KL ≤ low   or  π ≥ π_old    elsewhere
        L    = -keep · sg(min(ratio, c)) · A · log π

    ``clip_ratio_low`` and ``clip_ratio_high`` bound the KL in nats, ``clip_ratio_c`` the importance
    weight.

    Metrics and source: see :func:`dppo_tv`.
    """
    read_options("dppo_kl", inputs.options, {})
    tokens = read_tokens(inputs)
    new, old = _probability(tokens.log_probs.detach()), _probability(tokens.old_log_probs)
    others = ((1.0 - old + DPPO_EPSILON) / (1.0 - new + DPPO_EPSILON)).log()
    divergence = old * -tokens.raw_log_ratio.detach() + (1.0 - old) * others
    keep = torch.where(
        tokens.advantages > 0,
        (divergence <= inputs.clip_ratio_high) | (new <= old),
        (divergence <= inputs.clip_ratio_low) | (new >= old),
    )
    return _truncated(inputs, tokens, keep)


def _probability(log_probs: torch.Tensor) -> torch.Tensor:
    return log_probs.clamp(max=0.0).exp()


def _truncated(inputs: PolicyLossInputs, tokens: Tokens, keep: torch.Tensor) -> PolicyLossOutput:
    ratio = tokens.log_ratio.detach().exp()
    weight = torch.where(keep, ratio.clamp(max=inputs.clip_ratio_c), 0.0)
    metrics = {
        "clip_fraction": (~keep & tokens.chosen).to(weight.dtype),
        "clip_fraction_lower": (keep & (ratio > inputs.clip_ratio_c)).to(weight.dtype),
        "kl": tokens.kl,
    }
    return PolicyLossOutput(-weight * tokens.advantages * tokens.log_probs, metrics)
