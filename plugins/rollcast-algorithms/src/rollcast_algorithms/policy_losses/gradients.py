"""Policy gradients without clipping, with a weight on ``log π`` or a penalty on the ratio.

Shapes and errors are those of :mod:`rollcast_algorithms.policy_losses.clipped`.
"""

from __future__ import annotations

import math

import torch

from rollcast.contracts.algorithm import PolicyLossInputs, PolicyLossOutput, policy_loss
from rollcast_algorithms._masking import masked
from rollcast_algorithms.policy_losses._tokens import MAX_LOG_RATIO, Tokens, read_tokens

__all__ = ["DPPO_EPSILON", "VESPO_MIN_WEIGHT", "dppo_kl", "dppo_tv", "dro", "gpg", "icepop", "topr", "vespo"]

DPPO_EPSILON = 1e-8
"""Constant added to the probability of all other tokens before the logarithm; verl's value."""

VESPO_MIN_WEIGHT = 1e-8
"""Lower bound of a row's importance weight in VESPO; TRL's value."""

_VESPO = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}


@policy_loss(scales_with_advantage=True)
def gpg(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """Compute the plain policy gradient (GPG), which ignores the old log-probs.

    ::

        L = -A · log π

    Source: Chu et al. 2025, GPG, arXiv:2504.02546.
    """
    tokens = read_tokens(inputs)
    return PolicyLossOutput(-tokens.log_probs * tokens.advantages)


@policy_loss(options={"dro_beta"})
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
    beta = {"dro_beta": None, **inputs.options}["dro_beta"]
    if beta is None or not beta > 0:
        raise ValueError(f"dro needs dro_beta, a number above 0, got {beta}; set actor.policy_loss_kwargs.dro_beta")
    tokens = read_tokens(inputs)
    losses = -(tokens.log_probs * tokens.advantages - 0.5 * beta * tokens.raw_log_ratio.square())
    return PolicyLossOutput(losses, {"kl": tokens.kl})


@policy_loss(scales_with_advantage=True)
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
    tokens = read_tokens(inputs)
    total = tokens.raw_log_ratio.detach().sum(-1, keepdim=True)
    bad = tokens.advantages < 0
    weight = torch.where(bad, total.clamp(-MAX_LOG_RATIO, 0.0).exp(), 1.0)
    metrics = {"clip_fraction": (bad & (total > 0)).to(weight.dtype), "kl": tokens.kl}
    return PolicyLossOutput(-weight * tokens.advantages * tokens.log_probs, metrics)


@policy_loss(scales_with_advantage=True)
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
    tokens = read_tokens(inputs)
    change = _probability(tokens.log_probs.detach()) - _probability(tokens.old_log_probs)
    keep = torch.where(tokens.advantages > 0, change <= inputs.clip_ratio_high, change >= -inputs.clip_ratio_low)
    return _truncated(inputs, tokens, keep)


@policy_loss(scales_with_advantage=True)
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


@policy_loss(scales_with_advantage=True, options={"threshold_lower", "threshold"})
def icepop(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """Compute the policy gradient with importance weights that are zero outside two bounds (IcePop).

    ::

        w = sg(ratio) where threshold_lower ≤ ratio ≤ threshold, 0 elsewhere
        L = -w · A · log π

    With ``algorithm.rollout_correction.bypass_mode``, ``π_old`` is the rollout's policy, and the loss is verl's
    ``bypass_mode`` with ``loss_type=reinforce`` and token-level IcePop.

    Options: ``threshold_lower`` (0.5), ``threshold`` (5.0). Metrics: ``clip_fraction`` (ratio outside the bounds),
    ``kl``.

    Source: Ling Team 2025, Every Step Evolves, arXiv:2510.18855.

    Raises:
        ValueError: the bounds are not positive and in order.
    """
    options = {"threshold_lower": 0.5, "threshold": 5.0, **inputs.options}
    low, high = float(options["threshold_lower"]), float(options["threshold"])
    if not 0 < low <= high:
        raise ValueError(f"icepop needs 0 < threshold_lower <= threshold, got {low} and {high}")
    tokens = read_tokens(inputs)
    ratio = tokens.log_ratio.detach().exp()
    inside = (ratio >= low) & (ratio <= high)
    losses = -torch.where(inside, ratio, 0.0) * tokens.advantages * tokens.log_probs
    return PolicyLossOutput(losses, {"clip_fraction": (~inside).to(losses.dtype), "kl": tokens.kl})


@policy_loss(optional={"rollout_is_weights"}, scales_with_advantage=True, options=_VESPO)
def vespo(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """Compute VESPO's loss: the policy gradient with a smooth, asymmetric weight of the row's importance ratio.

    With ``w`` the ratio of row i's whole response, times its importance weights v of a rollout correction if there is
    one, and k, λ those of the advantage's sign::

        w = exp(clamp(Σ_t (log π - log π_old) + Σ_t log v_t, log 1e-8, 20))
        φ = exp(λ + k · log w - λ · w)
        L = -sg(φ) · A · log π

    φ is 1 at w = 1 and greatest at w = k / λ. The loss applies the weights of a rollout correction itself, inside w.

    Options: ``vespo_k_pos`` (2.0) and ``vespo_lambda_pos`` (3.0) where A ≥ 0, ``vespo_k_neg`` (3.0) and
    ``vespo_lambda_neg`` (2.0) elsewhere; λ is at least 1e-4. Metrics: ``phi``, ``kl``.

    Source: VESPO: Variational Sequence-Level Soft Policy Optimization, arXiv:2602.10693; names, defaults and clamps
    are TRL's.
    """
    options = {name: float(value) for name, value in {**_VESPO, **inputs.options}.items()}
    tokens = read_tokens(inputs)
    total = tokens.log_ratio.detach().sum(-1, keepdim=True)
    floor = math.log(VESPO_MIN_WEIGHT)
    if "rollout_is_weights" in inputs.columns:
        weights = masked("rollout_is_weights", inputs.rollout_is_weights, tokens.chosen).detach()
        logs = weights.log().clamp(floor, MAX_LOG_RATIO)
        total = total + torch.where(tokens.chosen, logs, 0.0).sum(-1, keepdim=True)
    log_weight = total.clamp(floor, MAX_LOG_RATIO)
    good = tokens.advantages >= 0
    k = torch.where(good, options["vespo_k_pos"], options["vespo_k_neg"])
    slope = torch.where(good, options["vespo_lambda_pos"], options["vespo_lambda_neg"]).clamp(min=1e-4)
    phi = (slope + k * log_weight - slope * log_weight.exp()).exp().nan_to_num(nan=0.0, posinf=0.0)
    return PolicyLossOutput(-phi * tokens.advantages * tokens.log_probs, {"phi": phi, "kl": tokens.kl})


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
