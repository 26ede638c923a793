"""Schemas of the trainers; importable without torch.

A trainer's schema is one class whose fields are the config sections that it reads, registered once. A trainer with
further keys derives a class from :class:`RunConfig` or :class:`PpoConfig`, replaces the fields that differ, and
registers it.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from rollcast.contracts.config import (
    Fraction,
    Ge,
    Gt,
    Hosts,
    LocalPath,
    NonNegative,
    OptionOf,
    OrInfinity,
    Positive,
    PositiveOrOff,
    config,
)
from rollcast.contracts.engine import ModelConfig, OptimConfig
from rollcast.contracts.storage import NodePath
from rollcast.errors import ConfigError

__all__ = [
    "ActorConfig",
    "CriticConfig",
    "CriticModelConfig",
    "PpoActorConfig",
    "PpoConfig",
    "PpoTrainerConfig",
    "RefConfig",
    "RewardModelConfig",
    "RewardModelPathConfig",
    "RunConfig",
    "SftConfig",
    "SftTrainerConfig",
    "StagesConfig",
    "StopAtConfig",
    "TrainerConfig",
]

#: Engine section of a role other than the actor; keys left out default to the actor's values if the engine is the same.
RoleEngine = Annotated[dict[str, Any], Hosts("engine", like="actor.engine")]


@config
class ActorConfig:
    """The model in training, independent of its loss. Names are verl's where verl has one."""

    engine: Annotated[dict[str, Any], Hosts("engine")] = field(default_factory=dict)
    """The training engine: the keys of `engine=...`."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer and schedule; one scheduler step is one training step."""
    ppo_micro_batch_size_per_gpu: Positive | None = None
    """Rows per forward and backward pass; null for all at once."""
    use_dynamic_bsz: bool = False
    """Form micro-batches by `ppo_max_token_len_per_gpu` instead."""
    ppo_max_token_len_per_gpu: Positive = 16384
    """Tokens of a micro-batch on each device, with padding unless the engine packs."""

    def check(self, longest: int, sequence_ranks: int = 1) -> None:
        """Raise if a micro-batch cannot hold the longest row.

        Args:
            longest: tokens of the longest row that the run allows.
            sequence_ranks: devices that share a row's tokens.

        Raises:
            ConfigError: the message names the keys and their values.
        """
        if self.use_dynamic_bsz and self.ppo_max_token_len_per_gpu * sequence_ranks < longest:
            shared = f", shared by {sequence_ranks} devices" if sequence_ranks > 1 else ""
            raise ConfigError(
                f"actor.ppo_max_token_len_per_gpu is {self.ppo_max_token_len_per_gpu}{shared}, but a row may have "
                f"{longest} tokens (data.max_prompt_length + data.max_response_length); "
                "raise the first or lower the others"
            )


@config
class RouterReplayConfig:
    """Replay of the choices of a mixture's routers. Names are verl's."""

    mode: Literal["disabled", "R2", "R3"] = "disabled"
    """`R2` replays in the update the experts of the pass that computes the old log-probs; `R3` replays in both passes
    the experts with which the rollout sampled, and needs `rollout.enable_rollout_routing_replay`."""


