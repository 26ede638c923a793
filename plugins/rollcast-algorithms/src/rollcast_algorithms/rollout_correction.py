"""Correction for the gap between the policy that sampled and the policy in training.

The rollout engine's log-probs ``log μ`` differ from the trainer's ``log π_old`` for the same tokens, because of other
kernels, other precision, or older weights. With ``d = log π_old - log μ``:

* importance weights multiply the policy loss; they are truncated, or set to zero outside two bounds (IcePop);
* rejection and veto remove tokens or whole rows from the response mask;
* bypass uses ``log μ`` as ``log π_old`` and skips the pass that computes the latter, while the gap is small enough.

Call :func:`correct_rollout` once with the whole batch, as jagged columns. Estimate the advantages with the mask from
*before* the correction: a score is on a row's last token, and would be lost if that token is rejected.

Sources: Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training
(truncated weights); Ling Team 2025, Every Step Evolves, arXiv:2510.18855 (IcePop); Liu, Li et al. 2025,
When Speed Kills Stability (sequence level, rejection, veto). The keys are verl's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollcast.protocol import Jagged
from rollcast_algorithms._masking import widen
from rollcast_algorithms.schemas import RolloutCorrectionConfig

__all__ = [
    "MAX_LOG_RATIO",
    "LogRatios",
    "RolloutCorrection",
    "correct_rollout",
    "importance_weights",
    "may_bypass",
    "measure_gap",
    "rejection",
    "veto",
]

MAX_LOG_RATIO = 20.0
"""Bound to which log-ratios of a token or a row are clamped (±) before ``exp``; verl's value."""


