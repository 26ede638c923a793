"""Configuration of the trainers and the actor; importable without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from rollcast.contracts.engine import OptimConfig
from rollcast.errors import ConfigError

__all__ = [
    "ActorConfig",
    "CriticConfig",
    "CriticModelConfig",
    "PpoActorConfig",
    "PpoTrainerConfig",
    "RefConfig",
    "RewardModelConfig",
    "RewardModelPathConfig",
    "SftTrainerConfig",
    "StagesConfig",
    "StopAtConfig",
    "TrainerConfig",
]

RESUME_MODES = ("auto", "disable")


@dataclass
class ActorConfig:
    """The model in training, whatever its loss. Names are verl's where it has one.

    Attributes:
        optim: optimizer and schedule; one scheduler step is one training step.
        ppo_micro_batch_size_per_gpu: rows a forward and backward pass; empty for all at once.
        use_dynamic_bsz: split by ``ppo_max_token_len_per_gpu`` instead.
        ppo_max_token_len_per_gpu: tokens a micro-batch on each device, with padding unless the engine packs.
    """

    optim: OptimConfig = field(default_factory=OptimConfig)
    ppo_micro_batch_size_per_gpu: int | None = None
    use_dynamic_bsz: bool = False
    ppo_max_token_len_per_gpu: int = 16384

    def check(self, longest: int, sequence_ranks: int = 1) -> None:
        """Refuse micro-batches that cannot hold a row.

        Args:
            longest: tokens of the longest row that the run allows.
            sequence_ranks: devices that share a row's tokens.

        Raises:
            ConfigError: names the key and what it must be at least.
        """
        _at_least_one("actor.ppo_micro_batch_size_per_gpu", self.ppo_micro_batch_size_per_gpu)
        if self.use_dynamic_bsz and self.ppo_max_token_len_per_gpu * sequence_ranks < longest:
            shared = f", shared by {sequence_ranks} devices" if sequence_ranks > 1 else ""
            raise ConfigError(
                f"actor.ppo_max_token_len_per_gpu is {self.ppo_max_token_len_per_gpu}{shared}, but a row may have "
                f"{longest} tokens (data.max_prompt_length + data.max_response_length); "
                "raise the one or lower the others"
            )


@dataclass
class PpoActorConfig(ActorConfig):
    """The policy of ``trainer=ppo``.

    Attributes:
        ppo_mini_batch_size: prompts an optimizer step (each with ``rollout.n`` samples).
        log_prob_micro_batch_size_per_gpu: rows a pass that computes log-probs only; empty for
            ``ppo_micro_batch_size_per_gpu``.
        log_prob_check_rows: rows of a step on which the rollout's log-probs are compared with the actor's, where
            the rollout's serve as the old ones; 0 for none, -1 to compute the old ones of all rows.
        ppo_epochs: passes over the step's batch.
        shuffle: draw the rows of the mini-batches at random, anew in each epoch, from the seed and
            the step; otherwise they are cut from the batch in its order.
        policy_loss, policy_loss_kwargs: name in ``rollcast.policy_losses`` and its further options.
        clip_ratio_low, clip_ratio_high, clip_ratio_c: PPO's clip range and dual clip.
        loss_agg_mode: name in ``rollcast.loss_aggregations``.
        entropy_coeff: weight of the entropy bonus.
        use_kl_loss, kl_loss_coef, kl_loss_type: KL to the reference in the loss.
        skip_zero_advantage: leave rows whose advantage is zero throughout out of the update. The
            gradient is the same, since the denominators stay; metrics of the policy loss
            (``actor/kl``, ``actor/clip_fraction``) are then means over the rows that took part.
            Without effect where entropy or KL are in the loss, or where the policy loss has a
            gradient at a zero advantage.
    """

    ppo_mini_batch_size: int = 64
    log_prob_micro_batch_size_per_gpu: int | None = None
    log_prob_check_rows: int = 8
    ppo_epochs: int = 1
    shuffle: bool = True
    policy_loss: str = "vanilla"
    policy_loss_kwargs: dict[str, Any] = field(default_factory=dict)
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    loss_agg_mode: str = "token-mean"
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "k3"
    skip_zero_advantage: bool = True

    def check(self, longest: int, sequence_ranks: int = 1) -> None:
        super().check(longest, sequence_ranks)
        _at_least_one("actor.log_prob_micro_batch_size_per_gpu", self.log_prob_micro_batch_size_per_gpu)


@dataclass
class RefConfig:
    """The reference policy: the initial model, frozen.

    Attributes:
        engine: keys in which the reference's engine differs from the actor's; with another ``name``, all that differ
            from that engine's defaults. ``param_offload`` keeps the weights in host memory between passes.
    """

    engine: dict[str, Any] = field(default_factory=dict)


@dataclass
class RewardModelPathConfig:
    """Where the reward model is.

    Attributes:
        path: a Hugging Face folder with a head ``score`` of one output, and the policy's tokenizer.
    """

    path: str | None = None


@dataclass
class RewardModelConfig:
    """A model that scores responses. Names are verl's where it has one.

    Attributes:
        enable: whether there is one.
        model: which.
        micro_batch_size_per_gpu: rows a pass; empty for the actor's of log-probs.
        engine: keys in which its engine differs from the actor's.
        weight, rule_weight: a row's score is ``weight`` times the model's plus ``rule_weight`` times
            that of ``reward``. Accuracy is always that of ``reward``.
    """

    enable: bool = False
    model: RewardModelPathConfig = field(default_factory=RewardModelPathConfig)
    micro_batch_size_per_gpu: int | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    rule_weight: float = 0.0


@dataclass
class CriticModelConfig:
    """What the critic starts from.

    Attributes:
        path: a Hugging Face folder; empty for ``model.path``. The value head starts at zero, unless the
            folder is that of an exported critic.
    """

    path: str | None = None


@dataclass
class CriticConfig:
    """The value model, which runs where the estimator needs values.

    Attributes:
        model: what it starts from.
        engine: keys in which its engine differs from the actor's.
        optim: optimizer and schedule; one scheduler step is one training step.
        ppo_mini_batch_size: prompts an optimizer step; empty for the actor's.
        ppo_micro_batch_size_per_gpu: rows a pass; empty for the actor's.
        ppo_epochs: passes over the step's batch.
        cliprange_value: how far a value may move from the one before the update, in the loss.
        loss_agg_mode: name in ``rollcast.loss_aggregations``.
    """

    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    engine: dict[str, Any] = field(default_factory=dict)
    optim: OptimConfig = field(default_factory=OptimConfig)
    ppo_mini_batch_size: int | None = None
    ppo_micro_batch_size_per_gpu: int | None = None
    ppo_epochs: int = 1
    cliprange_value: float = 0.5
    loss_agg_mode: str = "token-mean"

    def check(self) -> None:
        """Refuse values that mean nothing.

        Raises:
            ConfigError: names the key and what it must be.
        """
        for key in ("ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_epochs"):
            _at_least_one(f"critic.{key}", getattr(self, key))
        if self.cliprange_value <= 0:
            raise ConfigError(f"critic.cliprange_value is {self.cliprange_value:g}; it must be above 0")


@dataclass
class TrainerConfig:
    """What every trainer reads.

    Attributes:
        name: of the trainer, in ``rollcast.trainers``.
        total_steps: training steps; empty for ``total_epochs`` passes over the data.
        total_epochs: passes over the training data, where ``total_steps`` is empty.
        seed: of data order, random initial weights, dropout and sampling.
        save_freq: a checkpoint every so many steps and at the end; -1 for none.
        test_freq: a validation every so many steps and at the end; -1 for none.
        val_before_train: validate before the first step.
        log_val_generations: samples of a validation that trackers are given, evenly over all; -1 for all.
        max_ckpt_to_keep: checkpoints that are kept, the newest; -1 for all.
        keep_best_ckpt: keep the one with the highest ``val/accuracy`` beside those, where a validation
            was due with a checkpoint.
        async_save: write checkpoints while training goes on, from a copy in host memory.
        resume_mode: ``auto`` goes on from the newest checkpoint in ``run_dir``, ``disable`` sets an
            earlier run in ``run_dir`` aside and starts anew.
        warm_start: recipe that is trained first, in ``run_dir/warm_start``; the model that it
            exports is where this run starts.
        export: write the final model to ``run_dir/export`` as a Hugging Face folder.
        balance_batch: choose the data-parallel rank of each row so that all ranks have about as many
            tokens; the rows of each mini-batch stay the same. Without effect on one rank.
    """

    #: Dataclass of the ``actor`` section of runs with this trainer.
    actor_schema: ClassVar[type[ActorConfig]] = ActorConfig

    name: str = "ppo"
    total_steps: int | None = None
    total_epochs: int = 1
    seed: int = 0
    save_freq: int = -1
    test_freq: int = -1
    val_before_train: bool = True
    log_val_generations: int = -1
    max_ckpt_to_keep: int = -1
    keep_best_ckpt: bool = True
    async_save: bool = False
    resume_mode: str = "auto"
    warm_start: str | None = None
    export: bool = False
    balance_batch: bool = True

    def check(self) -> None:
        """Refuse values that mean nothing.

        Raises:
            ConfigError: names the key, its value and what is valid.
        """
        if self.resume_mode not in RESUME_MODES:
            raise ConfigError(f"trainer.resume_mode is {self.resume_mode!r}; valid: {', '.join(RESUME_MODES)}")
        for key in ("save_freq", "test_freq", "max_ckpt_to_keep"):
            value = getattr(self, key)
            if value < 1 and value != -1:
                raise ConfigError(f"trainer.{key} is {value}; it must be at least 1, or -1")
        if self.log_val_generations < -1:
            raise ConfigError(
                f"trainer.log_val_generations is {self.log_val_generations}; it must be at least 0, or -1"
            )
        _at_least_one("trainer.total_steps", self.total_steps)
        _at_least_one("trainer.total_epochs", self.total_epochs)

    def steps(self, batches_per_epoch: int) -> int:
        """Training steps of the run."""
        return self.total_steps if self.total_steps is not None else self.total_epochs * batches_per_epoch


@dataclass
class StagesConfig:
    """A recipe's changes to the list of stages, by names in ``rollcast.stages``.

    Attributes:
        insert: stages that are put in although nothing reads what they write.
        replace: name of a stage to the name of the one that takes its place.
        remove: stages that are never put in.
    """

    insert: list[str] = field(default_factory=list)
    replace: dict[str, str] = field(default_factory=dict)
    remove: list[str] = field(default_factory=list)


@dataclass
class PpoTrainerConfig(TrainerConfig):
    """Keys of ``trainer=ppo``.

    Attributes:
        critic_warmup: steps at the start that train the critic alone.
        stages: changes to the list of stages, see ``rollcast plan``.
    """

    actor_schema: ClassVar[type[ActorConfig]] = PpoActorConfig

    critic_warmup: int = 0
    stages: StagesConfig = field(default_factory=StagesConfig)

    def check(self) -> None:
        super().check()
        if self.critic_warmup < 0:
            raise ConfigError(f"trainer.critic_warmup is {self.critic_warmup}; it cannot be negative")


@dataclass
class StopAtConfig:
    """A goal on the validation files that ends a run.

    Attributes:
        metric: a metric of the validation, sampled as ``rollout.val_kwargs`` says.
        value: end as soon as the metric is at least this; empty to run all steps.
    """

    metric: str = "val/accuracy"
    value: float | None = None


@dataclass
class SftTrainerConfig(TrainerConfig):
    """Keys of ``trainer=sft``.

    Attributes:
        stop_at: the goal that ends the run before its last step.
    """

    name: str = "sft"
    stop_at: StopAtConfig = field(default_factory=StopAtConfig)

    def check(self) -> None:
        super().check()
        if self.stop_at.value is not None and self.test_freq == -1:
            raise ConfigError(
                f"trainer.stop_at.value is {self.stop_at.value:g}, but trainer.test_freq=-1 never validates; "
                "set trainer.test_freq to the steps between two validations"
            )


def _at_least_one(key: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{key} is {value}; it must be at least 1")