@config
class PpoActorConfig(ActorConfig):
    """The policy of ``trainer=ppo``."""

    ppo_mini_batch_size: Positive = 64
    """Prompts per optimizer step, each with `rollout.n` samples."""
    log_prob_micro_batch_size_per_gpu: Positive | None = None
    """Rows per pass that computes log-probs only; null for `ppo_micro_batch_size_per_gpu`."""
    log_prob_check_rows: Literal[-1] | NonNegative = 8
    """Rows of each step whose log-probs are recomputed by the actor and compared, when the rollout's log-probs serve
    as the old ones; 0 for none, -1 to recompute the old log-probs of all rows.
    """
    ppo_epochs: Positive = 1
    """Passes over the step's batch."""
    shuffle: bool = True
    """Shuffle the rows into new mini-batches in each epoch, seeded by seed and step; false cuts the batch in its
    order.
    """
    policy_loss: str = "vanilla"
    """Registry name of the policy loss."""
    policy_loss_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further options of the policy loss."""
    clip_ratio_low: Annotated[float, Ge(0)] = 0.2
    """Lower clip range of PPO."""
    clip_ratio_high: Annotated[float, Ge(0)] = 0.2
    """Upper clip range of PPO."""
    clip_ratio_c: Annotated[float, Gt(1), OrInfinity()] = 3.0
    """Dual clip of PPO: the largest ratio that counts for a token with a negative advantage; `inf` for none."""
    loss_agg_mode: str = "token-mean"
    """Registry name of the loss aggregation."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus; the initial one with `use_adaptive_entropy`."""
    use_adaptive_entropy: bool = False
    """After each step, raise the weight of the entropy bonus by `entropy_coef_delta` if the entropy is at most
    `entropy_target`, and lower it otherwise; the bonus acts only in steps that follow such an entropy. This key and
    the four below are TRL's."""
    entropy_coef_min: float = 0.0
    """Lower bound of an adaptive weight."""
    entropy_coef_max: float = 1.0
    """Upper bound of an adaptive weight."""
    entropy_coef_delta: Annotated[float, Ge(0)] = 0.005
    """Change of an adaptive weight in each step."""
    entropy_target: float = 0.2
    """Mean entropy of a token, in nats, below which an adaptive bonus acts."""
    top_entropy_quantile: Fraction = 1.0
    """Share of the tokens on which the policy loss acts: those of the batch with the highest entropy before the update
    (TRL's key)."""
    off_policy_mask_threshold: Annotated[float, Gt(0)] | None = None
    """Leave out of the policy loss rows with a negative advantage that are further than this from the policy that
    sampled them, in nats per token; null for none (TRL's key)."""
    use_kl_loss: bool = False
    """Add the KL to the reference to the loss."""
    kl_loss_coef: float = 0.001
    """Weight of the KL in the loss."""
    kl_loss_type: str = "k3"
    """Registry name of the KL penalty in the loss."""
    use_bias_correction_kl: bool = False
    """Multiply the KL in the loss by the ratio of the policy to the policy before the update, with its gradient; `k3`
    then has the gradient of the KL in expectation (TRL's key)."""
    router_replay: RouterReplayConfig = field(default_factory=RouterReplayConfig)
    """The experts that a mixture's passes visit."""
    skip_zero_advantage: bool = True
    """Leave out of the update rows whose advantage is zero at every token. The gradient is unchanged, since the
    denominators still count them; metrics of the policy loss (`actor/kl`, `actor/clip_fraction`) become means
    over the remaining rows. No effect if the loss contains entropy or KL, or if the policy loss does not
    declare that it scales with the advantage.
    """


@config
class RefConfig:
    """The reference policy: the initial model, frozen unless `sync_ref_model` moves it."""

    engine: RoleEngine = field(default_factory=dict)
    """The reference's engine: the actor's, unless `name` says otherwise; keys left out are those of `actor.engine`."""
    sync_ref_model: bool = False
    """Move the reference towards the policy every `ref_model_sync_steps` steps (TR-DPO, arXiv:2404.09656); checkpoints
    then contain the reference. This key and the two below are TRL's."""
    ref_model_mixup_alpha: Fraction = 0.6
    """Share of the policy in the new reference's weights; the rest is the old reference."""
    ref_model_sync_steps: Positive = 512
    """Steps from one move of the reference to the next."""


@config
class RewardModelPathConfig:
    """The reward model's folder."""

    path: NodePath | None = None
    """Hugging Face folder, or its URL, with a head `score` of one output, and the policy's tokenizer."""