@dataclass(frozen=True)
class LogRatios:
    """Log-ratios ``log π_old - log μ`` of the tokens under the mask, without gradient.

    Axes: ``n`` tokens under the mask, ``B`` rows.

    Attributes:
        values: log-ratios, float ``[n]``.
        rows: row index of each token, int64 ``[n]``.
        lengths: number of tokens of each row, int64 ``[B]``.
    """

    values: Tensor
    rows: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, old_log_probs: Jagged, rollout_log_probs: Jagged, response_mask: Jagged) -> LogRatios:
        """Compute the log-ratios of the tokens under the mask.

        Raises:
            ValueError: the columns have different numbers of tokens.
        """
        inside = response_mask.values.bool()
        for name, column in (("old_log_probs", old_log_probs), ("rollout_log_probs", rollout_log_probs)):
            if len(column.values) != len(inside):
                raise ValueError(f"{name} has {len(column.values)} tokens, but the mask has {len(inside)}")
        old, rollout = (widen(column.values[inside]) for column in (old_log_probs, rollout_log_probs))
        return cls((old - rollout).detach(), response_mask.rows[inside], response_mask.sums().long())

    def sums(self, values: Tensor) -> Tensor:
        """Return the sums of ``values`` ``[n]`` over each row's tokens, ``[B]``."""
        return values.new_zeros(len(self.lengths)).index_add_(0, self.rows, values)

    def means(self, values: Tensor) -> Tensor:
        """Return the means of ``values`` ``[n]`` over each row's tokens, ``[B]``; 0 for a row without any."""
        return self.sums(values) / self.lengths.clamp(min=1)

    def extremes(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the minimum and maximum of ``values`` ``[n]`` in each row, ``[B]``; 0 for a row without tokens."""
        zeros = values.new_zeros(len(self.lengths))
        return (
            zeros.scatter_reduce(0, self.rows, values, "amin", include_self=False),
            zeros.scatter_reduce(0, self.rows, values, "amax", include_self=False),
        )

    def token_share(self, tokens: Tensor) -> float:
        """Return the fraction of tokens selected by ``tokens``, bool ``[n]``."""
        return float(tokens.sum()) / max(len(tokens), 1)

    def row_share(self, rows: Tensor) -> float:
        """Return the fraction of rows with tokens that ``rows``, bool ``[B]``, selects."""
        some = self.lengths > 0
        return float((rows & some).sum()) / max(int(some.sum()), 1)


@dataclass(frozen=True)
class RolloutCorrection:
    """The result of a rollout correction.

    Attributes:
        weights: importance weights for the column ``rollout_is_weights``, jagged float32, zero where the input mask is
            zero; None without ``rollout_is``.
        response_mask: the input mask with zeros at rejected tokens, jagged, of the same dtype.
        metrics: ``rollout_corr/…``, means over the input mask's tokens, or over its rows with tokens.
    """

    weights: Jagged | None
    response_mask: Jagged
    metrics: Mapping[str, float]


def correct_rollout(
    old_log_probs: Jagged, rollout_log_probs: Jagged, response_mask: Jagged, config: RolloutCorrectionConfig
) -> RolloutCorrection:
    """Compute the importance weights, the mask and the metrics of a whole batch.

    Args:
        old_log_probs, rollout_log_probs: log-probs of the sampled tokens, with the row lengths of the mask.
        response_mask: mask of the policy's tokens, jagged.
        config: options of the correction; ``rollout_is=auto`` means no weights.

    Raises:
        ValueError: the columns do not match, or a level, rule or threshold is invalid.
    """
    config = config.resolved(is_off_policy=False)
    ratios = LogRatios.of(old_log_probs, rollout_log_probs, response_mask)
    metrics = _gap_metrics(ratios)
    inside = response_mask.values.bool()
    weights = None
    if config.rollout_is is not None:
        lower, upper = _bounds("rollout_is_threshold", config.rollout_is_threshold)
        importance = importance_weights(ratios, config.rollout_is, lower, upper, config.rollout_is_batch_normalize)
        metrics |= _weight_metrics(importance, ratios, config.rollout_is, lower, upper)
        weights = response_mask.with_values(torch.zeros(len(inside)).masked_scatter_(inside, importance))
    keep = torch.ones(len(ratios.values), dtype=torch.bool)
    if config.rollout_rs is not None:
        keep &= rejection(ratios, config.rollout_rs, config.rollout_rs_threshold)
    if config.rollout_token_veto_threshold is not None:
        vetoed = veto(ratios, config.rollout_token_veto_threshold)
        metrics["rollout_corr/rollout_veto_fraction"] = ratios.row_share(vetoed)
        keep &= vetoed[ratios.rows].logical_not()
    metrics["rollout_corr/rollout_rs_masked_fraction"] = ratios.token_share(~keep)
    metrics["rollout_corr/rollout_rs_seq_masked_fraction"] = ratios.row_share(ratios.sums((~keep).long()) > 0)
    chosen = torch.zeros_like(inside).masked_scatter_(inside, keep)
    return RolloutCorrection(weights, response_mask.with_values(response_mask.values * chosen), metrics)


def importance_weights(
    ratios: LogRatios, level: str, lower: float | None, upper: float, batch_normalize: bool = False
) -> Tensor:
    """Compute the importance weights of the sampled tokens.

    With ``d`` the log-ratio, and ``w_t = exp(d_t)`` at the level ``token``, or ``w_t = exp(Σ_u d_u)`` over the row at
    the level ``sequence``::

        truncation (lower is None)     min(w, upper)
        IcePop                         w where lower ≤ w ≤ upper, 0 elsewhere

    Args:
        ratios: log-ratios of the batch.
        level: ``token`` or ``sequence``.
        lower, upper: bounds of the weights.
        batch_normalize: True to divide by the mean over the batch's tokens, or over its rows at the level
            ``sequence``.

    Returns:
        float32 ``[n]``.

    Raises:
        ValueError: the level is unknown.
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"rollout_is is {level!r}; valid: token, sequence, or null for no weights")
    raw = _at_level(ratios, level).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weights = raw.clamp(max=upper) if lower is None else torch.where((raw >= lower) & (raw <= upper), raw, 0.0)
    if batch_normalize:
        # At the sequence level, all weights of a row are equal, so their mean is the row's weight.
        values = weights if level == "token" else ratios.means(weights)
        count = len(weights) if level == "token" else int((ratios.lengths > 0).sum())
        mean = values.sum() / max(count, 1)
        weights = torch.where(mean > 1e-8, weights / mean.clamp(min=1e-8), weights)
    return weights.float()


