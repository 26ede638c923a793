"""Contracts of an algorithm's pure functions: advantages, policy losses, aggregations and KL penalties.

Each plugin is a plain function over tensors, registered by name. Axes: ``B`` rows (samples), ``T`` response
positions. Masks are ``[B, T]``, 1 where the policy chose the token; a result must not depend on values where the mask
is 0. A function declares the further tensors that it reads as named columns::

    @advantage(needs={"values"}, compares_samples=True)
    def lead(inputs: AdvantageInputs) -> AdvantageOutputs:
        score = torch.where(inputs.response_mask != 0, inputs.token_level_rewards - inputs.values, 0.0).sum(-1)
        return AdvantageOutputs.from_scores(score - inputs.group_mean(score), inputs.response_mask)

The first-party trainer writes the columns below. A function may declare any other column that a stage or the dataset
writes:

================================  ===========  ==========================================================
``values``                        ``[B, T]``   a critic's value of the state before each token
``old_log_probs``                 ``[B, T]``   log-probs of the sampled tokens before the update
``ref_log_prob``                  ``[B, T]``   the same under the reference policy
``sum_pi_squared``                ``[B, T]``   sum over the vocabulary of the squared old probabilities
``rollout_is_weights``            ``[B, T]``   importance weights of the rollout correction
``reward_baselines``              ``[B]``      score of a greedy response to the row's prompt
``reward_component/<name>``       ``[B]``      one component of the row's score
``turn_ids``                      ``[B, T]``   int32, turn of each token, not decreasing along a row
``anchor_ids``                    ``[B, T]``   int64, the same for turns that answer the same observation
================================  ===========  ==========================================================
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from rollcast.errors import ColumnError, ConfigError, PluginTypeError
from rollcast.plugins import Registry, is_callable

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "REWARD_COMPONENT",
    "AdvantageEstimator",
    "AdvantageInputs",
    "AdvantageOutputs",
    "Denominators",
    "InputColumns",
    "KlPenalty",
    "LossAggregation",
    "Needs",
    "PolicyLoss",
    "PolicyLossInputs",
    "PolicyLossOutput",
    "PolicyLossPreparation",
    "advantage",
    "advantages",
    "check_columns",
    "check_options",
    "check_type",
    "describe_function",
    "kl_penalties",
    "kl_penalty",
    "loss_aggregations",
    "needs_of",
    "needs_vocabulary",
    "policy_loss",
    "policy_losses",
    "prepare_policy_loss",
    "prepares_batch",
]

REWARD_COMPONENT = "reward_component/"
"""Prefix of the columns of score components; in ``needs`` it stands for all of these columns."""

_F = TypeVar("_F", bound=Callable[..., Any])
_C = TypeVar("_C")
_NEEDS, _PREPARE, _VOCABULARY = "__rollcast_needs__", "__rollcast_prepare__", "__rollcast_needs_vocabulary__"


@dataclass(frozen=True)
class Needs:
    """Columns that an estimator or a policy loss declares.

    Attributes:
        columns: names of required columns. A name that ends with ``/`` stands for all columns with this prefix.
        optional: names of columns that the function reads if the batch has them.
        compares_samples: True if an estimator compares several samples of a prompt.
        by_group: True if a row's advantages depend on the rows of its group and on
            :attr:`AdvantageInputs.batch_scores` only, before they are whitened; the estimator can then be called with
            some groups of a batch at a time.
        whitens: True if an estimator whitens its advantages over the batch as its last step, unless
            :attr:`AdvantageInputs.whiten` is False.
        scales_with_advantage: True if a token whose advantage is zero has no gradient in a policy loss; updates may
            then leave out rows whose advantages are all zero.
        options: names of the options that the function reads; None for a function that takes any.
    """

    columns: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    compares_samples: bool = False
    by_group: bool = False
    whitens: bool = False
    scales_with_advantage: bool = False
    options: frozenset[str] | None = None

    def select(self, columns: Mapping[str, _C]) -> dict[str, _C]:
        """Return the declared columns among ``columns``, by name."""
        declared = self.columns | self.optional
        prefixes = tuple(name for name in declared if name.endswith("/"))
        return {name: column for name, column in columns.items() if name in declared or name.startswith(prefixes)}


def _marker(**attributes: Any) -> Callable[[_F], _F]:
    def mark(function: _F) -> _F:
        for name, value in attributes.items():
            setattr(function, name, value)
        return function

    return mark


def _names(argument: str, names: Collection[str]) -> frozenset[str]:
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
        raise TypeError(f"{argument} is {names!r}; it has to be a set of names, such as {{'values'}}")
    return frozenset(names)


def needs_of(function: Callable[..., Any]) -> Needs:
    """Return the columns declared with :func:`advantage` or :func:`policy_loss`; empty :class:`Needs` if none were."""
    needs = getattr(function, _NEEDS, None)
    return needs if isinstance(needs, Needs) else Needs()


@dataclass(frozen=True)
class InputColumns:
    """Base class of inputs with named columns.

    Attributes:
        columns: declared tensors by name; their rows are the rows of the batch.
    """

    columns: Mapping[str, Tensor] = field(default_factory=dict, kw_only=True)

    def column(self, name: str) -> Tensor:
        """Return a declared column.

        Raises:
            ColumnError: there is no such column; lists the columns there are and explains how to declare one.
        """
        try:
            return self.columns[name]
        except KeyError:
            raise self._missing(name) from None

    def columns_of(self, prefix: str) -> dict[str, Tensor]:
        """Return the columns whose names start with ``prefix``, keyed by the rest of the name.

        Raises:
            ColumnError: no column has this prefix.
        """
        matching = {
            name.removeprefix(prefix): column for name, column in self.columns.items() if name.startswith(prefix)
        }
        if not matching:
            raise self._missing(prefix)
        return matching

    def with_columns(self, columns: Mapping[str, Tensor]) -> Self:
        """Return these inputs with ``columns`` added or replaced."""
        return replace(self, columns={**self.columns, **columns})

    def _missing(self, name: str) -> ColumnError:
        return ColumnError(
            f"{type(self).__name__} has no column {name!r}; it has: {', '.join(sorted(self.columns)) or 'none'}. "
            f"Declare the column, as in needs={{{name!r}}}, and have a stage or the dataset write it"
        )

    @property
    def values(self) -> Tensor:
        """The column ``values``, float ``[B, T]``; ColumnError if not declared, as for the properties below."""
        return self.column("values")

    @property
    def sum_pi_squared(self) -> Tensor:
        """The column ``sum_pi_squared``, float ``[B, T]``."""
        return self.column("sum_pi_squared")

    @property
    def rollout_is_weights(self) -> Tensor:
        """The column ``rollout_is_weights``, float ``[B, T]``."""
        return self.column("rollout_is_weights")

    @property
    def reward_baselines(self) -> Tensor:
        """The column ``reward_baselines``, float ``[B]``."""
        return self.column("reward_baselines")

    @property
    def reward_components(self) -> dict[str, Tensor]:
        """The columns ``reward_component/<name>``, float ``[B]`` each, by ``<name>``; NaN where a row lacks it."""
        return self.columns_of(REWARD_COMPONENT)


@dataclass(frozen=True)
class AdvantageInputs(InputColumns):
    """Inputs of an advantage estimator.

    Attributes:
        token_level_rewards: float ``[B, T]``; scores minus the KL penalty if the run subtracts one from the reward.
        response_mask: ``[B, T]``, 1 where the policy chose the token.
        group_ids: int64 ``[B]``, ``0 .. groups - 1``; rows of one prompt share an id. A row is a whole rollout: the
            trainer joins the tokens of its trajectories before the call.
        gamma, lam: discount and GAE lambda (verl's keys).
        norm_adv_by_std_in_grpo: True to divide by the group's standard deviation (verl's key).
        options: further keys of ``algorithm.adv_kwargs``.
        whiten: False to get an estimator's advantages before it whitens them over the batch; only for estimators
            that declare ``whitens``. If an estimator uses one tensor for advantages and returns, both are whitened.
        batch_scores: masked reward sum of every row of the batch, float64, if this call sees only some of the groups;
            None if these rows are the whole batch.
    """

    token_level_rewards: Tensor
    response_mask: Tensor
    group_ids: Tensor
    gamma: float = 1.0
    lam: float = 1.0
    norm_adv_by_std_in_grpo: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    whiten: bool = True
    batch_scores: Tensor | None = None

    @property
    def old_log_probs(self) -> Tensor:
        """The column ``old_log_probs``, float ``[B, T]``."""
        return self.column("old_log_probs")

    def group_sizes(self) -> Tensor:
        """Return the number of rows in each row's group, int64 ``[B]``."""
        return self.group_ids.bincount().index_select(0, self.group_ids)

    def group_mean(self, score: Tensor) -> Tensor:
        """Return the mean of ``score`` ``[B]`` over each row's group, ``[B]``; for a group of one row, its score."""
        sums = score.new_zeros(int(self.group_ids.max()) + 1 if len(score) else 0)
        sums.index_add_(0, self.group_ids, score)
        return sums.index_select(0, self.group_ids) / self.group_sizes().to(score.dtype)


