"""TRL 1.16's GRPO loss: its own code with a stand-in for the trainer, and its equations restated row by row."""

from __future__ import annotations

import importlib.util
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

HAS_TRL = importlib.util.find_spec("trl") is not None
#: The keys of GRPOConfig that the loss reads, with their defaults.
DEFAULTS: Mapping[str, Any] = {
    "loss_type": "dapo",
    "epsilon": 0.2,
    "epsilon_high": None,
    "delta": None,
    "importance_sampling_level": "token",
    "beta": 0.0,
    "use_bias_correction_kl": True,
    "off_policy_mask_threshold": None,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "sapo_temperature_neg": 1.05,
    "sapo_temperature_pos": 1.0,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
}
LONGEST = 32


@dataclass(frozen=True)
class Rows:
    """A batch of responses; ``[B, T]`` float64 except ``advantages`` ``[B]`` and the mask, int64."""

    log_probs: Tensor
    old: Tensor
    ref: Tensor
    sampled: Tensor
    entropy: Tensor
    weights: Tensor
    advantages: Tensor
    mask: Tensor

    @classmethod
    def draw(cls, seed: int, spread: float, rows: int = 8, width: int = 12) -> Rows:
        """Draw ragged rows, one with a gap, whose log-ratios have the standard deviation ``spread``."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        mask = (torch.arange(width) < torch.randint(1, width + 1, (rows, 1), generator=generator)).long()
        mask[0] = 1
        mask[0, 3:6] = 0  # a tool's answer
        old = -normal(rows, width).abs() - 0.1
        new = old + spread * normal(rows, width)
        return cls(
            log_probs=new,
            old=old,
            # k3 is limited to 10, which a log-ratio of 2.6 exceeds.
            ref=new + (spread * normal(rows, width)).clamp(-2, 2),
            sampled=old + 0.05 * normal(rows, width),
            # TRL computes the quantile in float32.
            entropy=normal(rows, width).abs().float().double(),
            weights=normal(rows, width).exp().clamp(max=3.0) * mask + (1 - mask),
            advantages=normal(rows),
            mask=mask,
        )

    def part(self, rows: Tensor) -> Rows:
        """Return some of the rows."""
        return Rows(**{name: column[rows] for name, column in vars(self).items()})


class _Processes:
    """The parts of ``accelerate.Accelerator`` that the loss calls, in one process that stands for ``count``."""

    sync_gradients = False

    def __init__(self, count: int) -> None:
        self.num_processes = count

    def gather(self, value: Tensor) -> Tensor:
        return value

    def pad_across_processes(self, value: Tensor, **_: Any) -> Tensor:
        return value

    def reduce(self, value: Tensor, **_: Any) -> Tensor:
        return value


def trl_loss(
    options: Mapping[str, Any], rows: Rows, log_probs: Tensor, tokens: float, parts: int = 1, ranks: int = 1
) -> Tensor:
    """Return the loss that TRL's own ``GRPOTrainer`` computes for one micro-batch.

    Args:
        options: keys of GRPOConfig.
        rows: rows of the micro-batch.
        log_probs: log-probs of the policy, with gradient, ``[B, T]``.
        tokens: tokens of the optimizer step, over all micro-batches and ranks.
        parts, ranks: micro-batches of a step on each rank, and ranks.
    """
    from trl import GRPOTrainer

    chosen = {**DEFAULTS, **options}
    high = chosen["epsilon"] if chosen["epsilon_high"] is None else chosen["epsilon_high"]
    entropy = rows.entropy.clone()
    trainer = SimpleNamespace(
        **{name: chosen[name] for name in DEFAULTS if name not in ("epsilon", "epsilon_high")},
        args=SimpleNamespace(**chosen, steps_per_generation=parts),
        epsilon_low=chosen["epsilon"],
        epsilon_high=high,
        aux_loss_enabled=False,
        use_vllm=False,
        vllm_importance_sampling_correction=True,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=chosen["entropy_coef"] != 0.0,
        max_completion_length=LONGEST,
        current_gradient_accumulation_steps=parts,
        accelerator=_Processes(ranks),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, entropy, None),
    )
    trainer.get_high_entropy_mask = lambda *given: GRPOTrainer.get_high_entropy_mask(trainer, *given)
    ids = torch.zeros_like(rows.mask)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": rows.mask,
        "advantages": rows.advantages,
        "num_items_in_batch": torch.tensor(tokens, dtype=torch.float64),
        "old_per_token_logps": rows.old,
        "ref_per_token_logps": rows.ref,
        "sampling_per_token_logps": rows.sampled,
    }
    if options.get("vllm"):
        trainer.use_vllm = True
        inputs["importance_sampling_ratio"] = rows.weights
    return GRPOTrainer._compute_loss(trainer, None, inputs)


def restated_loss(options: Mapping[str, Any], rows: Rows, log_probs: Tensor) -> Tensor:
    """Return TRL's loss of one micro-batch from its equations, token by token."""
    chosen = {**DEFAULTS, **options}
    picked = [row.nonzero().flatten().tolist() for row in rows.mask]
    entropies = sorted(float(rows.entropy[i, t]) for i, places in enumerate(picked) for t in places)
    place = (1.0 - chosen["top_entropy_quantile"]) * (len(entropies) - 1)
    below, above = entropies[math.floor(place)], entropies[math.ceil(place)]
    floor = below + (place - math.floor(place)) * (above - below)
    losses: list[list[Tensor]] = []
    for i, places in enumerate(picked):
        log_ratios = [log_probs[i, t] - rows.old[i, t] for t in places]
        divergence = sum(float(rows.sampled[i, t] - log_probs[i, t].detach()) for t in places) / len(places)
        limit, advantage = chosen["off_policy_mask_threshold"], float(rows.advantages[i])
        is_far = limit is not None and advantage < 0 and divergence > limit
        of_row: list[Tensor] = []
        for t, log_ratio in zip(places, log_ratios, strict=True):
            is_sequence = chosen["importance_sampling_level"] == "sequence"
            ratio = (_mean(log_ratios) if is_sequence else log_ratio).exp()
            loss = _policy_term(chosen, ratio, advantage, log_probs[i, t], log_ratios)
            if is_far or float(rows.entropy[i, t]) < floor - 1e-15:
                loss = loss * 0.0
            if chosen["beta"]:
                d = rows.ref[i, t] - log_probs[i, t]
                loss = loss + chosen["beta"] * (d.exp() - d - 1) * (ratio if chosen["use_bias_correction_kl"] else 1.0)
            of_row.append(loss)
        losses.append(of_row)
    mean_entropy = sum(entropies) / len(entropies)
    return _aggregated(chosen["loss_type"], losses) - chosen["entropy_coef"] * mean_entropy


