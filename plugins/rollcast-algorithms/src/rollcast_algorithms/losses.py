"""Picklable loss functions for engines, composed of the chosen functions and called once per micro-batch.

Metrics are shares that add up over micro-batches and ranks, as required by the engine contract.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from rollcast.contracts.algorithm import (
    KlPenalty,
    LossAggregation,
    Needs,
    PolicyLoss,
    PolicyLossInputs,
    PolicyLossOutput,
    check_columns,
    check_type,
    needs_of,
    needs_vocabulary,
    prepare_policy_loss,
    prepares_batch,
)
from rollcast.contracts.engine import LossInputs, LossOutput
from rollcast.errors import ColumnError
from rollcast_algorithms._masking import masked
from rollcast_algorithms.aggregation import aggregate, read_denominators, token_mean
from rollcast_algorithms.kl import MAX_LOG_RATIO
from rollcast_algorithms.selection import keep_near_rows, select_high_entropy

__all__ = ["ENTROPY_COEFF", "HIGH_ENTROPY", "PREPARED", "PpoLoss", "SftLoss", "make_ppo_loss"]

PREPARED = "policy_loss/"
"""Prefix of the columns that a policy loss prepared from the whole batch."""

HIGH_ENTROPY: Final = "high_entropy"
"""Column of the tokens that ``top_entropy_quantile`` keeps, float32 ``[B, T]``; prepared from the whole batch."""

ENTROPY_COEFF: Final = "entropy_coeff"
"""Column of the step's weight of the entropy bonus, float ``[B]``, equal in all rows; with an adaptive weight only."""


