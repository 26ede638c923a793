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

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from rollcast.errors import ColumnError, PluginTypeError, RollcastError
from rollcast.plugins import Check, Registry, is_callable

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
    "kl_penalties",
    "kl_penalty",
    "loss_aggregations",
    "needs_of",
    "needs_vocabulary",
    "policy_loss",
    "policy_losses",
    "prepare_policy_loss",
    "prepares_batch",
    "try_estimator",
    "try_kl_penalty",
    "try_loss_aggregation",
    "try_policy_loss",
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
    """

    columns: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    compares_samples: bool = False
    by_group: bool = False
    whitens: bool = False

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
        raise TypeError(f"{argument} is {names!r}; it has to be a set of column names, such as {{'values'}}")
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
) -> Callable[[_F], _F]:
    """Declare the columns that an estimator reads and the rows that it compares; see :class:`Needs`.

    The decorated function is returned unchanged. An estimator that declares ``by_group`` is called with chunks of
    whole groups, so that the columns of the whole batch are never padded at once.
    """
    declared = Needs(_names("needs", needs), _names("optional", optional), compares_samples, by_group, whitens)
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
    *, needs: Collection[str] = (), optional: Collection[str] = (), prepare: PolicyLossPreparation | None = None
) -> Callable[[_F], _F]:
    """Declare the columns that a policy loss reads in addition to its fixed inputs.

    The decorated function is returned unchanged. A loss sees one micro-batch and must not depend on the split into
    micro-batches. A loss that compares tokens across the batch does so in ``prepare``, which is called once with all
    tokens of the batch in one row (:data:`PolicyLossPreparation`); the columns that it returns are passed to the loss
    as :attr:`PolicyLossInputs.prepared`.
    """
    return _marker(**{_NEEDS: Needs(_names("needs", needs), _names("optional", optional)), _PREPARE: prepare})


def prepares_batch(loss: PolicyLoss) -> bool:
    """Return True if ``loss`` was declared with ``prepare``; see :func:`policy_loss`."""
    return getattr(loss, _PREPARE, None) is not None


def prepare_policy_loss(loss: PolicyLoss, inputs: PolicyLossInputs) -> Mapping[str, Tensor]:
    """Run ``loss``'s ``prepare`` on the whole batch and return its columns by name; empty without ``prepare``."""
    prepare = getattr(loss, _PREPARE, None)
    return {} if prepare is None else prepare(inputs)


#: Columns of a trial: name → dtype and True for ``[B, T]``, False for ``[B]``.
_TRIED = {
    "values": ("float32", True),
    "old_log_probs": ("float32", True),
    "ref_log_prob": ("float32", True),
    "sum_pi_squared": ("float32", True),
    "rollout_is_weights": ("float32", True),
    "reward_baselines": ("float32", False),
    "turn_ids": ("int32", True),
    "anchor_ids": ("int64", True),
}


def try_estimator(estimator: AdvantageEstimator, name: str, samples: int = 4, **settings: Any) -> None:
    """Call an estimator with a small batch, so that a mistake in it is found before a run has cost anything.

    The batch has two prompts and four response positions. An estimator that declares columns other than those in the
    table of this module's docstring, or all with a prefix, is not called: what they hold is not known here.

    Args:
        estimator: the estimator.
        name: its name in messages.
        samples: rows of a prompt.
        settings: fields of :class:`AdvantageInputs` such as ``gamma`` and ``options``.

    Raises:
        PluginTypeError: it fails, reads a column that it does not declare, or does not return an
            :class:`AdvantageOutputs` of finite numbers with the batch's shape.
        RollcastError: its own, raised on purpose, such as for an option that it does not have.
    """
    import torch

    needs = needs_of(estimator)
    if not needs.columns <= set(_TRIED):
        return
    mask = _draw_mask(2 * samples)
    score = torch.arange(len(mask)) % 3 + 0.5 * (torch.arange(len(mask)) % 2)
    inputs = AdvantageInputs(
        token_level_rewards=(mask.cumsum(-1) == mask.sum(-1, keepdim=True)).float() * mask * score.unsqueeze(-1),
        response_mask=mask,
        group_ids=torch.arange(2).repeat_interleave(samples),
        columns=_draw_columns(needs, mask),
        **settings,
    )
    output: Any = _try(name, lambda: estimator(inputs))
    if not isinstance(output, AdvantageOutputs):
        raise PluginTypeError(f"{name} returned a {type(output).__name__}, not an AdvantageOutputs")
    for part in ("advantages", "returns"):
        hint = ". AdvantageOutputs.from_scores spreads one score a row"
        _check_output(name, part, getattr(output, part), mask, hint)