@config
class RewardModelConfig:
    """A model that scores responses. Names are verl's where verl has one."""

    enable: bool = False
    """Score responses by the model."""
    engine: RoleEngine = field(default_factory=dict)
    """The reward model's engine: the actor's, unless `name` says otherwise; keys left out are those of
    `actor.engine`."""
    model: RewardModelPathConfig = field(default_factory=RewardModelPathConfig)
    """The reward model's folder."""
    micro_batch_size_per_gpu: Positive | None = None
    """Rows per pass; null for the actor's log-prob passes' value."""
    weight: float = 1.0
    """Weight of the model's score in a row's score. Accuracy always comes from `reward`."""
    rule_weight: float = 0.0
    """Weight of the score of `reward` in a row's score."""


@config
class CriticModelConfig:
    """The critic's initial model."""

    path: NodePath | None = None
    """Hugging Face folder, or its URL; null for `model.path`. The value head starts at zero, unless the folder is an
    exported critic.
    """


@config
class CriticOptimConfig(OptimConfig):
    """The critic's optimizer and schedule."""

    lr: Annotated[float, Ge(0)] = 1e-5
    """Peak learning rate."""


@config
class CriticConfig:
    """The value model, used if the advantage estimator needs values."""

    engine: RoleEngine = field(default_factory=dict)
    """The critic's engine: the actor's, unless `name` says otherwise; keys left out are those of `actor.engine`."""
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    """The critic's initial model."""
    optim: CriticOptimConfig = field(default_factory=CriticOptimConfig)
    """Optimizer and schedule; one scheduler step is one training step."""
    ppo_mini_batch_size: Positive | None = None
    """Prompts per optimizer step; null for the actor's."""
    ppo_micro_batch_size_per_gpu: Positive | None = None
    """Rows per pass; null for the actor's."""
    ppo_epochs: Positive = 1
    """Passes over the step's batch."""
    cliprange_value: Annotated[float, Gt(0)] = 0.5
    """Clip range in the loss: how far a value may move from its value before the update."""
    loss_agg_mode: str = "token-mean"
    """Registry name of the loss aggregation."""


@config
class StopAtConfig:
    """A metric of the validation files that ends a run early."""

    metric: str = "val/accuracy"
    """Metric of the validation, sampled as `rollout.val_kwargs` says; higher is better."""
    value: float | None = None
    """End as soon as the metric is at least this; null to run all steps."""
    patience: Positive | None = None
    """End after this many validations in a row without a new highest value of the metric; null for no limit."""

    @property
    def set_key(self) -> str:
        """Name of the key that is set, for messages; empty if neither is."""
        return next((key for key in ("value", "patience") if getattr(self, key) is not None), "")


