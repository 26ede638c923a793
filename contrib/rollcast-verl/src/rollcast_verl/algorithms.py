"""verl's advantage estimators and policy losses, called as they are.

``algorithm.adv_estimator=verl_grpo`` calls what ``verl.trainer.ppo.core_algos`` has registered as ``grpo``. For a
function that you registered with verl's decorators, register the adapter under a name of your choice::

    advantages.register("mine", estimator("my_estimator"))
    policy_losses.register("mine", policy_loss("my_loss"))

or name a module attribute with that value in an entry point. ``VERL_USE_EXTERNAL_MODULES`` imports your modules with
verl.
"""

from __future__ import annotations

import dataclasses
import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rollcast.contracts.algorithm import (
    REWARD_COMPONENT,
    AdvantageEstimator,
    AdvantageInputs,
    AdvantageOutputs,
    PolicyLoss,
    PolicyLossInputs,
    PolicyLossOutput,
    advantage,
)
from rollcast.contracts.algorithm import policy_loss as declare_loss
from rollcast.errors import ConfigError, PluginNotFoundError, PluginTypeError
from rollcast_verl.need import need_verl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["estimator", "policy_loss"]

_ALGORITHMS = "verl.trainer.ppo.core_algos"
#: Estimators of verl 0.9.1: name → columns that they need, and True if they compare samples of a prompt.
ESTIMATORS: dict[str, tuple[frozenset[str], bool]] = {
    "gae": (frozenset({"values"}), False),
    "gdpo": (frozenset({REWARD_COMPONENT}), True),
    "gpg": (frozenset(), True),
    "grpo": (frozenset(), True),
    "grpo_passk": (frozenset(), True),
    "grpo_vectorized": (frozenset(), True),
    "opo": (frozenset(), True),
    "optimal_token_baseline": (frozenset({"old_log_probs", "sum_pi_squared"}), True),
    "reinforce_plus_plus": (frozenset(), False),
    "reinforce_plus_plus_baseline": (frozenset(), True),
    "remax": (frozenset({"reward_baselines"}), False),
    "rloo": (frozenset(), True),
    "rloo_vectorized": (frozenset(), True),
    "tir_optimal_token_baseline": (frozenset({"old_log_probs", "sum_pi_squared"}), True),
}
#: Policy losses of verl 0.9.1.
LOSSES = (
    *("bypass_mode", "cispo", "clip_cov", "dppo_kl", "dppo_tv", "dro", "geo_mean", "gpg", "gspo", "kl_cov", "sapo"),
    "vanilla",
)
#: Those in which a token whose advantage is zero has no gradient.
_SCALING = frozenset(LOSSES) - {"bypass_mode", "dro", "kl_cov"}
_OPTIONAL = frozenset({"rollout_is_weights"})
_patching = threading.RLock()


def _registered(registry: str, name: str, plugin: str) -> Callable[..., Any]:
    """Return a function of one of verl's registries.

    Raises:
        PluginNotFoundError: verl has no such function; lists those that it has.
    """
    known: Mapping[str, Callable[..., Any]] = getattr(need_verl(_ALGORITHMS, plugin), registry)
    if name not in known:
        raise PluginNotFoundError(f"{plugin}: verl has no {name!r} in {registry}; it has: {', '.join(sorted(known))}")
    return known[name]


# -- estimators ---------------------------------------------------------------------------------


def estimator(
    name: str, needs: Collection[str] | None = None, compares_samples: bool | None = None
) -> AdvantageEstimator:
    """Return an estimator that calls verl's estimator ``name``; verl is imported at the first call.

    Args:
        name: name in verl's ``ADV_ESTIMATOR_REGISTRY``.
        needs: columns that the function reads by its parameters of the same names; by default those of verl's own.
        compares_samples: True if it compares several samples of a prompt; True by default for a function of a user.
    """
    columns, compares = ESTIMATORS.get(name, (frozenset(), True))

    @advantage(
        needs=columns if needs is None else needs,
        optional=_OPTIONAL,
        compares_samples=compares if compares_samples is None else compares_samples,
        options=None,
    )
    def call(inputs: AdvantageInputs) -> AdvantageOutputs:
        return _estimate(name, inputs)

    call.__name__ = call.__qualname__ = f"verl_{name}"
    return call


def _estimate(name: str, inputs: AdvantageInputs) -> AdvantageOutputs:
    import torch
    from omegaconf import OmegaConf

    function = _registered("ADV_ESTIMATOR_REGISTRY", name, f"the estimator verl_{name}")
    mask = inputs.response_mask.to(inputs.token_level_rewards.dtype)
    keys = ("gamma", "lam", "norm_adv_by_std_in_grpo")
    config = OmegaConf.create({key: getattr(inputs, key) for key in keys} | dict(inputs.options))
    options: dict[str, Any] = {
        "token_level_rewards": inputs.token_level_rewards * mask,
        "response_mask": mask,
        "index": inputs.group_ids.cpu().numpy(),
        "config": config,
        **{key: getattr(inputs, key) for key in keys},
        **inputs.options,
        **inputs.columns,
    }
    options |= _components(inputs, mask)
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    named = options if takes_all else {key: value for key, value in options.items() if key in parameters}
    outcome, returns = function(**named)
    chosen = inputs.response_mask != 0
    zero = torch.zeros((), device=chosen.device)
    return AdvantageOutputs(torch.where(chosen, outcome.float(), zero), torch.where(chosen, returns.float(), zero))