@dataclass(frozen=True)
class AdvantageOutputs:
    """``advantages`` and ``returns``, float32 ``[B, T]``, zero where the mask is zero."""

    advantages: Tensor
    returns: Tensor

    @classmethod
    def from_scores(cls, scores: Tensor, response_mask: Tensor) -> AdvantageOutputs:
        """Broadcast one score per row (``[B]``) over the row's response tokens, as float32."""
        import torch

        from rollcast.protocol import empty_tensor

        chosen = response_mask if response_mask.dtype == torch.bool else response_mask != 0
        spread = empty_tensor(chosen.shape, torch.float32, scores.device)
        column = scores.detach().float().unsqueeze(-1)
        torch.where(chosen, column, torch.zeros((), device=scores.device), out=spread)
        return cls(spread, spread)


AdvantageEstimator = Callable[[AdvantageInputs], AdvantageOutputs]


def advantage(
    *,
    needs: Collection[str] = (),
    optional: Collection[str] = (),
    compares_samples: bool = False,
    by_group: bool = False,
    whitens: bool = False,
    options: Collection[str] | None = (),
) -> Callable[[_F], _F]:
    """Declare the columns and options that an estimator reads and the rows that it compares; see :class:`Needs`.

    The decorated function is returned unchanged. An estimator that declares ``by_group`` is called with chunks of
    whole groups, so that the columns of the whole batch are never padded at once.
    """
    declared = Needs(
        _names("needs", needs),
        _names("optional", optional),
        compares_samples=compares_samples,
        by_group=by_group,
        whitens=whitens,
        options=None if options is None else _names("options", options),
    )
    return _marker(**{_NEEDS: declared})