def try_policy_loss(loss: PolicyLoss, name: str, **settings: Any) -> None:
    """Call a policy loss, and its ``prepare`` function if it has one, with a small batch; see :func:`try_estimator`.

    Args:
        loss: the policy loss.
        name: its name in messages.
        settings: fields of :class:`PolicyLossInputs` such as ``clip_ratio_low`` and ``options``.

    Raises:
        PluginTypeError: it fails, reads a column that it does not declare, or does not return a
            :class:`PolicyLossOutput` of finite numbers with the batch's shape and a finite gradient.
        RollcastError: its own, raised on purpose.
    """
    import torch

    needs = needs_of(loss)
    if not needs.columns <= set(_TRIED):
        return
    mask = _draw_mask(6)
    log_probs, old = _draw_log_probs(mask.shape)
    sign = 1.0 - 2.0 * (torch.arange(len(mask)) % 2)
    inputs = PolicyLossInputs(
        log_probs=log_probs.requires_grad_(),
        old_log_probs=old,
        advantages=sign.unsqueeze(-1) * mask,
        response_mask=mask,
        columns=_draw_columns(needs, mask),
        **settings,
    )
    output: Any = _try(name, lambda: loss(replace(inputs, prepared=_prepare_small(loss, inputs))))
    if not isinstance(output, PolicyLossOutput):
        raise PluginTypeError(f"{name} returned a {type(output).__name__}, not a PolicyLossOutput")
    _check_output(name, "losses", output.losses, mask)
    _check_gradient(name, torch.where(mask != 0, output.losses, 0.0).sum(), inputs.log_probs)
    if not isinstance(output.metrics, Mapping):
        raise PluginTypeError(f"{name} returned metrics that are a {type(output.metrics).__name__}, not a mapping")
    for metric, values in output.metrics.items():
        _check_output(name, f"the metric {metric!r}", values, mask)


def try_loss_aggregation(aggregation: LossAggregation, name: str) -> None:
    """Call a loss aggregation with a small batch; see :func:`try_estimator`.

    Raises:
        PluginTypeError: it fails, or does not return a finite scalar with a finite gradient.
        RollcastError: its own, raised on purpose.
    """
    import torch

    mask = _draw_mask(6)
    losses = (torch.arange(mask.numel()).view(mask.shape) % 5 / 4.0 - 0.5).requires_grad_()
    counts = Denominators(float(mask.sum()), float(len(mask)), float(mask.shape[1]))
    output: Any = _try(name, lambda: aggregation(losses, mask, counts))
    if not isinstance(output, torch.Tensor) or output.shape != () or not output.is_floating_point():
        raise PluginTypeError(f"{name} returned {_describe(output)}; it has to be one number, a float tensor []")
    _check_finite(name, "a loss", output)
    if not output.requires_grad:
        raise PluginTypeError(f"{name} returned a number without a gradient, so that nothing would be trained")
    _check_gradient(name, output, losses)


def try_kl_penalty(penalty: KlPenalty, name: str) -> None:
    """Call a KL penalty with a small batch, over a vocabulary if it needs one; see :func:`try_estimator`.

    Raises:
        PluginTypeError: it fails, or does not return finite numbers with the batch's shape and a finite gradient.
        RollcastError: its own, raised on purpose.
    """
    import torch

    mask = torch.ones(6, 4)
    log_probs, ref = _draw_log_probs((6, 4, 5) if needs_vocabulary(penalty) else (6, 4))
    if needs_vocabulary(penalty):
        log_probs, ref = log_probs.log_softmax(-1), ref.log_softmax(-1)
    log_probs.requires_grad_()
    output: Any = _try(name, lambda: penalty(log_probs, ref))
    _check_output(name, "an estimate", output, mask)
    _check_gradient(name, output.sum(), log_probs)


def _draw_mask(rows: int) -> Tensor:
    import torch

    return (torch.arange(4) < (torch.arange(rows) % 3 + 2).unsqueeze(-1)).long()