@config
class TrainerConfig:
    """Keys of every trainer."""

    name: str = "ppo"
    """Registry name of the trainer."""
    total_steps: Positive | None = None
    """Training steps; null for `total_epochs` passes over the data."""
    total_epochs: Positive = 1
    """Passes over the training data if `total_steps` is null."""
    seed: int = 0
    """Seed of data order, random initial weights, dropout and sampling."""
    save_freq: PositiveOrOff = -1
    """Steps between checkpoints; the last step is always saved; -1 for no checkpoints."""
    test_freq: PositiveOrOff = -1
    """Steps between validations; the last step is always validated; -1 for no validation."""
    val_before_train: bool = True
    """Validate before the first step."""
    log_val_generations: Literal[-1] | NonNegative = -1
    """Samples per validation that are sent to trackers, spread evenly over all; -1 for all."""
    max_ckpt_to_keep: PositiveOrOff = -1
    """Number of newest checkpoints to keep; -1 for all."""
    keep_best_ckpt: bool = True
    """Also keep the checkpoint with the highest `val/accuracy`, among checkpoints whose step was validated."""
    async_save: bool = False
    """Write checkpoints in the background from a copy in host memory, while training continues."""
    resume_mode: Literal["auto", "disable"] = "auto"
    """`auto` resumes from the newest checkpoint in `run_dir`; `disable` sets an earlier run in `run_dir` aside and
    starts from scratch.
    """
    max_recoveries: NonNegative = 3
    """Automatic restarts from the last checkpoint after worker processes, a node or a replica died; 0 ends the run
    with the error.
    """
    on_driver: bool = True
    """Run the training loop in the command's process; false runs it in a process on the cluster, if the runtime can
    start one. Use false for jobs submitted by `ray job submit`.
    """
    warm_start: Annotated[str | None, OptionOf("recipe")] = None
    """Recipe to train first, in `run_dir/warm_start`; this run starts from the model that it exports."""
    export: bool = False
    """Write the final model to `run_dir/export` as a Hugging Face folder."""
    default_hdfs_dir: str | None = None
    """URL of a copy of the run's checkpoints and exported model, on any file system that fsspec supports, such as
    `s3://bucket/run`, `hdfs://host/run` or `gs://bucket/run`. A run directory without checkpoints fetches the newest
    from there. Null for no copy.
    """
    balance_batch: bool = True
    """Assign rows to data-parallel ranks so that all ranks have about as many tokens; the rows of each mini-batch
    stay the same. No effect on one rank.
    """
    stop_at: StopAtConfig = field(default_factory=StopAtConfig)
    """Validation that ends the run before its last step."""

    def check(self) -> None:
        """Check that the keys fit each other.

        Raises:
            ConfigError: they do not; the message names the keys.
        """
        key = self.stop_at.set_key
        if key and self.test_freq == -1:
            raise ConfigError(
                f"trainer.stop_at.{key} is {getattr(self.stop_at, key):g}, but trainer.test_freq=-1 never validates; "
                "set trainer.test_freq to the steps between two validations"
            )

    def steps(self, batches_per_epoch: int) -> int:
        """Return the training steps of the run."""
        return self.total_steps if self.total_steps is not None else self.total_epochs * batches_per_epoch


@config
class StagesConfig:
    """A recipe's changes to the list of stages, by names in ``rollcast.stages``."""

    insert: list[str] = field(default_factory=list)
    """Stages to add although no stage reads their columns."""
    replace: dict[str, str] = field(default_factory=dict)
    """Name of a stage → name of its replacement."""
    remove: list[str] = field(default_factory=list)
    """Stages that are never added."""


@config
class PpoTrainerConfig(TrainerConfig):
    """Keys of ``trainer=ppo``."""

    max_staleness: NonNegative = 0
    """Steps by which rollouts may start ahead: 0 alternates generation and training, 1 generates the next step's
    rollouts while a step trains, and larger values keep more groups in flight. Above 0 the rollout needs its own
    replicas.
    """
    admission: str = "windowed_fifo"
    """Registry name of the rule that paces rollouts if `max_staleness` is above 0."""
    replay: LocalPath | None = None
    """Run directory of a run with `runtime.record_trajectories`: train on its recorded rollouts and rewards instead
    of generating.
    """
    critic_warmup: NonNegative = 0
    """Number of first steps that train only the critic."""
    stages: StagesConfig = field(default_factory=StagesConfig)
    """Changes to the list of stages; `rollcast plan` prints the list."""


@config
class SftTrainerConfig(TrainerConfig):
    """Keys of ``trainer=sft``."""

    name: str = "sft"
    """Registry name of the trainer."""


@config
class RunConfig:
    """Sections of every trainer."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    actor: ActorConfig = field(default_factory=ActorConfig)
    """The model in training."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The trainer."""


@config
class PpoConfig(RunConfig):
    """Sections of ``trainer=ppo``."""

    actor: PpoActorConfig = field(default_factory=PpoActorConfig)
    """The policy."""
    ref: RefConfig = field(default_factory=RefConfig)
    """The reference policy."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The value model."""
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """The reward model."""
    trainer: PpoTrainerConfig = field(default_factory=PpoTrainerConfig)
    """The trainer."""


@config
class SftConfig(RunConfig):
    """Sections of ``trainer=sft``."""

    trainer: SftTrainerConfig = field(default_factory=SftTrainerConfig)
    """The trainer."""
