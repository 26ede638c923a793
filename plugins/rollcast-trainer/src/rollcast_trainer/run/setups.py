"""The needs that stages have of a role's workers, and the setups that the workers are built from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from rollcast.contracts.engine import ForwardSettings, LossFunction, OptimConfig
from rollcast.contracts.stage import Stage, roles
from rollcast.contracts.worker import ClassWithInitArgs
from rollcast.errors import ConfigError
from rollcast_trainer.run.settings import RunSettings
from rollcast_trainer.workers.roles import Role, placed_as
from rollcast_trainer.workers.training import WorkerSetup

if TYPE_CHECKING:
    from rollcast_trainer.run.run import Run

__all__ = ["ModelNeeds", "RoleSetup", "TrainingStage", "list_workers"]


@dataclass(frozen=True)
class ModelNeeds:
    """The needs that a stage has of the model of a role. The needs of all stages of a list are combined.

    Attributes:
        role: the role.
        path: folder of the model; None for the model of the run.
        optim: optimizer settings; None for no update.
        loss_function: loss of updates.
        temperature: temperature of the logits; None for the rollout's.
        micro_batch_size: rows on each device in passes that compute outputs; None for those of the actor's updates.
        update_micro_batch_size: the same in updates.
        entropy: compute the entropy in passes that compute outputs.
        update_entropy: compute the entropy in updates.
        sum_pi_squared: compute the sum of the squared probabilities at each token.
        routing: record the experts that a mixture chooses.
        vocabulary_kl: name of the KL penalty that updates compute over the vocabulary.
        offload: keep the model in host memory between passes.
        moves: the model's weights change although nothing trains it, so checkpoints contain them.
    """

    role: str
    path: str | None = None
    optim: OptimConfig | None = None
    loss_function: LossFunction | None = None
    temperature: float | None = None
    micro_batch_size: int | None = None
    update_micro_batch_size: int | None = None
    entropy: bool = False
    update_entropy: bool = False
    sum_pi_squared: bool = False
    routing: bool = False
    vocabulary_kl: str | None = None
    offload: bool = False
    moves: bool = False


@dataclass(frozen=True)
class RoleSetup:
    """The constructor argument of the workers of a role that runs no model of the run."""

    role: str
    setup: Any


class TrainingStage(Stage):
    """Base class of stages that need more of a run than :class:`~rollcast.contracts.stage.StageRun` promises."""

    run: Run

    def needs(self) -> Sequence[ModelNeeds | RoleSetup]:
        """Return what the stage needs of the workers of its roles; called once, before they start."""
        return ()


def list_workers(
    settings: RunSettings, stages: Iterable[Stage], total_steps: int
) -> tuple[dict[str, ClassWithInitArgs[Any]], dict[str, str]]:
    """Return the workers of the roles that the stages call, and the model folder of each role with a model.

    Args:
        settings: settings of the run.
        stages: stages of the run.
        total_steps: training steps of the run, over which learning-rate schedules extend.

    Raises:
        ConfigError: two stages need different things of a role, or one needs something of a role that none calls.
    """
    needs = [(stage, need) for stage in stages if isinstance(stage, TrainingStage) for need in stage.needs()]
    for stage, need in needs:
        if need.role not in settings.roles:
            raise ConfigError(
                f"the stage {type(stage).__name__} needs something of the role {need.role}, which its declaration does "
                f"not name; roles of the run: {', '.join(settings.roles)}"
            )
    arguments = {need.role: need.setup for _, need in needs if isinstance(need, RoleSetup)}
    setups: dict[str, WorkerSetup] = {}
    for role in settings.roles:
        if role not in arguments:
            mine = [(stage, need) for stage, need in needs if isinstance(need, ModelNeeds) and need.role == role]
            setups[role] = _with_needs(_base_setup(settings, role), _combine(role, mine), total_steps)
    paths = {role: setup.model.path for role, setup in setups.items()}
    arguments |= _fuse_reference(settings, setups)
    order = [Role.ACTOR_ROLLOUT_REF, *settings.roles]
    workers = {
        str(role): ClassWithInitArgs(roles.get(placed_as(role)), arguments[role]) for role in order if role in arguments
    }
    return workers, paths


def _combine(role: str, needs: Sequence[tuple[Stage, ModelNeeds]]) -> ModelNeeds:
    """Return the sum of the needs of a role.

    Raises:
        ConfigError: two stages need different values.
    """
    values: dict[str, Any] = {}
    sources: dict[str, Stage] = {}
    for stage, need in needs:
        for name in (field.name for field in fields(need) if field.name != "role"):
            value = getattr(need, name)
            if value is None or value is False:
                continue
            if name in values and values[name] != value:
                names = " and ".join(type(which).__name__ for which in (sources[name], stage))
                raise ConfigError(
                    f"the stages {names} need different values of {name} from the role {role}: {values[name]} and "
                    f"{value}; remove one of them with trainer.stages.remove"
                )
            values[name], sources[name] = value, stage
    return ModelNeeds(role, **values)


def _base_setup(settings: RunSettings, role: str) -> WorkerSetup:
    """Return the setup of the workers of a role that no stage needs anything of: a model that does not train, on the
    role's engine.
    """
    forward, actor, tokenizer = _forward_settings(settings), settings.actor, settings.tokenizer
    is_actor = role == Role.ACTOR_ROLLOUT
    key = "actor" if is_actor else role
    has_adapter = is_actor or role == Role.REF  # the reference of an adapter is the model without it
    return WorkerSetup(
        key=key,
        engine=settings.role_engine(key),
        model=settings.model if has_adapter else settings.model.without_adapter(),
        optim=actor.optim if is_actor else None,
        rollout=settings.rollout if is_actor and settings.replay_of is None else None,
        rollout_dtype=settings.rollout_dtype if is_actor and settings.uses_replicas else None,
        loss_function=None,
        has_reference=False,
        seed=settings.trainer.seed,
        pad_token_id=int(tokenizer.pad_token_id),
        eos_token_id=int(tokenizer.eos_token_id),
        stop_token_ids=settings.stop_token_ids,
        forward=forward,
        infer=forward,
    )


def _forward_settings(settings: RunSettings) -> ForwardSettings:
    actor = settings.actor
    return ForwardSettings(
        temperature=settings.rollout.temperature or 1.0,
        micro_batch_size_per_gpu=actor.ppo_micro_batch_size_per_gpu,
        max_token_len_per_gpu=actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else None,
        max_response_length=settings.data.max_response_length,
    )


def _with_needs(setup: WorkerSetup, needs: ModelNeeds, total_steps: int) -> WorkerSetup:
    optim = needs.optim or setup.optim
    if optim is not None and optim.total_training_steps < 1:
        optim = replace(optim, total_training_steps=total_steps)
    temperature = setup.forward.temperature if needs.temperature is None else needs.temperature
    rows = setup.forward.micro_batch_size_per_gpu
    model = setup.model if needs.path is None else replace(setup.model, path=needs.path, random_init=False)
    return replace(
        setup,
        model=model,
        optim=optim,
        loss_function=needs.loss_function,
        forward=replace(
            setup.forward,
            temperature=temperature,
            micro_batch_size_per_gpu=needs.update_micro_batch_size or rows,
            calculate_entropy=needs.update_entropy,
            vocabulary_kl=needs.vocabulary_kl,
        ),
        infer=replace(
            setup.infer,
            temperature=temperature,
            micro_batch_size_per_gpu=needs.micro_batch_size or rows,
            calculate_entropy=needs.entropy,
            calculate_sum_pi_squared=needs.sum_pi_squared,
            record_routing=needs.routing,
        ),
        offload_reference=needs.offload,
        reference_moves=needs.moves,
    )


def _fuse_reference(settings: RunSettings, setups: Mapping[str, WorkerSetup]) -> dict[str, WorkerSetup]:
    """Merge the reference into the actor's workers if both have the same engine and pool."""
    actor, reference = setups[Role.ACTOR_ROLLOUT], setups.get(Role.REF)
    if reference is None or settings.has_own_pool(Role.REF) or reference.engine != actor.engine:
        return dict(setups)
    moves, offloads = reference.reference_moves, reference.offload_reference
    fused = replace(actor, has_reference=True, offload_reference=offloads, reference_moves=moves)
    others = {role: setup for role, setup in setups.items() if role not in (Role.ACTOR_ROLLOUT, Role.REF)}
    return {Role.ACTOR_ROLLOUT_REF: fused, **others}
