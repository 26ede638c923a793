"""What the tests of adapters do on each rank; importable by the spawned processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsdp_scenarios as scenarios
import torch
from torch import Tensor

from rollcast.contracts.algorithm import kl_penalties
from rollcast.contracts.engine import EngineSetup, ForwardSettings, ModelConfig, ModelType, OptimConfig
from rollcast.contracts.worker import WorkerContext
from rollcast_fsdp.engine import FsdpEngine
from rollcast_fsdp.schemas import FsdpConfig

RANK, ALPHA = 4, 12
OPTIM = OptimConfig(lr=1e-2, clip_grad=0.5, eps=scenarios.EPS)
ALL_ROWS = ForwardSettings()


def build(
    context: WorkerContext,
    folder: Path,
    model_type: ModelType = "language_model",
    optim: OptimConfig | None = OPTIM,
    keys: dict[str, Any] | None = None,
    **model: Any,
) -> FsdpEngine:
    """An engine that trains an adapter."""
    chosen = {"lora_rank": RANK, "lora_alpha": ALPHA, **model}
    setup = EngineSetup(
        model_type, ModelConfig(path=str(folder), **chosen), FsdpConfig(**(keys or {})), optim, context, seed=3
    )
    engine = FsdpEngine(setup)
    engine.initialize()
    return engine


def adapter_of(engine: FsdpEngine) -> dict[str, Tensor]:
    adapter = engine.get_adapter()
    assert adapter is not None
    return {name: tensor.cpu().clone() for name, tensor in adapter.tensors.items()}


def step(engine: FsdpEngine, context: WorkerContext, seed: int) -> Any:
    loss = scenarios.value_loss if engine.setup.model_type == "value_model" else scenarios.nll
    with engine.train_mode():
        result = engine.train_batch(scenarios.share(context, [2, 2], seed=seed), loss, ALL_ROWS)
    engine.lr_scheduler_step()
    return result


def infer(engine: FsdpEngine, context: WorkerContext) -> dict[str, Tensor]:
    with engine.eval_mode():
        return scenarios.dict_of(engine.infer_batch(scenarios.share(context, [2, 2], seed=9), ALL_ROWS)[0])


def train(context: WorkerContext, folder: Path, steps: int = 3, **options: Any) -> dict[str, Any]:
    """Some steps; the adapter and outputs with and without it, before and after."""
    engine = build(context, folder, **options)
    first = adapter_of(engine)
    before = infer(engine, context)
    history = [step(engine, context, seed) for seed in range(steps)]
    with engine.disable_adapter():
        base = infer(engine, context)
    after = infer(engine, context)
    history.append(step(engine, context, steps))
    return {
        "first": first,
        "before": before,
        "base": base,
        "after": after,
        "history": history,
        "adapter": adapter_of(engine),
        "weights": scenarios.weights(engine),
    }


def compare_with_base(context: WorkerContext, folder: Path) -> dict[str, Any]:
    """Steps towards the base model by the whole vocabulary, from an adapter that differs from it."""
    engine = build(context, folder)
    for seed in range(2):
        step(engine, context, seed)
    engine.set_reference(engine)
    settings = ForwardSettings(micro_batch_size_per_gpu=1, vocabulary_kl="exact")
    kl_penalties.register("exact", scenarios.exact)
    try:
        with engine.train_mode():
            history = [
                engine.train_batch(scenarios.share(context, [2, 2], seed=seed), scenarios.full_kl, settings)
                for seed in range(3)
            ]
    finally:
        kl_penalties.unregister("exact")
    return {"history": history, "adapter": adapter_of(engine)}


def save_and_go_on(context: WorkerContext, folder: Path, checkpoint: Path, output: Path) -> dict[str, Any]:
    """Two steps, a checkpoint and an export, and two steps more."""
    torch.manual_seed(100 + context.rank)
    engine = build(context, folder)
    for seed in range(2):
        step(engine, context, seed)
    engine.save_checkpoint(checkpoint)
    saved = adapter_of(engine)
    engine.export(output)
    outputs = infer(engine, context)
    history = [step(engine, context, seed) for seed in (5, 6)]
    return {"saved": saved, "outputs": outputs, "history": history, "adapter": adapter_of(engine)}


def load_and_go_on(context: WorkerContext, folder: Path, checkpoint: Path) -> dict[str, Any]:
    engine = build(context, folder)
    engine.load_checkpoint(checkpoint)
    saved = adapter_of(engine)
    outputs = infer(engine, context)
    history = [step(engine, context, seed) for seed in (5, 6)]
    return {"saved": saved, "outputs": outputs, "history": history, "adapter": adapter_of(engine)}


def generate(context: WorkerContext, folder: Path) -> dict[str, Tensor]:
    """What the module gives in process, and what the engine infers, both with the adapter."""
    engine = build(context, folder)
    for seed in range(2):
        step(engine, context, seed)
    ids = torch.tensor([[5, 6, 7, 8 + context.rank]])
    with engine.in_process_module() as module:
        logits = module(input_ids=ids).logits.clone()
        with engine.disable_adapter():
            base = module(input_ids=ids).logits.clone()
    return {"logits": logits, "base": base, "ids": ids}
