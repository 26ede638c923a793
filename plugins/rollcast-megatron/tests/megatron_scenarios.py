"""What the tests do on each rank; importable by the spawned processes."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollcast.contracts.algorithm import kl_penalties, kl_penalty
from rollcast.contracts.engine import (
    EngineSetup,
    ForwardSettings,
    LossInputs,
    LossOutput,
    ModelConfig,
    ModelType,
    OptimConfig,
)
from rollcast.contracts.worker import WorkerContext
from rollcast.errors import RollcastError
from rollcast.protocol import DataProto
from rollcast_megatron.engine import MegatronEngine
from rollcast_megatron.schemas import MegatronConfig
from rollcast_testing.tiny import distance_loss, nll_loss, random_batch

ALONE = WorkerContext()
#: A larger eps than usual: the gradient of a key's bias is next to nothing, and Adam would turn its
#: rounding into whole steps.
OPTIM = OptimConfig(lr=1e-2, clip_grad=0.5, eps=1e-4, weight_decay=0.1)
EVERYTHING = ForwardSettings(
    temperature=0.7, calculate_entropy=True, calculate_sum_pi_squared=True, max_token_len_per_gpu=33
)


def build(
    context: WorkerContext,
    folder: Path,
    model_type: ModelType = "language_model",
    trained: bool = True,
    random_init: bool = False,
    lora: dict[str, Any] | None = None,
    **keys: Any,
) -> MegatronEngine:
    gc.collect()
    model = ModelConfig(path=str(folder), random_init=random_init, **(lora or {}))
    optim = OPTIM if trained else None
    engine = MegatronEngine(EngineSetup(model_type, model, MegatronConfig(**keys), optim, context, seed=3))
    engine.initialize()
    return engine


def weights(engine: MegatronEngine) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in engine.get_per_tensor_param()}


def share(engine: MegatronEngine, batch: DataProto, splits: list[int] | None = None) -> DataProto:
    """The rows of this rank's copy of the model: equal parts, or as many as ``splits`` says."""
    rank, size = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    if size == 1:
        return batch
    splits = splits or [len(batch) // size] * size
    return batch.slice(sum(splits[:rank]), sum(splits[: rank + 1]))


def step(
    engine: MegatronEngine, seed: int, splits: list[int] | None = None, settings: ForwardSettings = EVERYTHING
) -> Any:
    loss = distance_loss if engine.setup.model_type == "value_model" else nll_loss
    with engine.train_mode():
        result = engine.train_batch(share(engine, random_batch(8, 6, 8, seed=seed), splits), loss, settings)
    engine.lr_scheduler_step()
    return result


def infer(
    engine: MegatronEngine, splits: list[int] | None = None, settings: ForwardSettings = EVERYTHING
) -> dict[str, Tensor]:
    with engine.eval_mode():
        output, _ = engine.infer_batch(share(engine, random_batch(8, 6, 8, seed=50), splits), settings)
    return {name: output[name] for name in output.keys()}  # noqa: SIM118


def train(
    context: WorkerContext, folder: Path, steps: int = 2, splits: list[int] | None = None, **options: Any
) -> dict[str, Any]:
    """Log-probs before, some steps, and the weights after."""
    engine = build(context, folder, **options)
    before = infer(engine, splits)
    history = [step(engine, seed, splits) for seed in range(steps)]
    return {
        "before": before,
        "history": history,
        "weights": weights(engine),
        "place": (engine.get_data_parallel_rank(), engine.is_mp_src_rank_with_outputs()),
    }


def save(
    context: WorkerContext, folder: Path, checkpoint: Path, steps: int = 3, background: bool = False, **options: Any
) -> dict[str, Any]:
    """Two steps, a checkpoint, and some steps more; in the background, the steps change what is being written."""
    engine = build(context, folder, **options)
    for seed in range(2):
        step(engine, seed)
    (engine.start_checkpoint if background else engine.save_checkpoint)(checkpoint)
    saved, noise = weights(engine), torch.rand(2)
    history = [step(engine, seed) for seed in range(2, 2 + steps)]
    if not engine.finish_checkpoint(wait=True):
        raise RuntimeError("the checkpoint is not complete after the wait for it")
    return {"saved": saved, "noise": noise, "history": history, "after": weights(engine), "lr": engine.current_lr()}


def write_slowly(context: WorkerContext, folder: Path, checkpoint: Path) -> tuple[bool, bool]:
    """Whether a checkpoint whose files take a while is complete when it was started, and after the wait for it."""
    from rollcast_megatron.writer import ShardWriter

    go_on, write = threading.Event(), ShardWriter.write

    def late(self: ShardWriter, group: Any = None) -> None:
        go_on.wait(60)
        write(self, group)

    engine = build(context, folder)
    ShardWriter.write = late  # type: ignore[method-assign]
    try:
        engine.start_checkpoint(checkpoint)
        step(engine, 0)
        before = engine.finish_checkpoint(wait=False)
        go_on.set()
        return before, engine.finish_checkpoint(wait=True)
    finally:
        ShardWriter.write = write  # type: ignore[method-assign]


def resume(context: WorkerContext, folder: Path, checkpoint: Path, steps: int = 3, **options: Any) -> dict[str, Any]:
    """The same from the checkpoint."""
    engine = build(context, folder, random_init=True, **options)
    engine.load_checkpoint(checkpoint)
    saved, noise = weights(engine), torch.rand(2)
    history = [step(engine, seed) for seed in range(2, 2 + steps)]
    return {"saved": saved, "noise": noise, "history": history, "after": weights(engine), "lr": engine.current_lr()}


@kl_penalty(needs_vocabulary=True)
def exact_kl(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    policy, ref = log_probs.log_softmax(-1), ref_log_probs.log_softmax(-1)
    return (policy.exp() * (policy - ref)).sum(-1)


def kl_loss(inputs: LossInputs) -> LossOutput:
    assert inputs.vocabulary_kl is not None
    loss = (inputs.vocabulary_kl * inputs.response_mask).sum() / inputs.denominators.tokens
    return LossOutput(loss, {"nll": loss.detach()})


def compare(
    context: WorkerContext, folder: Path, other: Path, theirs: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """Two steps on the exact KL from another model, whose engine may have keys of its own."""
    reference = build(context, other, trained=False, **(options if theirs is None else theirs))
    engine = build(context, folder, **options)
    settings = ForwardSettings(vocabulary_kl="exact", micro_batch_size_per_gpu=3)
    with kl_penalties.temporarily("exact", exact_kl):
        engine.set_reference(reference)
        before = infer(engine, settings=settings)
        history = []
        for seed in range(2):
            with engine.train_mode():
                history.append(engine.train_batch(share(engine, random_batch(8, 6, 8, seed=seed)), kl_loss, settings))
    return {"before": before, "history": history, "weights": weights(engine)}


def fail(context: WorkerContext, folder: Path, **options: Any) -> str:
    """What an engine says that cannot be built."""
    try:
        build(context, folder, **options)
    except RollcastError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def fail_to_load(context: WorkerContext, folder: Path, checkpoint: Path, **options: Any) -> dict[str, Any]:
    """What an engine says to a checkpoint, and whether it stayed as it was."""
    engine = build(context, folder, **options)
    before = weights(engine)
    try:
        engine.load_checkpoint(checkpoint)
        text = "nothing"
    except RollcastError as error:
        text = f"{type(error).__name__}: {error}"
    after = weights(engine)
    return {"text": text, "same": all(torch.equal(after[name], tensor) for name, tensor in before.items())}


def two_meshes(context: WorkerContext, folder: Path) -> str:
    """What an engine says that is to be split otherwise than one that lives."""
    engine = build(context, folder, tensor_model_parallel_size=2)
    text = fail(context, folder, pipeline_model_parallel_size=2)
    assert engine.mesh.tensor_size == 2
    return text


def export(context: WorkerContext, folder: Path, output: Path, **options: Any) -> dict[str, Any]:
    """A step, an export, and log-probs to compare it by."""
    engine = build(context, folder, **options)
    step(engine, 1)
    engine.export(output)
    with engine.in_process_module() as module:
        whole = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
    return {"before": infer(engine), "weights": weights(engine), "whole": whole}


def gather_counted(context: WorkerContext, folder: Path, limit: int, **keys: Any) -> tuple[int, list[str], list[str]]:
    """Export the weights of a folder; return the number of collectives, the names, and those that lost bits."""
    import torch.distributed as dist
    from safetensors.torch import load_file

    from rollcast_megatron.weights import gather

    engine = build(context, folder, trained=False, **keys)
    counted = [0]

    def counting(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counted[0] += 1
            return function(*args, **kwargs)

        return call

    names = ["broadcast", "all_gather", "all_gather_single", "all_gather_into_tensor"]
    originals = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
    try:
        for name, function in originals.items():
            setattr(dist, name, counting(function))
        found = dict(gather(engine.plan, dict(engine.stage.named_parameters()), engine.shapes, limit))
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)
    expected = load_file(folder / "model.safetensors")
    wrong = [
        name
        for name, tensor in found.items()
        if tensor.shape != expected[name].shape or not torch.equal(tensor, expected[name].to(tensor.dtype))
    ]
    return counted[0], list(found), wrong


def _build_in_buckets(bucket: int | None, *place: Any, **options: Any) -> MegatronEngine:
    import megatron.core.distributed as distributed

    original, sizes = distributed.DistributedDataParallelConfig, {} if bucket is None else {"bucket_size": bucket}
    distributed.DistributedDataParallelConfig = lambda **given: original(**sizes, **given)
    try:
        return build(*place, **options)
    finally:
        distributed.DistributedDataParallelConfig = original


def overlap(
    context: WorkerContext,
    folder: Path,
    checkpoint: Path,
    bucket: int | None = 300,
    splits: list[int] | None = None,
    lora: dict[str, Any] | None = None,
    **keys: Any,
) -> dict[str, Any]:
    """Steps on buckets of ``bucket`` parameters, with passes, weights and a checkpoint between them.

    Returns:
        Also ``early``, the share of buckets that were reduced before each step asked for the gradient's norm, and
        ``stale``, the number of weights that a step left to be gathered.
    """
    engine = _build_in_buckets(bucket, context, folder, lora=lora, **keys)
    optimizer = engine.optimizer
    assert optimizer is not None
    groups = [group for runner in engine.runners for group in runner.bucket_groups]
    early: list[float] = []
    norm = optimizer.gradient_norm

    def noted() -> float:
        early.append(sum(group.grad_reduce_handle is not None for group in groups) / len(groups))
        return norm()

    optimizer.gradient_norm = noted  # type: ignore[method-assign]
    history, seen = [step(engine, seed, splits) for seed in range(2)], {}
    # Another batch in one block: its passes and its weights come before anything else completes the weights.
    with engine.train_mode():
        data = share(engine, random_batch(8, 6, 8, seed=2), splits)
        history.append(engine.train_batch(data, nll_loss, EVERYTHING))
        raw = [parameter.detach().clone() for parameter in engine.stage.parameters()]
        seen["within"] = weights(engine)
        stale = sum(int((a != b).sum()) for a, b in zip(raw, engine.stage.parameters(), strict=True))
        history.append(engine.train_batch(data, nll_loss, EVERYTHING))
        output, _ = engine.infer_batch(data, EVERYTHING)
        history.append(engine.train_batch(data, nll_loss, EVERYTHING))
        engine.save_checkpoint(checkpoint)
    # Gradients of two batches for one step.
    with engine.train_mode():
        engine.optimizer_zero_grad()
        for seed in (3, 4):
            given = share(engine, random_batch(8, 6, 8, seed=seed), splits)
            engine.forward_backward_batch(given, nll_loss, EVERYTHING)
        total, _ = engine.optimizer_step()
    seen["after"] = weights(engine)
    engine.load_checkpoint(checkpoint)
    seen["loaded"] = weights(engine)
    history.append(step(engine, 5, splits))
    seen["end"] = weights(engine)
    return {
        "history": history,
        "log_probs": output["log_probs"],
        "total": total,
        "weights": seen,
        "early": early,
        "stale": stale,
        "groups": len(groups),
    }


def offload(context: WorkerContext, folder: Path, checkpoint: Path, **keys: Any) -> dict[str, Any]:
    """Train with state in host memory between updates, and read the weights there; on a CPU, both are host memory."""
    engine = build(context, folder, param_offload=True, optimizer_offload=True, **keys)
    engine.can_offload = True
    engine._offload()
    stayed = [name for name, weight in engine.stage.named_parameters() if weight.untyped_storage().nbytes()]
    history = [step(engine, 0), step(engine, 1)]
    synced = weights(engine)
    engine.save_checkpoint(checkpoint)
    history.append(step(engine, 2))
    engine.to("cpu")
    engine.load_checkpoint(checkpoint)
    history.append(step(engine, 2))
    gradients = [buffer.grad_data.untyped_storage().nbytes() for buffer in engine.memory._buffers()]
    stayed += [name for name, weight in engine.stage.named_parameters() if weight.untyped_storage().nbytes()]
    return {"stayed": stayed, "gradients": sum(gradients), "history": history, "synced": synced}


def stay(context: WorkerContext, folder: Path, **keys: Any) -> dict[str, Any]:
    """Take the steps of :func:`offload` with all state in place."""
    engine = build(context, folder, **keys)
    history = [step(engine, 0), step(engine, 1)]
    return {"synced": weights(engine), "history": [*history, step(engine, 2)]}
