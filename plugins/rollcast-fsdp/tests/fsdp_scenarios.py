"""What the tests do on each rank; importable by the spawned processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from fake_streams import RecordingStream
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
from rollcast.protocol import DataProto
from rollcast_engine.rng import capture_rng
from rollcast_fsdp.engine import FsdpEngine
from rollcast_fsdp.residency import Residency
from rollcast_fsdp.schemas import FsdpConfig
from rollcast_testing.tiny import random_batch

ALONE = WorkerContext()
#: A larger eps than usual: the gradient of a key's bias is next to nothing, and Adam would turn its
#: rounding into whole steps.
EPS = 1e-4


def nll(inputs: LossInputs) -> LossOutput:
    """Token-mean negative log-likelihood, with metrics that add up and one that does not."""
    assert inputs.log_probs is not None
    losses = -inputs.log_probs * inputs.response_mask
    loss = losses.sum() / inputs.denominators.tokens
    rows = (inputs.response_mask.sum(-1) > 0).sum() / inputs.denominators.sequences
    return LossOutput(loss, {"nll": loss.detach(), "rows": rows}, {"worst": losses.max().detach()})


def value_loss(inputs: LossInputs) -> LossOutput:
    """Distance of the values from 1."""
    assert inputs.values is not None
    loss = ((inputs.values - 1.0) ** 2 * inputs.response_mask).sum() / inputs.denominators.tokens
    return LossOutput(loss, {"value": loss.detach()})


def build(
    context: WorkerContext,
    folder: Path,
    model_type: ModelType = "language_model",
    optim: OptimConfig | None = None,
    random_init: bool = False,
    trained: bool = True,
    **keys: Any,
) -> FsdpEngine:
    optim = (optim or OptimConfig(lr=1e-2, clip_grad=0.5, eps=EPS)) if trained else None
    model = ModelConfig(path=str(folder), random_init=random_init)
    return build_model(context, model, FsdpConfig(**keys), optim, model_type)


def build_model(
    context: WorkerContext,
    model: ModelConfig,
    config: FsdpConfig,
    optim: OptimConfig | None = None,
    model_type: ModelType = "language_model",
) -> FsdpEngine:
    engine = FsdpEngine(EngineSetup(model_type, model, config, optim, context, seed=3))
    engine.initialize()
    return engine


def weights(engine: FsdpEngine) -> dict[str, Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in engine.get_per_tensor_param()}


def share(context: WorkerContext, splits: list[int], seed: int = 5) -> DataProto:
    """This rank's rows of a batch, of which rank r gets ``splits[r]``."""
    batch = random_batch(sum(splits), 6, 8, seed=seed)
    if context.world_size == 1:
        return batch
    start = sum(splits[: context.rank])
    return batch.select_idxs(list(range(start, start + splits[context.rank])))