def rejection(ratios: LogRatios, rules: str, thresholds: str | float | None) -> Tensor:
    """Return the tokens that every rule keeps.

    A rule is a level and an estimate of the divergence, such as ``token_k1`` or ``seq_mean_k3``;
    several rules are separated by commas. With ``d`` the log-ratio of a token, clamped to ±20::

        k1 = -d        k2 = d² / 2        k3 = exp(d) - 1 - d

    The level ``token`` compares each token; ``seq_sum``, ``seq_mean`` and ``seq_max`` compare the sum, the mean and the
    extremes over a row's tokens, and keep or reject the row. A rule with k2 or k3 keeps values up to its threshold. A
    rule with k1 has two bounds of the ratio ``μ / π_old``, written ``0.5_2.0``, and keeps ``log lower ≤ k1 ≤ log
    upper``; a single number u stands for ``1/u`` and u.

    Args:
        ratios: log-ratios of the batch.
        rules: names of the rules, separated by commas.
        thresholds: one threshold for all rules, or one per rule, separated by commas.

    Returns:
        Mask of the kept tokens, bool ``[n]``.

    Raises:
        ValueError: a rule or threshold is invalid, or their numbers differ.
    """
    names = [name.strip() for name in rules.split(",") if name.strip()]
    texts = [text.strip() for text in str(thresholds).split(",") if text.strip()]
    if not names or thresholds is None or len(texts) not in (1, len(names)):
        raise ValueError(
            f"rollout_rs is {rules!r} and rollout_rs_threshold {thresholds!r}; give one threshold for all rules, "
            "or one for each, separated by commas"
        )
    keep = torch.ones(len(ratios.values), dtype=torch.bool)
    for name, text in zip(names, texts * len(names) if len(texts) == 1 else texts, strict=True):
        level, _, estimate = name.rpartition("_")
        if level not in _LEVELS or estimate not in _ESTIMATES:
            valid = ", ".join(f"{one}_{other}" for one in _LEVELS for other in _ESTIMATES)
            raise ValueError(f"rollout_rs names {name!r}; valid: {valid}")
        divergence = _ESTIMATES[estimate](ratios.values.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
        low, high = _rule_bounds(name, estimate, text)
        smallest, largest = _LEVELS[level](divergence, ratios)
        keep = keep & (smallest >= low) & (largest <= high)
    return keep


def veto(ratios: LogRatios, threshold: float) -> Tensor:
    """Return the rows with a token whose ratio ``π_old / μ`` is below ``threshold``, bool ``[B]``.

    Such a token is very unlikely under the policy in training, so the tokens after it are from another distribution.

    Raises:
        ValueError: the threshold is not above 0.
    """
    if not threshold > 0:
        raise ValueError(f"rollout_token_veto_threshold must be greater than 0, got {threshold}")
    return ratios.sums((ratios.values < math.log(threshold)).long()) > 0


def measure_gap(old_log_probs: Jagged, rollout_log_probs: Jagged, response_mask: Jagged) -> dict[str, float]:
    """Measure the divergence of the two policies on the sampled tokens.

    With ``d = log π_old - log μ``, over the tokens under the mask: ``rollout_corr/kl`` is mean(-d),
    ``k3_kl`` mean(exp(d) - 1 - d), both estimates of KL(μ ‖ π_old) in nats per token; ``chi2_token`` is
    mean(exp(d)²) - 1; ``log_ppl_abs_diff`` is the mean over rows of |mean of d|. In ``exp``, d is clamped to ±20.
    Without tokens, all metrics are 0.

    Raises:
        ValueError: the columns have different numbers of tokens.
    """
    return _gap_metrics(LogRatios.of(old_log_probs, rollout_log_probs, response_mask))


def _gap_metrics(ratios: LogRatios) -> dict[str, float]:
    d = ratios.values.double()
    count, rows = max(len(d), 1), max(int((ratios.lengths > 0).sum()), 1)
    bounded = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    means = {
        "kl": -d.sum() / count,
        "k3_kl": (bounded.expm1() - d).sum() / count,
        "chi2_token": (2.0 * bounded).expm1().sum() / count,
        "log_ppl_abs_diff": ratios.means(d).abs().sum() / rows,
    }
    return {f"rollout_corr/{name}": float(value) for name, value in means.items()}


def may_bypass(config: RolloutCorrectionConfig, last_k3_kl: float | None, steps_since: int) -> bool:
    """Return True if the next step may use the rollout's log-probs as the old ones.

    Without ``bypass_max_kl``, bypassing is always allowed. Otherwise, the last measured gap ``rollout_corr/k3_kl`` must
    be at most ``bypass_max_kl``, and the gap must be measured again every ``bypass_check_freq`` steps.

    Args:
        config: options of the correction; without ``bypass_mode``, the result is False.
        last_k3_kl: last measured gap in nats per token; None if not measured yet.
        steps_since: number of steps since the measurement; 1 in the next step.
    """
    if not config.bypass_mode:
        return False
    if config.bypass_max_kl is None:
        return True
    if last_k3_kl is None or steps_since >= config.bypass_check_freq:
        return False
    return last_k3_kl <= config.bypass_max_kl


def _at_level(ratios: LogRatios, level: str) -> Tensor:
    """Return the log-ratio of each token, or of each token's row at the level ``sequence``, ``[n]``."""
    return ratios.values if level == "token" else ratios.sums(ratios.values)[ratios.rows]


def _each_token(values: Tensor, ratios: LogRatios) -> tuple[Tensor, Tensor]:  # noqa: ARG001 - one of _LEVELS
    return values, values


def _row_sums(values: Tensor, ratios: LogRatios) -> tuple[Tensor, Tensor]:
    total = ratios.sums(values)[ratios.rows]
    return total, total


def _row_means(values: Tensor, ratios: LogRatios) -> tuple[Tensor, Tensor]:
    mean = ratios.means(values)[ratios.rows]
    return mean, mean


def _row_extremes(values: Tensor, ratios: LogRatios) -> tuple[Tensor, Tensor]:
    low, high = ratios.extremes(values)
    return low[ratios.rows], high[ratios.rows]


# Functions that return, for each token [n], the smallest and largest value that the level compares.
_LEVELS: Mapping[str, Callable[[Tensor, LogRatios], tuple[Tensor, Tensor]]] = {
    "token": _each_token,
    "seq_sum": _row_sums,
    "seq_mean": _row_means,
    "seq_max": _row_extremes,
}
_ESTIMATES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: -d,
    "k2": lambda d: 0.5 * d.square(),
    "k3": lambda d: d.expm1() - d,
}


