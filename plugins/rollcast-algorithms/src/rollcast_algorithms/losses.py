"""Picklable loss functions for engines, composed of the chosen functions and called once per micro-batch.

Metrics are shares that add up over micro-batches and ranks, as required by the engine contract.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from rollcast.contracts.algorithm import (
    KlPenalty,
    LossAggregation,
    Needs,
    PolicyLoss,
    PolicyLossInputs,
    needs_of,
    needs_vocabulary,
    prepare_policy_loss,
    prepares_batch,
)
from rollcast.contracts.engine import LossInputs, LossOutput
from rollcast.errors import ColumnError
from rollcast_algorithms._masking import masked
from rollcast_algorithms.aggregation import read_denominators, token_mean

__all__ = ["PREPARED", "PpoLoss", "SftLoss", "make_ppo_loss"]

PREPARED = "policy_loss/"
"""Prefix of the columns that a policy loss prepared from the whole batch."""


@dataclass(frozen=True)
class PpoLoss:
    """The actor's loss: a policy loss, minus an entropy bonus, plus a KL penalty.

    ::

        loss = agg(w · policy_loss) - entropy_coeff · agg(entropy) + kl_loss_coef · agg(KL(π ‖ π_ref))

    with w the importance weights of a rollout correction, or 1. The loss reads the columns ``old_log_probs`` and
    ``advantages``; ``rollout_is_weights`` if ``use_rollout_is_weights``; ``ref_log_prob`` if there is a KL penalty over
    the sampled tokens (the engine computes a penalty over the whole vocabulary); the columns that the policy loss
    declares; the columns that :meth:`prepare` returned; and ``sequence_tokens`` if rollouts have several rows. Metrics
    are ``actor/pg_loss``, ``actor/entropy_loss`` (if the engine computed the entropy), ``actor/kl_loss`` (if there is a
    KL penalty), and ``actor/<name>`` for every metric of the policy loss, averaged over the mini-batch's tokens that
    are in the batch.

    Attributes:
        policy_loss, aggregation, kl_penalty: functions from the registries.
        clip_ratio_low, clip_ratio_high, clip_ratio_c: see :class:`PolicyLossInputs`.
        entropy_coeff: weight of the entropy bonus; must be 0 unless the engine computes the entropy.
        kl_loss_coef: weight of the KL penalty.
        options: options of the policy loss.
        use_rollout_is_weights: True to multiply the policy loss by the column ``rollout_is_weights``.

    Raises:
        ValueError: at construction, ``kl_loss_coef`` is set without ``kl_penalty``; when called, the engine returned no
            log-probs, or not the entropy or vocabulary KL that the loss needs, or the shapes do not match.
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

    def __post_init__(self) -> None:
        if self.kl_loss_coef and self.kl_penalty is None:
            raise ValueError(f"kl_loss_coef is {self.kl_loss_coef}, but there is no kl_penalty to weigh")

    @property
    def needs(self) -> Needs:
        """Columns that the loss reads, in addition to those of :meth:`prepare`."""
        declared = needs_of(self.policy_loss)
        names = {"old_log_probs", "advantages"} | declared.columns
        if self.use_rollout_is_weights:
            names.add("rollout_is_weights")
        if self.kl_penalty is not None and not needs_vocabulary(self.kl_penalty):
            names.add("ref_log_prob")
        return Needs(frozenset(names), declared.optional)

    @property
    def prepares(self) -> bool:
        """True if :meth:`prepare` computes columns."""
        return prepares_batch(self.policy_loss)

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
        """
        inputs = self._inputs(
            old_log_probs, old_log_probs, advantages, response_mask, {}, {} if columns is None else columns
        )
        return {PREPARED + name: column for name, column in prepare_policy_loss(self.policy_loss, inputs).items()}

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
        old_log_probs, advantages = _column(inputs, "old_log_probs"), _column(inputs, "advantages")
        prepared = {
            name.removeprefix(PREPARED): column for name, column in inputs.columns.items() if name.startswith(PREPARED)
        }
        policy = self.policy_loss(self._inputs(log_probs, old_log_probs, advantages, mask, prepared, inputs.columns))
        losses = policy.losses
        if self.use_rollout_is_weights:
            losses = losses * masked("rollout_is_weights", _column(inputs, "rollout_is_weights"), mask).detach()
        loss = self.aggregation(losses, mask, counts)
        metrics = {"actor/pg_loss": loss.detach()}
        present = counts if counts.present_tokens is None else replace(counts, tokens=counts.present_tokens)
        for name, values in policy.metrics.items():
            metrics[f"actor/{name.removeprefix('actor/')}"] = token_mean(values.detach(), mask, present)
        if inputs.entropy is not None:
            entropy = self.aggregation(inputs.entropy, mask, counts)
            metrics["actor/entropy_loss"] = entropy.detach()
            if self.entropy_coeff:
                loss = loss - self.entropy_coeff * entropy
        elif self.entropy_coeff:
            raise ValueError(f"entropy_coeff is {self.entropy_coeff}, but the engine gave no entropy")
        if self.kl_penalty is not None:
            kl_loss = self.aggregation(self._kl(inputs, self.kl_penalty), mask, counts)
            metrics["actor/kl_loss"] = kl_loss.detach()
            if self.kl_loss_coef:
                loss = loss + self.kl_loss_coef * kl_loss
        return LossOutput(loss, metrics)

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
        ref_log_probs = masked("ref_log_prob", _column(inputs, "ref_log_prob"), mask)
        return penalty(masked("log_probs", _log_probs(inputs), mask), ref_log_probs)


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
) -> PpoLoss:
    """Build the actor's loss function; see :class:`PpoLoss`.

    Raises:
        ValueError: ``kl_loss_coef`` is set without ``kl_penalty``.
    """
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


def _column(inputs: LossInputs, name: str) -> Tensor:
    try:
        return inputs.columns[name]
    except KeyError:
        present = ", ".join(sorted(inputs.columns)) or "none"
        raise ColumnError(f"the PPO loss needs the column {name!r}; the batch has: {present}") from None