@dataclass(frozen=True)
class Denominators:
    """Counts over a whole mini-batch, that is over all its micro-batches on all data-parallel ranks.

    The gradient of a loss divided by these counts does not depend on the split into micro-batches and ranks.

    Attributes:
        tokens: number of response tokens where the mask is 1.
        sequences: number of rollouts with at least one such token. A rollout is one row, or several rows that share
            ``rollout_index``.
        max_tokens: longest response that the run allows, in tokens (Dr. GRPO's constant).
        present_tokens: number of tokens left after rows without effect on the loss were removed; metrics are averaged
            over them. None if no rows were removed.
        sequence_tokens: number of unmasked tokens of each row's whole rollout, int64 ``[B]`` for the rows of the
            micro-batch; None if each row is a rollout.
    """

    tokens: float
    sequences: float
    max_tokens: float
    present_tokens: float | None = None
    sequence_tokens: Tensor | None = field(default=None, compare=False)


class LossAggregation(Protocol):
    """A reduction of per-token losses and a mask ``[B, T]`` to a scalar; its sum over micro-batches is the loss."""

    def __call__(self, losses: Tensor, mask: Tensor, denominators: Denominators) -> Tensor: ...


class KlPenalty(Protocol):
    """An estimator of KL(policy ‖ reference) ``[B, T]`` from log-probs ``[B, T]`` or ``[B, T, V]`` (vocabulary)."""

    def __call__(self, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor: ...


def kl_penalty(*, needs_vocabulary: bool) -> Callable[[_F], _F]:
    """Declare that a penalty needs, or does not need, the log-probs of the whole vocabulary.

    The decorated function is returned unchanged. Loss functions and rewards see only the sampled tokens, so a penalty
    over the vocabulary is computed by an engine, which finds it by name.
    """
    return _marker(**{_VOCABULARY: needs_vocabulary})


def needs_vocabulary(penalty: KlPenalty) -> bool:
    """Return True if ``penalty`` was declared with :func:`kl_penalty` to need the whole vocabulary."""
    return bool(getattr(penalty, _VOCABULARY, False))


@dataclass(frozen=True)
class PolicyLossInputs(InputColumns):
    """Inputs of a policy loss; all tensors ``[B, T]``.

    Attributes:
        log_probs: log-probs of the policy in training, with gradient.
        old_log_probs: log-probs of the policy in the ratio's denominator.
        advantages, response_mask: output and mask of the advantage estimator.
        clip_ratio_low, clip_ratio_high, clip_ratio_c: PPO's clip range and dual clip (verl's keys).
        options: further keys of ``actor.policy_loss_kwargs``.
        prepared: columns that the loss's ``prepare`` function computed over the whole batch; see :func:`policy_loss`.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    response_mask: Tensor
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    options: Mapping[str, Any] = field(default_factory=dict)
    prepared: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class PolicyLossOutput:
    """Per-token ``losses`` ``[B, T]`` and per-token ``metrics`` (each ``[B, T]``, without gradient).

    The caller averages metrics over the tokens of the mini-batch.
    """

    losses: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


PolicyLoss = Callable[[PolicyLossInputs], PolicyLossOutput]
PolicyLossPreparation = Callable[[PolicyLossInputs], Mapping[str, "Tensor"]]
"""A function that computes columns ``[1, N]`` before the update, from the batch's ``N`` response tokens in one row.

All its inputs are ``[1, N]``, including declared columns that are otherwise ``[B]``; ``log_probs`` are the old ones.
"""


def policy_loss(
    *,
    needs: Collection[str] = (),
    optional: Collection[str] = (),
    prepare: PolicyLossPreparation | None = None,
    scales_with_advantage: bool = False,
    options: Collection[str] | None = (),
) -> Callable[[_F], _F]:
    """Declare the options of a policy loss and the columns that it reads in addition to its fixed inputs; see
    :class:`Needs`.

    The decorated function is returned unchanged. A loss sees one micro-batch and must not depend on the split into
    micro-batches. A loss that compares tokens across the batch does so in ``prepare``, which is called once with all
    tokens of the batch in one row (:data:`PolicyLossPreparation`); the columns that it returns are passed to the loss
    as :attr:`PolicyLossInputs.prepared`.
    """
    declared = Needs(
        _names("needs", needs),
        _names("optional", optional),
        scales_with_advantage=scales_with_advantage,
        options=None if options is None else _names("options", options),
    )
    return _marker(**{_NEEDS: declared, _PREPARE: prepare})


def prepares_batch(loss: PolicyLoss) -> bool:
    """Return True if ``loss`` was declared with ``prepare``; see :func:`policy_loss`."""
    return getattr(loss, _PREPARE, None) is not None


def prepare_policy_loss(loss: PolicyLoss, inputs: PolicyLossInputs) -> Mapping[str, Tensor]:
    """Run ``loss``'s ``prepare`` on the whole batch and return its columns by name; empty without ``prepare``."""
    prepare = getattr(loss, _PREPARE, None)
    return {} if prepare is None else prepare(inputs)


def check_options(function: Callable[..., Any], options: Mapping[str, Any], key: str) -> None:
    """Check that a function declares its options.

    Args:
        function: an estimator or a policy loss; one that was not decorated takes any option.
        options: options of the run.
        key: config key of the options, for messages.

    Raises:
        ConfigError: an option is not declared; the message lists those that are.
    """
    declared = needs_of(function).options
    if declared is None:
        return
    for name in options:
        if name not in declared:
            near = difflib.get_close_matches(str(name), declared, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"{key}.{name} is set, but {describe_function(function)} has no such option; its options: "
                f"{', '.join(sorted(declared)) or 'none'}{hint}"
            )


def check_columns(function: Callable[..., Any], values: Mapping[str, Any], mask: Tensor) -> None:
    """Check what a plugin returned for a batch.

    Args:
        function: the plugin.
        values: name → value that the plugin returned.
        mask: response mask of the batch, ``[B, T]``.

    Raises:
        PluginTypeError: a value is not a float tensor with the mask's shape; the message has the plugin and the value.
    """
    import torch

    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.shape == mask.shape and value.is_floating_point():
            continue
        is_tensor = isinstance(value, torch.Tensor)
        what = f"{value.dtype} {list(value.shape)}" if is_tensor else f"a {type(value).__name__}"
        raise PluginTypeError(
            f"{describe_function(function)} returned {name} that are {what} for a batch of {mask.shape[0]} rows and "
            f"{mask.shape[1]} positions; they have to be float32 {list(mask.shape)}"
        )


def check_type(function: Callable[..., Any], value: object, kind: type) -> None:
    """Check the type of what a plugin returned.

    Raises:
        PluginTypeError: it is another; the message has the plugin and both types.
    """
    if not isinstance(value, kind):
        raise PluginTypeError(
            f"{describe_function(function)} returned a {type(value).__name__}, not an instance of {kind.__name__}"
        )


def describe_function(function: Callable[..., Any]) -> str:
    """Return the module and name of a plugin that is a function, for messages."""
    kind = type(function)
    return f"{getattr(function, '__module__', kind.__module__)}:{getattr(function, '__qualname__', kind.__qualname__)}"


advantages: Registry[AdvantageEstimator] = Registry(
    "rollcast.advantages",
    is_callable(1, exact=True),
    "algorithm.adv_estimator",
    description="advantage estimators",
)
policy_losses: Registry[PolicyLoss] = Registry(
    "rollcast.policy_losses",
    is_callable(1, exact=True),
    "actor.policy_loss",
    description="policy losses over per-token quantities",
)
loss_aggregations: Registry[LossAggregation] = Registry(
    "rollcast.loss_aggregations",
    is_callable(3, exact=True),
    "actor.loss_agg_mode",
    description="reductions of per-token losses to one number",
)
kl_penalties: Registry[KlPenalty] = Registry(
    "rollcast.kl_penalties",
    is_callable(2, exact=True),
    ("actor.kl_loss_type", "algorithm.kl_penalty"),
    description="estimators of the KL divergence per token",
)
