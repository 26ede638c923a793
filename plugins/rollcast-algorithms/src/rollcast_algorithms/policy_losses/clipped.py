"""PPO's clipped surrogate and its variants, which keep the ratio of new to old policy near 1.

Inputs of all losses are ``[B, T]``; losses and metrics are float32 ``[B, T]``, zero where the mask is zero. The ratio
of a token or a row is clamped to ``exp(±20)``; where it is clamped, its gradient is zero. All losses raise ValueError
for shapes that do not match or an invalid clip range.
"""

from __future__ import annotations

import torch

from rollcast.contracts.algorithm import PolicyLossInputs, PolicyLossOutput, policy_loss
from rollcast_algorithms.policy_losses._tokens import read_tokens, row_mean

__all__ = ["MAX_SEQUENCE_LOG_RATIO", "cispo", "geo_mean", "gspo", "sapo", "vanilla"]

MAX_SEQUENCE_LOG_RATIO = 10.0
"""Upper bound to which GSPO's log-ratios are clamped; verl's value."""


@policy_loss(scales_with_advantage=True)
def vanilla(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """Compute PPO's clipped surrogate with clip-higher and dual clip.

    With ``ratio = exp(clamp(log π - log π_old, ±20))`` and low, high and c the three clip ratios::

        L  = max(-A · ratio, -A · clamp(ratio, 1 - low, 1 + high))
        L  = min(L, -A · c)      where A < 0

    The second line bounds the loss of a token with a negative advantage that has become much more likely. Where the
    log-ratio is clamped, the gradient is zero.

    Metrics, per token: ``clip_fraction`` (the first line's clip was active), ``clip_fraction_lower``
    (the second line's was), ``kl`` (the estimate ``log π_old - log π``, verl's ppo_kl).

    Sources: Schulman et al. 2017, Proximal Policy Optimization Algorithms, arXiv:1707.06347; Ye et
    al. 2020, Mastering Complex Control in MOBA Games, arXiv:1912.09729 (dual clip); Yu et al. 2025,
    DAPO, arXiv:2503.14476 (clip-higher).

    Args:
        inputs: all tensors ``[B, T]``.

    Returns:
        Losses and metrics, float32 ``[B, T]``, zero where the mask is zero.

    Raises:
        ValueError: ``clip_ratio_c`` is not above 1, a clip ratio is negative, or shapes differ.
    """
    low, high, dual = _clip_range(inputs)
    if not dual > 1.0:
        raise ValueError(f"clip_ratio_c must be greater than 1, got {dual}")
    tokens = read_tokens(inputs)
    advantages, ratio = tokens.advantages, tokens.log_ratio.exp()
    surrogate = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    clipped = torch.maximum(surrogate, bounded)
    ceiling = -advantages * dual
    bad = advantages < 0
    losses = torch.where(bad, torch.minimum(clipped, ceiling), clipped)
    metrics = {
        "clip_fraction": (bounded > surrogate).to(losses.dtype),
        "clip_fraction_lower": (bad & (clipped > ceiling)).to(losses.dtype),
        "kl": tokens.kl,
    }
    return PolicyLossOutput(losses, metrics)


@policy_loss(scales_with_advantage=True)
def gspo(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """Compute GSPO's loss: PPO's clip with sequence-level ratios.

    With ``n_i`` the number of tokens of row i, and sg the stop-gradient::

        s_i  = exp(Σ_t (log π - log π_old) / n_i)
        s_it = sg(s_i) · π / sg(π)
        L    = max(-A · s_it, -A · clamp(s_it, 1 - low, 1 + high))

    ``s_it`` has the value of ``s_i`` and the gradient of its own token. The paper uses clip ratios of about 3e-4 and
    the aggregation seq-mean-token-mean.

    Metrics: ``clip_fraction``, ``kl``.

    Source: Zheng et al. 2025, Group Sequence Policy Optimization, arXiv:2507.18071.
    """
    low, high, _ = _clip_range(inputs)
    tokens = read_tokens(inputs)
    shared = row_mean(tokens.raw_log_ratio.detach(), tokens)
    ratio = (tokens.log_probs - tokens.log_probs.detach() + shared).clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()
    surrogate = -tokens.advantages * ratio
    bounded = -tokens.advantages * ratio.clamp(1.0 - low, 1.0 + high)
    metrics = {"clip_fraction": (bounded > surrogate).to(surrogate.dtype), "kl": tokens.kl}
    return PolicyLossOutput(torch.maximum(surrogate, bounded), metrics)


@policy_loss(scales_with_advantage=True)
def geo_mean(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """Compute GMPO's loss, with one ratio per row, the geometric mean of its tokens' clipped ratios.

    With ``d = log π - log π_old``, ``s`` the sign of A, and the means over row i's tokens::

        c_t = s · min(s · d_t, s · clamp(d_t, -low, high))
        L_i = -mean(A) · exp(mean(c))

    Each token has its row's loss; aggregate with seq-mean-token-mean, as in the paper. The clip ratios bound the
    *logarithm* of the ratio (the paper uses 0.4).

    Metrics: ``clip_fraction`` and ``clip_fraction_lower``, tokens outside the range with a positive and with a negative
    advantage; ``kl``.

    Source: Zhao et al. 2025, Geometric-Mean Policy Optimization, arXiv:2507.20673.
    """
    low, high, _ = _clip_range(inputs)
    tokens = read_tokens(inputs)
    sign, d = tokens.advantages.sign(), tokens.log_ratio
    inside = d.clamp(-low, high)
    bounded = sign * torch.minimum(sign * d, sign * inside)
    losses = torch.where(tokens.chosen, -row_mean(tokens.advantages, tokens) * row_mean(bounded, tokens).exp(), 0.0)
    outside = inside != d
    metrics = {
        "clip_fraction": (outside & (sign > 0)).to(losses.dtype),
        "clip_fraction_lower": (outside & (sign < 0)).to(losses.dtype),
        "kl": tokens.kl,
    }
    return PolicyLossOutput(losses, metrics)


@policy_loss(scales_with_advantage=True)
def cispo(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """Compute CISPO's loss: the policy gradient with clipped importance weights, so that no token loses its gradient.

    ::

        L = -sg(clamp(ratio, 1 - low, 1 + high)) · A · log π

    Metrics: ``clip_fraction`` (ratio outside the range), ``kl``.

    Source: MiniMax 2025, MiniMax-M1, arXiv:2506.13585.
    """
    low, high, _ = _clip_range(inputs)
    tokens = read_tokens(inputs)
    ratio = tokens.log_ratio.detach().exp()
    weight = ratio.clamp(1.0 - low, 1.0 + high)
    metrics = {"clip_fraction": (ratio != weight).to(weight.dtype), "kl": tokens.kl}
    return PolicyLossOutput(-weight * tokens.advantages * tokens.log_probs, metrics)


@policy_loss(scales_with_advantage=True, options={"tau_pos", "tau_neg"})
def sapo(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """Compute SAPO's loss, with a soft gate instead of the clip.

    With ``τ`` = tau_pos where A > 0, else tau_neg::

        L = -A · (4 / τ) · sigmoid(τ · (ratio - 1))

    The gradient at ratio 1 is the policy gradient; it decays on both sides, faster for larger τ. The paper aggregates
    with seq-mean-token-mean.

    Options: ``tau_pos`` (1.0), ``tau_neg`` (1.05). Metric: ``kl``.

    Source: Gao et al. 2025, Soft Adaptive Policy Optimization, arXiv:2511.20347.

    Raises:
        ValueError: a τ is not above 0.
    """
    options = {"tau_pos": 1.0, "tau_neg": 1.05, **inputs.options}
    positive, negative = float(options["tau_pos"]), float(options["tau_neg"])
    if not (positive > 0 and negative > 0):
        raise ValueError(f"tau_pos and tau_neg must be greater than 0, got {positive} and {negative}")
    tokens = read_tokens(inputs)
    tau = torch.where(tokens.advantages > 0, positive, negative)
    gate = torch.sigmoid(tau * (tokens.log_ratio.exp() - 1.0)) * (4.0 / tau)
    return PolicyLossOutput(-gate * tokens.advantages, {"kl": tokens.kl})


def _clip_range(inputs: PolicyLossInputs) -> tuple[float, float, float]:
    low, high = inputs.clip_ratio_low, inputs.clip_ratio_high
    if not (low >= 0.0 and high >= 0.0):
        raise ValueError(f"clip_ratio_low and clip_ratio_high must not be negative, got {low} and {high}")
    return low, high, inputs.clip_ratio_c
