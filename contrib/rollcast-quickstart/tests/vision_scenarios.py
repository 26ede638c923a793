"""What the tests of the model with images do on each rank; importable by the spawned processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rollcast import build_section
from rollcast.contracts.engine import EngineSetup, ForwardSettings, LossInputs, LossOutput, ModelConfig, OptimConfig
from rollcast.contracts.worker import WorkerContext
from rollcast.protocol import DataProto
from rollcast_fsdp.engine import FsdpEngine
from rollcast_fsdp.schemas import FsdpConfig

ALONE = WorkerContext()


def nll(inputs: LossInputs) -> LossOutput:
    """Token-mean negative log-likelihood."""
    assert inputs.log_probs is not None
    loss = -(inputs.log_probs * inputs.response_mask).sum() / inputs.denominators.tokens
    return LossOutput(loss, {"nll": loss.detach()})


def build(folder: Path, context: WorkerContext = ALONE, random_init: bool = False, **keys: Any) -> FsdpEngine:
    config = build_section(FsdpConfig, keys, "actor.engine")
    optim = OptimConfig(lr=1e-3, eps=1e-4)
    model = ModelConfig(path=str(folder), random_init=random_init)
    engine = FsdpEngine(EngineSetup("language_model", model, config, optim, context, seed=3))
    engine.initialize()
    return engine


def train(context: WorkerContext, folder: Path, batch: DataProto, splits: list[int]) -> dict[str, Any]:
    """Take two steps on this rank's rows; return gradient norms, metrics, weights and log-probs."""
    engine = build(folder, context)
    start = sum(splits[: context.rank])
    stop = len(batch) if context.world_size == 1 else start + splits[context.rank]
    own = batch.slice(start, stop)
    settings = ForwardSettings(micro_batch_size_per_gpu=1)
    with engine.train_mode():
        steps = [engine.train_batch(own, nll, settings) for _ in range(2)]
    with engine.eval_mode():
        log_probs = engine.infer_batch(own, settings)[0]["log_probs"]
    weights = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}
    return {
        "steps": [(step.grad_norm, step.metrics) for step in steps],
        "weights": weights,
        "log_probs": log_probs.values() if isinstance(log_probs, torch.Tensor) else log_probs,
    }