def _policy_term(
    chosen: Mapping[str, Any], ratio: Tensor, advantage: float, log_prob: Tensor, log_ratios: Sequence[Tensor]
) -> Tensor:
    low, kind = chosen["epsilon"], chosen["loss_type"]
    high = low if chosen["epsilon_high"] is None else chosen["epsilon_high"]
    if kind == "cispo":
        return -min(float(ratio.detach()), high) * advantage * log_prob
    if kind == "sapo":
        tau = chosen["sapo_temperature_pos"] if advantage > 0 else chosen["sapo_temperature_neg"]
        return -advantage * 4.0 / tau / (1.0 + (-tau * (ratio - 1.0)).exp())
    if kind == "vespo":
        sign = "pos" if advantage >= 0 else "neg"
        k, slope = chosen[f"vespo_k_{sign}"], chosen[f"vespo_lambda_{sign}"]
        log_weight = min(max(sum(float(each.detach()) for each in log_ratios), math.log(1e-8)), 20.0)
        return -math.exp(slope + k * log_weight - slope * math.exp(log_weight)) * advantage * log_prob
    value = float(ratio.detach())
    free = ratio if chosen["delta"] is None or value < chosen["delta"] else ratio * 0.0 + chosen["delta"]
    inside = 1.0 - low <= value <= 1.0 + high
    bounded = ratio if inside else ratio * 0.0 + (1.0 - low if value < 1.0 else 1.0 + high)
    is_free = advantage * float(free.detach()) < advantage * float(bounded.detach())
    return -advantage * (free if is_free else bounded)


def _aggregated(kind: str, losses: Sequence[Sequence[Tensor]]) -> Tensor:
    flat = [loss for of_row in losses for loss in of_row]
    if kind in ("grpo", "sapo"):
        return _mean([_mean(of_row) for of_row in losses])
    if kind == "luspo":
        return _sum(flat) / len(losses)
    return _sum(flat) / (len(losses) * LONGEST if kind == "dr_grpo" else len(flat))


def _sum(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).sum()


def _mean(values: Sequence[Tensor]) -> Tensor:
    return _sum(values) / len(values)