def _components(inputs: AdvantageInputs, mask: Tensor) -> dict[str, Any]:
    """Return the arguments from which verl's GDPO reads the score's components."""
    import torch

    names = [name for name in inputs.columns if name.startswith(REWARD_COMPONENT)]
    if not names:
        return {}
    # verl has no mark for a component that a row lacks.
    parts = {name.removeprefix(REWARD_COMPONENT): inputs.columns[name].nan_to_num(0.0).cpu().numpy() for name in names}
    # verl places a component at the last token that is there, which here is the last one of the policy.
    there = mask.long().flip(-1).cummax(-1).values.flip(-1)
    batch = {
        "prompts": there.new_zeros(len(mask), 1),
        "attention_mask": torch.nn.functional.pad(there, (1, 0), value=1),
    }
    return {"non_tensor_batch": parts, "batch": batch}


# -- policy losses ------------------------------------------------------------------------------


def policy_loss(name: str) -> PolicyLoss:
    """Return a policy loss that calls verl's loss ``name``; verl is imported at the first call.

    verl's losses return one number; rollcast aggregates losses per token over the whole mini-batch. The adapter takes
    the losses per token that verl's function passes to ``agg_loss``, so ``actor.loss_agg_mode`` is rollcast's. Where a
    function does not call ``agg_loss`` (``geo_mean``), each token of the micro-batch gets the number that it returns.
    Metrics are numbers for a micro-batch; their names lose the prefix ``actor/``.
    """

    @declare_loss(optional=_OPTIONAL, options=None, scales_with_advantage=name in _SCALING)
    def call(inputs: PolicyLossInputs) -> PolicyLossOutput:
        return _lose(name, inputs)

    call.__name__ = call.__qualname__ = f"verl_{name}"
    return call


def _lose(name: str, inputs: PolicyLossInputs) -> PolicyLossOutput:
    import torch

    plugin = f"the policy loss verl_{name}"
    function = _registered("POLICY_LOSS_REGISTRY", name, plugin)
    mask = inputs.response_mask.to(inputs.log_probs.dtype)
    with _caught(function) as caught:
        value, metrics = function(
            old_log_prob=inputs.old_log_probs,
            log_prob=inputs.log_probs,
            advantages=inputs.advantages,
            response_mask=mask,
            loss_agg_mode="token-mean",
            config=_actor_config(name, inputs),
            rollout_is_weights=inputs.columns.get("rollout_is_weights"),
        )
    if len(caught) > 1:
        raise PluginTypeError(
            f"{plugin} called verl's agg_loss {len(caught)} times; with one call, its losses per token can be "
            "aggregated over the mini-batch"
        )
    losses, chosen = caught[0] if caught else (value.expand(mask.shape), mask)
    numbers = {key.removeprefix("actor/"): float(number) for key, number in metrics.items()}
    return PolicyLossOutput(
        torch.where(chosen != 0, losses, torch.zeros((), device=losses.device)),
        {key: torch.full_like(mask, number) for key, number in numbers.items()},
    )


@contextmanager
def _caught(function: Callable[..., Any]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Record the losses per token and the masks that a function of verl passes to ``agg_loss``."""
    caught: list[tuple[Tensor, Tensor]] = []
    theirs = need_verl(_ALGORITHMS, "a policy loss of verl").agg_loss

    def record(loss_mat: Tensor, loss_mask: Tensor, *_: Any, **__: Any) -> Tensor:
        caught.append((loss_mat, loss_mask))
        return loss_mat.detach().sum()

    # A user's loss has imported the name into its own module, and a loss of verl may call another of its losses.
    modules = [vars(need_verl(_ALGORITHMS, "a policy loss of verl")), inspect.unwrap(function).__globals__]
    with _patching:
        patched = [names for names in modules if names.get("agg_loss") is theirs]
        try:
            for names in patched:
                names["agg_loss"] = record
            yield caught
        finally:
            for names in patched:
                names["agg_loss"] = theirs


def _actor_config(name: str, inputs: PolicyLossInputs) -> Any:
    """Build verl's configuration of the actor from the keys of the loss.

    Raises:
        ConfigError: an option is a field neither of verl's ``ActorConfig`` nor of its ``PolicyLossConfig``.
    """
    configs = need_verl("verl.workers.config.actor", f"the policy loss verl_{name}")
    of_actor, of_loss = (
        {field.name for field in dataclasses.fields(cls)} for cls in (configs.ActorConfig, configs.PolicyLossConfig)
    )
    if unknown := sorted(inputs.options.keys() - of_actor - of_loss):
        raise ConfigError(
            f"actor.policy_loss_kwargs has {', '.join(unknown)}, which verl's loss {name!r} cannot have; keys of "
            f"verl's actor.policy_loss: {', '.join(sorted(of_loss))}; and of its actor: {', '.join(sorted(of_actor))}"
        )
    mine = {key: value for key, value in inputs.options.items() if key in of_actor and key not in of_loss}
    return configs.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=inputs.clip_ratio_low,
        clip_ratio_low=inputs.clip_ratio_low,
        clip_ratio_high=inputs.clip_ratio_high,
        clip_ratio_c=inputs.clip_ratio_c,
        policy_loss=configs.PolicyLossConfig(
            loss_mode=name, **{key: value for key, value in inputs.options.items() if key in of_loss}
        ),
        **mine,
    )


def __getattr__(attribute: str) -> Any:
    """Return ``estimator_NAME`` or ``loss_NAME``, the values of the entry points."""
    kind, _, name = attribute.partition("_")
    if kind == "estimator" and name in ESTIMATORS:
        return estimator(name)
    if kind == "loss" and name in LOSSES:
        return policy_loss(name)
    raise AttributeError(f"module {__name__!r} has no attribute {attribute!r}")
