"""Configuration of the trainers and the actor; importable without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollcast.contracts.engine import OptimConfig

__all__ = ["ActorConfig", "PpoTrainerConfig", "SftTrainerConfig", "TrainerConfig"]


@dataclass
class ActorConfig:
    """The policy in training. Names are verl's where it has one.

    Attributes:
        optim: optimizer and schedule.
        ppo_mini_batch_size: prompts an optimizer step (each with ``rollout.n`` samples).
        ppo_micro_batch_size_per_gpu: rows a forward and backward pass; empty for all at once.
        use_dynamic_bsz: split by ``ppo_max_token_len_per_gpu`` instead.
        ppo_max_token_len_per_gpu: padded tokens a micro-batch.
        log_prob_micro_batch_size_per_gpu: rows a pass that computes log-probs only.
        ppo_epochs: passes over the step's batch.
        shuffle: draw the rows of the mini-batches at random (from the seed and the step).
        policy_loss, policy_loss_kwargs: name in ``rollcast.policy_losses`` and its further options.
        clip_ratio_low, clip_ratio_high, clip_ratio_c: PPO's clip range and dual clip.
        loss_agg_mode: name in ``rollcast.loss_aggregations``.
        entropy_coeff: weight of the entropy bonus.
        use_kl_loss, kl_loss_coef, kl_loss_type: KL to the reference in the loss.
        skip_zero_advantage: leave rows whose advantage is zero throughout out of the update. The
            gradient is the same, since the denominators stay; ignored where entropy or KL are in
            the loss.
    """

    optim: OptimConfig = field(default_factory=OptimConfig)
    ppo_mini_batch_size: int = 64
    ppo_micro_batch_size_per_gpu: int | None = None
    use_dynamic_bsz: bool = False
    ppo_max_token_len_per_gpu: int = 16384
    log_prob_micro_batch_size_per_gpu: int | None = None
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


@dataclass
class TrainerConfig:
    """What every trainer reads.

    Attributes:
        name: of the trainer, in ``rollcast.trainers``.
        total_steps: training steps; empty for ``total_epochs`` passes over the data.
        total_epochs: passes over the training data, where ``total_steps`` is empty.
        seed: of data order, initial weights and sampling.
        save_freq: a checkpoint every so many steps and at the end; -1 for none.
        test_freq: a validation every so many steps and at the end; -1 for none.
        val_before_train: validate before the first step.
        max_ckpt_to_keep: checkpoints that are kept, the newest; -1 for all.
        resume_mode: ``auto`` goes on from the newest checkpoint in ``run_dir``, ``disable`` sets an
            earlier run in ``run_dir`` aside and starts anew.
        warm_start: recipe that is trained first, in ``run_dir/warm_start``; the model that it
            exports is where this run starts.
        export: write the final model to ``run_dir/export`` as a Hugging Face folder.
    """

    name: str = "ppo"
    total_steps: int | None = None
    total_epochs: int = 1
    seed: int = 0
    save_freq: int = -1
    test_freq: int = -1
    val_before_train: bool = True
    max_ckpt_to_keep: int = -1
    resume_mode: str = "auto"
    warm_start: str | None = None
    export: bool = False


@dataclass
class PpoTrainerConfig(TrainerConfig):
    """Keys of ``trainer=ppo``."""


@dataclass
class SftTrainerConfig(TrainerConfig):
    """Keys of ``trainer=sft``.

    Attributes:
        stop_at_accuracy: end as soon as ``val/accuracy`` reaches this; empty to run all steps.
    """

    name: str = "sft"
    stop_at_accuracy: float | None = None