@dataclass(frozen=True)
class PpoLoss:
    """The actor's loss: a policy loss, minus an entropy bonus, plus a KL penalty.

    ::

        loss = agg(m · w · policy_loss) - entropy_coeff · agg(entropy) + kl_loss_coef · agg(v · KL(π ‖ π_ref))

    with w the importance weights of a rollout correction, or 1; m 0 at tokens that ``off_policy_mask_threshold`` or
    ``top_entropy_quantile`` leaves out, else 1; and v the ratio of π to π_old with ``use_bias_correction_kl``, else 1.
    A policy loss that declares the column ``rollout_is_weights`` applies the weights itself, and w is 1.

    The loss reads the columns ``old_log_probs`` and ``advantages``; ``rollout_is_weights`` if
    ``use_rollout_is_weights``; ``ref_log_prob`` if there is a KL penalty over the sampled tokens (the engine computes a
    penalty over the whole vocabulary); ``rollout_log_probs``, if the batch has it, with ``off_policy_mask_threshold``;
    ``entropy`` in :meth:`prepare` with ``top_entropy_quantile``; the columns that the policy loss declares; the columns
    that :meth:`prepare` returned; and ``sequence_tokens`` if rollouts have several rows. Metrics
    are ``actor/pg_loss``, ``actor/entropy_loss`` (if the engine computed the entropy), ``actor/kl_loss`` (if there is a
    KL penalty), ``actor/token_entropy`` (the mean entropy of a token, with an adaptive weight),
    ``actor/off_policy_masked`` and ``actor/low_entropy_masked`` (shares of tokens left out), and ``actor/<name>`` for
    every metric of the policy loss, averaged over the mini-batch's tokens that are in the batch.

    Attributes:
        policy_loss, aggregation, kl_penalty: functions from the registries.
        clip_ratio_low, clip_ratio_high, clip_ratio_c: see :class:`PolicyLossInputs`.
        entropy_coeff: weight of the entropy bonus; must be 0 unless the engine computes the entropy.
        kl_loss_coef: weight of the KL penalty.
        options: options of the policy loss.
        use_rollout_is_weights: True to multiply the policy loss by the column ``rollout_is_weights``.
        off_policy_mask_threshold: see :func:`rollcast_algorithms.selection.keep_near_rows`; None keeps all rows.
        top_entropy_quantile: see :func:`rollcast_algorithms.selection.select_high_entropy`; 1 keeps all tokens.
        use_bias_correction_kl: True to multiply the KL penalty by the ratio of π to π_old, with its gradient, so that
            the gradient of ``k3`` is that of the KL in expectation.
        use_adaptive_entropy: True to read the weight of the entropy bonus from the column ``entropy_coeff``.

    Raises:
        ValueError: at construction, ``kl_loss_coef`` or ``use_bias_correction_kl`` is set without ``kl_penalty``, the
            latter with a penalty over the vocabulary, or ``top_entropy_quantile`` is not within 0 and 1; when called,
            the engine returned no log-probs, or not the entropy or vocabulary KL that the loss needs, or the shapes do
            not match.
        ColumnError: when called, the batch lacks a column.
    """

    policy_loss: PolicyLoss
    aggregation: LossAggregation
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    entropy_coeff: float = 0.0
    kl_penalty: KlPenalty | None = None
    kl_loss_coef: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)
    use_rollout_is_weights: bool = False
    off_policy_mask_threshold: float | None = None
    top_entropy_quantile: float = 1.0
    use_bias_correction_kl: bool = False
    use_adaptive_entropy: bool = False

    def __post_init__(self) -> None:
        if self.kl_loss_coef and self.kl_penalty is None:
            raise ValueError(f"kl_loss_coef is {self.kl_loss_coef}, but there is no kl_penalty to weigh")
        if self.use_bias_correction_kl and (self.kl_penalty is None or needs_vocabulary(self.kl_penalty)):
            raise ValueError(
                "use_bias_correction_kl corrects a KL penalty of the sampled tokens, and there is none; set kl_penalty "
                "to one such as k3 (a penalty over the vocabulary is exact)"
            )
        if not 0.0 <= self.top_entropy_quantile <= 1.0:
            raise ValueError(f"top_entropy_quantile must be between 0 and 1, got {self.top_entropy_quantile}")

    @property
    def needs(self) -> Needs:
        """Columns that the loss reads, in addition to those of :meth:`prepare`."""
        declared = needs_of(self.policy_loss)
        names = {"old_log_probs", "advantages"} | declared.columns
        if self.use_rollout_is_weights:
            names.add("rollout_is_weights")
        if self.kl_penalty is not None and not needs_vocabulary(self.kl_penalty):
            names.add("ref_log_prob")
        if self.top_entropy_quantile < 1.0:
            names.add("entropy")
        optional = set() if self.off_policy_mask_threshold is None else {"rollout_log_probs"}
        return Needs(frozenset(names), declared.optional | optional)

    @property
    def prepares(self) -> bool:
        """True if :meth:`prepare` computes columns."""
        return prepares_batch(self.policy_loss) or self.top_entropy_quantile < 1.0

    @property
    def weighs_rows_itself(self) -> bool:
        """True if the policy loss applies the weights of a rollout correction itself."""
        declared = needs_of(self.policy_loss)
        return "rollout_is_weights" in declared.columns | declared.optional

    def prepare(
        self,
        old_log_probs: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        columns: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Compute the columns that the policy loss needs from the whole batch, before the batch is split.

        Args:
            old_log_probs, advantages, response_mask: all response tokens of the batch in one row, ``[1, N]``.
            columns: further columns ``[1, N]``; the policy loss gets those that it declares.

        Returns:
            Columns ``[1, N]`` to add to the batch; empty for a loss that treats each row independently.

        Raises:
            ColumnError: ``columns`` lacks one that the loss needs.
        """
        read = {} if columns is None else columns
        inputs = self._inputs(old_log_probs, old_log_probs, advantages, response_mask, {}, read)
        prepared = prepare_policy_loss(self.policy_loss, inputs)
        prefixed = {PREPARED + name: column for name, column in prepared.items()}
        if self.top_entropy_quantile < 1.0:
            entropy = _column(read, "entropy")
            prefixed[HIGH_ENTROPY] = select_high_entropy(entropy, response_mask, self.top_entropy_quantile)
        return prefixed

    def _inputs(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        prepared: Mapping[str, Tensor],
        columns: Mapping[str, Tensor],
    ) -> PolicyLossInputs:
        return PolicyLossInputs(
            log_probs=log_probs,
            old_log_probs=old_log_probs,
            advantages=advantages,
            response_mask=response_mask,
            clip_ratio_low=self.clip_ratio_low,
            clip_ratio_high=self.clip_ratio_high,
            clip_ratio_c=self.clip_ratio_c,
            options=self.options,
            prepared=prepared,
            columns=needs_of(self.policy_loss).select(columns),
        )

    def __call__(self, inputs: LossInputs) -> LossOutput:
        mask, counts = inputs.response_mask, read_denominators(inputs)
        log_probs = _log_probs(inputs)
        columns = inputs.columns
        old_log_probs, advantages = _column(columns, "old_log_probs"), _column(columns, "advantages")
        prepared = {
            name.removeprefix(PREPARED): column for name, column in inputs.columns.items() if name.startswith(PREPARED)
        }
        policy: Any = self.policy_loss(
            self._inputs(log_probs, old_log_probs, advantages, mask, prepared, inputs.columns)
        )
        check_type(self.policy_loss, policy, PolicyLossOutput)
        losses, shares = policy.losses, dict(policy.metrics)
        metrics_of_loss = {f"values of the metric {name}": values for name, values in shares.items()}
        check_columns(self.policy_loss, {"losses": losses, **metrics_of_loss}, mask)
        if self.use_rollout_is_weights and not self.weighs_rows_itself:
            losses = losses * masked("rollout_is_weights", _column(columns, "rollout_is_weights"), mask).detach()
        for name, selection in self._selections(inputs, log_probs).items():
            losses = torch.where(selection, losses, 0.0)
            shares[name] = (~selection).to(losses.dtype)
        loss = aggregate(self.aggregation, losses, mask, counts)
        metrics = {"actor/pg_loss": loss.detach()}
        present = counts if counts.present_tokens is None else replace(counts, tokens=counts.present_tokens)
        for name, values in shares.items():
            metrics[f"actor/{name.removeprefix('actor/')}"] = token_mean(values.detach(), mask, present)
        if inputs.entropy is not None:
            entropy = aggregate(self.aggregation, inputs.entropy, mask, counts)
            metrics["actor/entropy_loss"] = entropy.detach()
            if self.use_adaptive_entropy:
                metrics["actor/token_entropy"] = token_mean(inputs.entropy.detach(), mask, counts)
                loss = loss - _column(columns, ENTROPY_COEFF)[:1].sum() * entropy
            elif self.entropy_coeff:
                loss = loss - self.entropy_coeff * entropy
        elif self.entropy_coeff or self.use_adaptive_entropy:
            raise ValueError(f"entropy_coeff is {self.entropy_coeff}, but the engine gave no entropy")
        if self.kl_penalty is not None:
            kl_loss = aggregate(self.aggregation, self._kl(inputs, self.kl_penalty), mask, counts)
            metrics["actor/kl_loss"] = kl_loss.detach()
            if self.kl_loss_coef:
                loss = loss + self.kl_loss_coef * kl_loss
        return LossOutput(loss, metrics)

    def _selections(self, inputs: LossInputs, log_probs: Tensor) -> dict[str, Tensor]:
        """Return masks of the tokens that the policy loss keeps, bool ``[B, T]``, by the metric of the others."""
        prepared, columns, mask = {}, inputs.columns, inputs.response_mask
        if self.off_policy_mask_threshold is not None:
            name = "rollout_log_probs" if "rollout_log_probs" in columns else "old_log_probs"
            sampled, threshold = _column(columns, name), self.off_policy_mask_threshold
            prepared["off_policy_masked"] = keep_near_rows(
                log_probs, sampled, _column(columns, "advantages"), mask, threshold
            )
        if self.top_entropy_quantile < 1.0:
            prepared["low_entropy_masked"] = masked(HIGH_ENTROPY, _column(columns, HIGH_ENTROPY), mask) != 0
        return prepared

    def _kl(self, inputs: LossInputs, penalty: KlPenalty) -> Tensor:
        if needs_vocabulary(penalty):
            if inputs.vocabulary_kl is None:
                raise ValueError(
                    "the KL penalty needs the log-probs of the whole vocabulary, which a loss function does not see, "
                    "and the engine gave no vocabulary_kl; ask it with ForwardSettings.vocabulary_kl, or choose a "
                    "penalty of the sampled tokens, such as k3+"
                )
            return inputs.vocabulary_kl
        # A KL penalty takes no mask, so masked values must be finite.
        mask = inputs.response_mask
        ref_log_probs = masked("ref_log_prob", _column(inputs.columns, "ref_log_prob"), mask)
        log_probs = masked("log_probs", _log_probs(inputs), mask)
        estimate = penalty(log_probs, ref_log_probs)
        check_columns(penalty, {"estimates": estimate}, mask)
        if not self.use_bias_correction_kl:
            return estimate
        old = masked("old_log_probs", _column(inputs.columns, "old_log_probs"), mask)
        return estimate * (log_probs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def make_ppo_loss(
    policy_loss: PolicyLoss,
    aggregation: LossAggregation,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
    entropy_coeff: float = 0.0,
    kl_penalty: KlPenalty | None = None,
    kl_loss_coef: float = 0.0,
    options: Mapping[str, Any] | None = None,
    use_rollout_is_weights: bool = False,
    off_policy_mask_threshold: float | None = None,
    top_entropy_quantile: float = 1.0,
    use_bias_correction_kl: bool = False,
    use_adaptive_entropy: bool = False,
) -> PpoLoss:
    """Build the actor's loss function; see :class:`PpoLoss`, also for what it raises."""
    return PpoLoss(
        policy_loss,
        aggregation,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
        clip_ratio_c=clip_ratio_c,
        entropy_coeff=entropy_coeff,
        kl_penalty=kl_penalty,
        kl_loss_coef=kl_loss_coef,
        options=dict(options or {}),
        use_rollout_is_weights=use_rollout_is_weights,
        off_policy_mask_threshold=off_policy_mask_threshold,
        top_entropy_quantile=top_entropy_quantile,
        use_bias_correction_kl=use_bias_correction_kl,
        use_adaptive_entropy=use_adaptive_entropy,
    )


@dataclass(frozen=True)
class SftLoss:
    """The mean negative log-likelihood of the response's tokens, ``-Σ log π / N``.

    Metric: ``sft/loss``, the same number.

    Raises:
        ValueError: when called, there are no log-probs.
    """

    def __call__(self, inputs: LossInputs) -> LossOutput:
        loss = token_mean(-_log_probs(inputs), inputs.response_mask, inputs.denominators)
        return LossOutput(loss, {"sft/loss": loss.detach()})


def _log_probs(inputs: LossInputs) -> Tensor:
    if inputs.log_probs is None:
        raise ValueError("the loss needs log_probs, which a value model does not give")
    return inputs.log_probs


def _column(columns: Mapping[str, Tensor], name: str) -> Tensor:
    try:
        return columns[name]
    except KeyError:
        present = ", ".join(sorted(columns)) or "none"
        raise ColumnError(f"the PPO loss needs the column {name!r}; the batch has: {present}") from None
