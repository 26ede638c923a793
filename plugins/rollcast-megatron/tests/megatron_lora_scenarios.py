"""What the tests of adapters do on each rank; importable by the spawned processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron_scenarios import build, exact_kl, infer, kl_loss, share, step, weights
from torch import Tensor

from rollcast.contracts.algorithm import kl_penalties
from rollcast.contracts.engine import ForwardSettings
from rollcast.contracts.worker import WorkerContext
from rollcast_megatron.engine import MegatronEngine
from rollcast_testing.tiny import random_batch

LORA = {"lora_rank": 4, "lora_alpha": 12}


def adapter_of(engine: MegatronEngine) -> dict[str, Tensor]:
    adapter = engine.get_adapter()
    assert adapter is not None
    return {name: tensor.cpu().clone() for name, tensor in adapter.tensors.items()}


def train(
    context: WorkerContext, folder: Path, lora: dict[str, Any] | None = None, steps: int = 3, **options: Any
) -> dict[str, Any]:
    """Some steps; the adapter and outputs with and without it, before and after."""
    engine = build(context, folder, lora=lora or LORA, **options)
    settings = ForwardSettings(max_token_len_per_gpu=33)
    first, before = adapter_of(engine), infer(engine, settings=settings)
    history = [step(engine, seed, settings=settings) for seed in range(steps)]
    with engine.disable_adapter():
        base = infer(engine, settings=settings)
    after = infer(engine, settings=settings)
    history.append(step(engine, steps, settings=settings))
    return {
        "place": (engine.get_data_parallel_rank(), engine.is_mp_src_rank_with_outputs()),
        "first": first,
        "before": before,
        "base": base,
        "after": after,
        "history": history,
        "adapter": adapter_of(engine),
        "weights": weights(engine),
    }


def compare_with_base(context: WorkerContext, folder: Path, **keys: Any) -> dict[str, Any]:
    """Steps on the exact KL from the base model, from an adapter that differs from it."""
    engine = build(context, folder, lora=LORA, **keys)
    for seed in range(2):
        step(engine, seed)
    settings = ForwardSettings(vocabulary_kl="exact", micro_batch_size_per_gpu=3)
    engine.set_reference(engine)
    history = []
    with kl_penalties.temporarily("exact", exact_kl):
        for seed in range(2):
            with engine.train_mode():
                history.append(engine.train_batch(share(engine, random_batch(8, 6, 8, seed=seed)), kl_loss, settings))
    return {"history": history, "adapter": adapter_of(engine)}


def save(context: WorkerContext, folder: Path, checkpoint: Path, output: Path | None = None, **keys: Any) -> Any:
    """Two steps, a checkpoint and an export, and two steps more."""
    engine = build(context, folder, lora=LORA, **keys)
    for seed in range(2):
        step(engine, seed)
    engine.save_checkpoint(checkpoint)
    if output is not None:
        engine.export(output)
    return _go_on(engine)


def resume(context: WorkerContext, folder: Path, checkpoint: Path, **keys: Any) -> dict[str, Any]:
    """The same two steps from the checkpoint."""
    engine = build(context, folder, lora=LORA, **keys)
    engine.load_checkpoint(checkpoint)
    return _go_on(engine)


def _go_on(engine: MegatronEngine) -> dict[str, Any]:
    saved, noise = adapter_of(engine), torch.rand(2)
    outputs = infer(engine, settings=ForwardSettings())
    history = [step(engine, seed) for seed in (5, 6)]
    with engine.in_process_module() as module:
        logits = module(input_ids=torch.arange(1, 9).view(1, -1)).logits.clone()
    return {
        "saved": saved,
        "noise": noise,
        "outputs": outputs,
        "history": history,
        "adapter": adapter_of(engine),
        "logits": logits,
    }