def _draw_log_probs(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return log-probs of two policies that differ a little, in both directions."""
    import torch

    places = torch.arange(math.prod(shape)).view(shape)
    old = -0.5 - places % 7 / 4.0
    return old + (places % 5 - 2) / 20.0, old


def _draw_columns(needs: Needs, mask: Tensor) -> dict[str, Tensor]:
    import torch

    rows, width = mask.shape
    columns = {
        column: torch.full((rows, width) if is_wide else (rows,), 0 if dtype.startswith("int") else 0.5).to(
            getattr(torch, dtype)
        )
        for column, (dtype, is_wide) in _TRIED.items()
    }
    return needs.select(columns)


def _prepare_small(loss: PolicyLoss, inputs: PolicyLossInputs) -> dict[str, Tensor]:
    """Run ``prepare`` as a trainer does, with all tokens in one row; return its columns in the batch's shape."""
    shape = inputs.response_mask.shape
    wide = {
        name: column.unsqueeze(-1).expand(shape) if column.ndim == 1 else column
        for name, column in inputs.columns.items()
    }
    old = inputs.old_log_probs.reshape(1, -1)
    filled = replace(
        inputs,
        log_probs=old,
        old_log_probs=old,
        advantages=inputs.advantages.reshape(1, -1),
        response_mask=inputs.response_mask.reshape(1, -1),
        columns={name: column.reshape(1, -1) for name, column in wide.items()},
    )
    return {name: column.reshape(shape) for name, column in prepare_policy_loss(loss, filled).items()}


def _try(name: str, call: Callable[[], Any]) -> Any:
    import torch

    try:
        with torch.random.fork_rng(devices=()):  # a run goes on with the random numbers that it would have had
            return call()
    except ColumnError as error:
        raise PluginTypeError(f"{name} reads a column that it does not declare: {error}") from error
    except RollcastError:
        raise
    except Exception as error:
        raise PluginTypeError(f"{name} fails on a small batch: {type(error).__name__}: {error}") from error


def _check_output(name: str, part: str, value: Any, mask: Tensor, hint: str = "") -> None:
    import torch

    shape = list(mask.shape)
    if not isinstance(value, torch.Tensor) or list(value.shape) != shape or not value.is_floating_point():
        raise PluginTypeError(
            f"{name} returned {part} that are {_describe(value)} for a batch of {shape[0]} rows and {shape[1]} "
            f"positions; they have to be float32 {shape}{hint}"
        )
    _check_finite(name, part, value[mask != 0])


def _check_finite(name: str, part: str, value: Tensor) -> None:
    if not bool(value.isfinite().all()):
        raise PluginTypeError(f"{name} returned {part} with NaN or infinity for a small batch of ordinary numbers")


def _check_gradient(name: str, total: Tensor, leaf: Tensor) -> None:
    import torch

    if not total.requires_grad:
        return
    (gradient,) = _try(name, lambda: torch.autograd.grad(total, leaf, allow_unused=True))
    if gradient is not None:
        _check_finite(name, "values whose gradient is", gradient)


def _describe(value: Any) -> str:
    import torch

    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


class _NoOptions(dict[str, Any]):
    """Empty options that remember if any was asked for."""

    is_asked = False

    def __missing__(self, key: str) -> Any:
        self.is_asked = True
        raise KeyError(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.is_asked = True
        return default

    def __contains__(self, key: object) -> bool:
        self.is_asked = True
        return False

    # With these two, ``{**defaults, **options}`` and ``dict(options)`` ask too.
    def __iter__(self) -> Iterator[str]:
        self.is_asked = True
        return iter(())

    def keys(self) -> Any:
        self.is_asked = True
        return super().keys()


def _probe(kind: str, run: Callable[..., None], has_options: bool = False) -> Check:
    """Return a probe for ``rollcast plugins --check``, which says why a plugin does not work on a small batch."""

    def probe(plugin: Any) -> str | None:
        options = _NoOptions()
        try:
            run(plugin, f"the {kind}", **({"options": options} if has_options else {}))
        except RollcastError as error:
            # It may need an option, which only a run has; other kinds of errors do not come from a missing one.
            may_lack_option = options.is_asked and isinstance(error.__cause__, ValueError | KeyError | TypeError)
            is_own = isinstance(error, PluginTypeError) and not may_lack_option
            return f"does not work: {error}" if is_own else None
        return None

    return probe


advantages: Registry[AdvantageEstimator] = Registry(
    "rollcast.advantages",
    is_callable(1, exact=True),
    "algorithm.adv_estimator",
    description="advantage estimators",
    probe=_probe("estimator", try_estimator, has_options=True),
)
policy_losses: Registry[PolicyLoss] = Registry(
    "rollcast.policy_losses",
    is_callable(1, exact=True),
    "actor.policy_loss",
    description="policy losses over per-token quantities",
    probe=_probe("policy loss", try_policy_loss, has_options=True),
)
loss_aggregations: Registry[LossAggregation] = Registry(
    "rollcast.loss_aggregations",
    is_callable(3, exact=True),
    "actor.loss_agg_mode",
    description="reductions of per-token losses to one number",
    probe=_probe("loss aggregation", try_loss_aggregation),
)
kl_penalties: Registry[KlPenalty] = Registry(
    "rollcast.kl_penalties",
    is_callable(2, exact=True),
    ("actor.kl_loss_type", "algorithm.kl_penalty"),
    description="estimators of the KL divergence per token",
    probe=_probe("KL penalty", try_kl_penalty),
)