def train(
    context: WorkerContext,
    folder: Path,
    splits: list[int],
    steps: int = 4,
    settings: ForwardSettings | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Some optimizer steps on this rank's share, with inference before each."""
    settings = settings or ForwardSettings(micro_batch_size_per_gpu=2)
    value_model = options.get("model_type") == "value_model"
    engine = build(context, folder, **options)
    history = []
    for step in range(steps):
        data = share(context, splits, seed=step)
        with engine.eval_mode():
            output, _ = engine.infer_batch(data, settings)
        with engine.train_mode():
            history.append(engine.train_batch(data, value_loss if value_model else nll, settings))
        engine.lr_scheduler_step()
    return {"history": history, "weights": weights(engine), "output": dict_of(output)}


def dict_of(data: DataProto) -> dict[str, Tensor]:
    return {name: data[name] for name in data.keys()}  # noqa: SIM118


def step_once(engine: FsdpEngine, context: WorkerContext, seed: int) -> None:
    with engine.train_mode():
        engine.train_batch(share(context, [2, 2], seed=seed), nll, ForwardSettings())
    engine.lr_scheduler_step()


def save_and_go_on(context: WorkerContext, folder: Path, checkpoint: Path, **options: Any) -> dict[str, Any]:
    """Train, save, train on."""
    torch.manual_seed(100 + context.rank)
    engine = build(context, folder, optim=OptimConfig(lr=1e-2, lr_warmup_steps=9, eps=EPS), **options)
    step_once(engine, context, 0)
    engine.save_checkpoint(checkpoint)
    return snapshot(engine, context)


def load_and_go_on(context: WorkerContext, folder: Path, checkpoint: Path, **options: Any) -> dict[str, Any]:
    """Load into a fresh engine, train on."""
    torch.manual_seed(999)
    engine = build(context, folder, optim=OptimConfig(lr=1e-2, lr_warmup_steps=9, eps=EPS), **options)
    engine.load_checkpoint(checkpoint)
    return snapshot(engine, context)


def snapshot(engine: FsdpEngine, context: WorkerContext) -> dict[str, Any]:
    saved = weights(engine)
    noise = torch.rand(4)
    rng = capture_rng()["numpy"]["keys"]
    step_once(engine, context, 1)
    return {"saved": saved, "noise": noise, "numpy": rng, "lr": engine.current_lr(), "after": weights(engine)}


def generate(context: WorkerContext, folder: Path) -> dict[str, Any]:
    """Each rank generates prompts of its own, of another number of tokens, then trains on."""
    engine = build(context, folder)
    step_once(engine, context, 0)
    prompt = torch.tensor([[7, 8, 9 + context.rank]])
    with engine.in_process_module() as module:
        tokens = [
            module.generate(  # type: ignore[operator]
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=5 + 7 * context.rank,
                min_new_tokens=5 + 7 * context.rank,
                do_sample=False,
            )
            for _ in range(1 + context.rank)
        ]
    step_once(engine, context, 1)
    return {"tokens": tokens[0], "after": weights(engine)}


def export(context: WorkerContext, folder: Path, output: Path, checkpoint: Path, **options: Any) -> dict[str, Tensor]:
    """Train a step, then export the live model and save a checkpoint."""
    engine = build(context, folder, **options)
    if options.get("model_type") == "value_model":
        with engine.train_mode():
            engine.train_batch(share(context, [2, 2]), value_loss, ForwardSettings())
    else:
        step_once(engine, context, 0)
    engine.export(output)
    engine.save_checkpoint(checkpoint)
    data, _ = engine.infer_batch(share(context, [2, 2]), ForwardSettings())
    return dict_of(data)


def move(context: WorkerContext, folder: Path) -> dict[str, Any]:
    """Keys and calls that move state, with a stand-in for a device's copies."""
    engine = build(context, folder, param_offload=True, optimizer_offload=True, enable_gradient_checkpointing=True)
    engine.residency = Residency(engine.module, engine.optimizer, RecordingStream())
    step_once(engine, context, 0)
    engine.to("cpu")
    engine.to("device", optimizer=False)
    step_once(engine, context, 1)
    return weights(engine)


def recover(context: WorkerContext, folder: Path) -> dict[str, Any]:
    """A loss that raises in the second micro-batch, on every rank, and then a step like any other."""
    calls: list[int] = []

    def fails(inputs: LossInputs) -> LossOutput:
        calls.append(1)
        if len(calls) > 1:
            raise ZeroDivisionError("in a loss function")
        return nll(inputs)

    engine = build(context, folder)
    caught = False
    try:
        with engine.train_mode():
            engine.train_batch(share(context, [2, 2], seed=9), fails, ForwardSettings(micro_batch_size_per_gpu=1))
    except ZeroDivisionError:
        caught = True
    step_once(engine, context, 0)
    return {"caught": caught, "weights": weights(engine)}


@kl_penalty(needs_vocabulary=True)
def exact(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The divergence of two distributions, from logits ``[B, T, V]``."""
    policy, ref = log_probs.log_softmax(-1), ref_log_probs.log_softmax(-1)
    return (policy.exp() * (policy - ref)).sum(-1)


def full_kl(inputs: LossInputs) -> LossOutput:
    """Token-mean of the exact divergence from the reference."""
    assert inputs.vocabulary_kl is not None
    loss = (inputs.vocabulary_kl * inputs.response_mask).sum() / inputs.denominators.tokens
    return LossOutput(loss, {"kl": loss.detach()})


def compare(
    context: WorkerContext,
    folder: Path,
    other: Path,
    splits: list[int],
    offload: bool = False,
    keys: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Two steps towards a second model, by the whole vocabulary, with inference between."""
    engine = build(context, folder, **(keys or {}))
    engine.set_reference(build(context, other, trained=False, param_offload=offload, **(keys or {})))
    settings = ForwardSettings(micro_batch_size_per_gpu=1, vocabulary_kl="exact")
    kl_penalties.register("exact", exact)
    history = []
    try:
        for step in range(2):
            with engine.train_mode():
                history.append(engine.train_batch(share(context, splits, seed=step), full_kl, settings))
            with engine.eval_mode():
                output, _ = engine.infer_batch(share(context, splits), settings)
    finally:
        kl_penalties.unregister("exact")
    return {"history": history, "weights": weights(engine), "output": dict_of(output)}


def compute_in_bf16(context: WorkerContext, folder: Path) -> float:
    """The first gradient's norm under mixed precision, on however many ranks."""
    engine = build(context, folder, param_dtype="bf16")
    with engine.train_mode():
        return engine.train_batch(share(context, [2, 2]), nll, ForwardSettings()).grad_norm


def gather_many(context: WorkerContext, folder: Path, limit: int) -> tuple[int, list[bool], list[str]]:
    """Gather shards of many shapes; return the number of collectives, and what came as it was sent."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from rollcast_fsdp.sharding import full_tensors

    build(context, folder)  # joins the ranks
    mesh = init_device_mesh("cpu", (context.world_size,))
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 3), (5, 3), (1,), (7,), (2, 2, 2), (3, 1), (1, 6), (64, 8)]
    wholes: dict[str, Tensor] = {str(shape): torch.randn(shape, generator=generator) for shape in shapes}
    wholes["bf16"] = torch.randn(9, 2, generator=generator).bfloat16()
    sharded: dict[str, Tensor] = {name: distribute_tensor(each, mesh, [Shard(0)]) for name, each in wholes.items()}
    wholes |= {"plain": torch.ones(3), "copied": torch.ones(4), "columns": torch.randn(4, 6, generator=generator)}
    sharded["plain"] = wholes["plain"]
    sharded["copied"] = distribute_tensor(wholes["copied"], mesh, [Replicate()])
    sharded["columns"] = distribute_tensor(wholes["columns"], mesh, [Shard(1)])
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    counted, gather = [0], getattr(dist, name)

    def count(*args: Any, **kwargs: Any) -> Any:
        counted[0] += 1
        return gather(*args, **kwargs)

    setattr(dist, name, count)
    try:
        found = list(full_tensors(sharded.items(), torch.device("cpu"), limit))
    finally:
        setattr(dist, name, gather)
    expected = [sharded[name].full_tensor() if hasattr(sharded[name], "full_tensor") else each for name, each in found]
    same = [
        torch.equal(each, whole) and each.shape == whole.shape for (_, each), whole in zip(found, expected, strict=True)
    ]
    return counted[0], same, [name for name, _ in found]
