"""What the tests of loading and checkpoints do on each rank; importable by the spawned processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsdp_scenarios as scenarios
import torch
from torch.distributed.tensor import DTensor

from rollcast.contracts.engine import ForwardSettings, OptimConfig
from rollcast.contracts.worker import WorkerContext
from rollcast_engine.weights import WeightFolder
from rollcast_fsdp import model
from rollcast_fsdp.engine import FsdpEngine


def load(context: WorkerContext, folder: Path, **options: Any) -> dict[str, Any]:
    """The engine's weights, buffers and outputs, and how many bytes were read and are held for them."""
    counts: list[int] = []
    close = WeightFolder.close

    def closing(self: WeightFolder) -> None:
        counts.append(self.bytes_read)
        close(self)

    whole: list[bool] = []
    load_whole = model._load_whole

    def loading_whole(*args: Any) -> Any:
        whole.append(True)
        return load_whole(*args)

    WeightFolder.close = closing  # type: ignore[method-assign]
    model._load_whole = loading_whole
    try:
        engine = scenarios.build(context, folder, trained=False, **options)
    finally:
        WeightFolder.close = close  # type: ignore[method-assign]
        model._load_whole = load_whole
    held = sum(
        (parameter.to_local() if isinstance(parameter, DTensor) else parameter).nbytes
        for parameter in engine.module.parameters()
    )
    return {
        "loaded_whole": bool(whole),
        "weights": scenarios.weights(engine),
        "buffers": dict(engine.module.named_buffers()),
        "read": sum(counts),
        "held": held,
    }


OPTIM = OptimConfig(lr=1e-2, lr_warmup_steps=9, eps=scenarios.EPS)


def steps(engine: FsdpEngine, context: WorkerContext, count: int) -> list[dict[str, float]]:
    """Metrics of steps on the same rows, however many ranks share them."""
    history = []
    share = 4 // context.world_size
    for seed in range(count):
        data = scenarios.share(context, [share] * context.world_size, seed=seed)
        with engine.train_mode():
            result = engine.train_batch(data, scenarios.nll, ForwardSettings())
        engine.lr_scheduler_step()
        history.append({**result.metrics, "grad_norm": result.grad_norm, "lr": result.lr})
    return history


def go_on(
    context: WorkerContext, folder: Path, before: Path | None, after: Path | None, wait: bool = False
) -> dict[str, Any]:
    """Load a checkpoint, train a step, save the next in the background, and train three steps more meanwhile."""
    torch.manual_seed(7 + context.rank)
    engine = scenarios.build(context, folder, optim=OPTIM)
    if before is not None:
        engine.load_checkpoint(before)
    loaded = scenarios.weights(engine)
    steps(engine, context, 1)
    saved = scenarios.weights(engine)
    if after is not None:
        engine.start_checkpoint(after)
        if wait:
            assert engine.finish_checkpoint(wait=True)
    history = steps(engine, context, 3)
    assert engine.finish_checkpoint(wait=True)
    assert engine.finish_checkpoint(wait=False)
    return {"loaded": loaded, "saved": saved, "history": history}


def go_on_from(context: WorkerContext, folder: Path, before: Path) -> dict[str, Any]:
    """Load a checkpoint and train three steps."""
    engine = scenarios.build(context, folder, optim=OPTIM)
    engine.load_checkpoint(before)
    return {"loaded": scenarios.weights(engine), "history": steps(engine, context, 3)}


def fail_to_write(context: WorkerContext, folder: Path, checkpoint: Path) -> str:
    """The error of a checkpoint in the background of which one rank cannot write its part."""
    from rollcast.errors import CheckpointError
    from rollcast_engine import sharded_checkpoint as checkpoints

    write = checkpoints.write_sums

    def fail(path: Path, rank: int, written: Any) -> None:
        if rank == 1:
            raise OSError("no space left")
        write(path, rank, written)

    engine = scenarios.build(context, folder)
    checkpoints.write_sums = fail
    try:
        engine.start_checkpoint(checkpoint)
        steps(engine, context, 1)
        engine.finish_checkpoint(wait=True)
    except CheckpointError as error:
        return str(error)
    finally:
        checkpoints.write_sums = write
    return ""