def _rule_bounds(name: str, estimate: str, text: str) -> tuple[float, float]:
    key = f"rollout_rs_threshold of {name}"
    lower, upper = _bounds(key, text)
    if estimate == "k1":
        return math.log(1.0 / upper if lower is None else lower), math.log(upper)
    if lower is not None:
        raise ValueError(f"{key} is {text!r}; a rule with {estimate} takes one number, what it keeps at most")
    return -math.inf, upper


def _bounds(key: str, text: str | float | Sequence[float]) -> tuple[float | None, float]:
    """Parse bounds: ``2.0`` is (None, 2.0); ``0.5_2.0`` and ``[0.5, 2.0]`` are (0.5, 2.0)."""
    parts = str(text).split("_") if isinstance(text, str | float | int) else list(text)
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not all(0 < number < math.inf for number in numbers) or numbers != sorted(numbers):
        raise ValueError(f"{key} is {text!r}; it must be a number above 0, or two in order, such as 0.5_2.0")
    return (None if len(numbers) == 1 else numbers[0]), numbers[-1]


def _weight_metrics(
    weights: Tensor, ratios: LogRatios, level: str, lower: float | None, upper: float
) -> dict[str, float]:
    total = _at_level(ratios, level)
    count = max(len(weights), 1)
    values = weights.double()
    mean = values.sum() / count
    square = values.square().sum() / count
    metrics = {
        "mean": float(mean),
        "max": float(values.max()) if values.numel() else 0.0,
        # The effective sample size as a fraction of the tokens.
        "eff_sample_size": float(mean.square() / square) if square > 0 else 0.0,
        "ratio_fraction_high": ratios.token_share(total > math.log(upper)),
        "ratio_fraction_low": ratios.token_share(total < math.log(lower or 1.0 / upper)),
    }
    return {f"rollout_corr/rollout_is_{name}": value for name, value in metrics.items()}
