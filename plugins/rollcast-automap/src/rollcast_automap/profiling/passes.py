"""Measurement of passes through an engine; runs in the process of a worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from rollcast import Worker
from rollcast.contracts.device import empty_cache, synchronize
from rollcast.contracts.engine import LossInputs, LossOutput
from rollcast.protocol import DataProto
from rollcast_automap.profiling.memory_watch import read_peak, reset_peak, return_free_memory
from rollcast_trainer.api import TrainingWorker

__all__ = ["PassCost", "PassShape", "measure_passes", "random_rows"]


@dataclass(frozen=True)
class PassShape:
    """The shape of a pass over rows of equal length, which share prompts as in a training step.

    Attributes:
        rows: rows of the rank.
        prompt_tokens, response_tokens: tokens of each row, at least 1 each.
        vocabulary: exclusive upper bound of the token ids.
        samples: responses per prompt.
        batch_rows: rows of a step's batch, from which updates draw their mini-batches.
    """

    rows: int
    prompt_tokens: int
    response_tokens: int
    vocabulary: int
    samples: int = 1
    batch_rows: int = 1


@dataclass(frozen=True)
class PassCost:
    """The measurements of a rank.

    Attributes:
        forward, forward_backward, optimizer: seconds of each repetition; empty if not requested or out of memory.
        peaks: name of a measurement → peak bytes of the accelerator, or of the process without an accelerator.
        out_of_memory: names of the measurements that ran out of memory.
    """

    forward: list[float]
    forward_backward: list[float]
    optimizer: list[float]
    peaks: dict[str, int]
    out_of_memory: tuple[str, ...] = ()


def random_rows(shape: PassShape, seed: int, drawn: bool = False) -> DataProto:
    """Return a random batch for an engine, without padding; int64 columns ``[rows, prompt + response]``.

    Engines may compute a prompt that several rows share only once, so the rows share prompts as in training.

    Args:
        shape: sizes.
        seed: seed of the tokens and the draw.
        drawn: True to draw rows at random from the step's batch, as updates do; False for its first rows in order.
    """
    length = shape.prompt_tokens + shape.response_tokens
    generator = torch.Generator().manual_seed(seed)
    prompts = -(-max(shape.rows, shape.batch_rows if drawn else 0) // shape.samples)
    prompt_of = torch.arange(prompts).repeat_interleave(shape.samples)
    if drawn:
        prompt_of = prompt_of[torch.randperm(len(prompt_of), generator=generator)]
    prompt_ids = torch.randint(0, shape.vocabulary, (prompts, shape.prompt_tokens), generator=generator)
    responses = torch.randint(0, shape.vocabulary, (shape.rows, shape.response_tokens), generator=generator)
    ids = torch.cat([prompt_ids[prompt_of[: shape.rows]], responses], 1)
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(length).expand_as(ids).contiguous(),
            "responses": responses.contiguous(),
            "response_mask": torch.ones_like(responses),
        }
    )


def _loss(inputs: LossInputs) -> LossOutput:
    """Return a loss that depends on every response token; its value does not matter."""
    scores = inputs.values if inputs.log_probs is None else inputs.log_probs
    if scores is None:
        raise TypeError("the engine gave neither log-probs nor values")
    return LossOutput((scores * inputs.response_mask).square().sum() / inputs.denominators.tokens)


def measure_passes(worker: Worker, attribute: str, shape: PassShape, repeats: int, trains: bool) -> PassCost:
    """Time forward passes, forward and backward passes, and optimizer steps; all ranks have to call this together.

    A warm-up repetition runs first and is not counted. The optimizer steps are real and change the weights.

    Args:
        worker: worker that holds the engine.
        attribute: name of the worker's attribute that holds a :class:`TrainingWorker`.
        shape: shape of the rank's rows, which go through the model in one pass.
        repeats: number of repetitions, at least 1.
        trains: True to measure training passes as well.
    """
    training: TrainingWorker = getattr(worker, attribute)
    engine, setup = training.engine, training.setup
    rank = engine.get_data_parallel_rank()
    data, drawn = (random_rows(shape, rank, draws) for draws in (False, True))
    settings = replace(setup.forward, micro_batch_size_per_gpu=None, max_token_len_per_gpu=None, vocabulary_kl=None)
    seconds: dict[str, list[float]] = {name: [] for name in ("forward", "forward_backward", "optimizer")}
    peaks: dict[str, int] = {}

    def timed(name: str, run: Callable[[], object]) -> None:
        synchronize()
        reset_peak()
        start = time.perf_counter()
        run()
        synchronize()
        seconds[name].append(time.perf_counter() - start)
        peak = read_peak()
        peaks[name] = max(peaks.get(name, 0), peak.allocated or peak.resident)

    def train() -> None:
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(drawn, _loss, settings)

    failed: list[str] = []
    return_free_memory()
    try:
        with training.on_device(), engine.eval_mode():
            for _ in range(repeats + 1):
                timed("forward", lambda: engine.infer_batch(data, settings))
    except torch.OutOfMemoryError:
        failed.append("forward")
        empty_cache()
    if trains:
        return_free_memory()
        try:
            with engine.train_mode():
                for _ in range(repeats + 1):
                    timed("forward_backward", train)
                    timed("optimizer", engine.optimizer_step)
                engine.optimizer_zero_grad()
        except torch.OutOfMemoryError:
            failed.append("forward_backward")
            engine.optimizer_zero_grad()
            empty_cache()
    samples = {name: [] if name in failed else times[1:] for name, times in seconds.items()}
    return PassCost(samples["forward"], samples["forward_backward"], samples["optimizer"], peaks, tuple(failed))
