"""GRPO in one file: worker groups, an engine and a rollout from the registry, and no trainer.

A model of half a million parameters learns to sort eight digits: some supervised steps, so that a few samples are
right, and then GRPO. A trainer adds checkpoints, recovery, reports, KL penalties, balancing, replicas and a config.

    python flat_grpo.py                          # in this process
    python flat_grpo.py --runtime ray --ranks 2  # two workers
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from rollcast import ClassWithInitArgs, DataProto, Dispatch, ResourcePool, Worker, WorkerGroup, register
from rollcast.contracts import engine
from rollcast.contracts.rollout import RolloutSetup, SamplingParams, rollouts
from rollcast.contracts.runtime import Runtime, runtimes
from rollcast.protocol import Jagged
from rollcast_data.tokenizer import read_tokenizer
from rollcast_dispatch import make_nd_compute_dataproto_dispatch_fn
from rollcast_quickstart.task import SortDigits
from rollcast_serving.generation import generate_sequences

log = logging.getLogger("flat_grpo")

PROMPTS, SAMPLES, MINI_BATCHES, MAX_TOKENS, CLIP_LOW, CLIP_HIGH = 64, 8, 2, 10, 0.2, 0.28
SHARDED = make_nd_compute_dataproto_dispatch_fn("policy")


# -- what runs on the ranks -----------------------------------------------------------------------


class Policy(Worker):
    """A model that generates and trains, on one rank of a group; FSDP trains what transformers generates with."""

    def __init__(self, model: engine.ModelConfig, optim: engine.OptimConfig, seed: int) -> None:
        engine_class, rollout_class = engine.engines.get("fsdp"), rollouts.get("hf")
        tokenizer, config = read_tokenizer(model.path), engine_class.config_schema()
        setup = engine.EngineSetup(
            model_type="language_model", model=model, engine=config, optim=optim, context=self.context, seed=seed
        )
        self.engine = engine_class(setup)
        tokens = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
        sampler_seed = seed + 1000 * self.rank
        self.rollout = rollout_class(
            RolloutSetup(config=rollout_class.config_schema(), model_path=model.path, seed=sampler_seed, **tokens)
        )
        self.version = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start(self) -> None:
        """Build the model and say which rows this rank gets."""
        self.engine.initialize()
        self.register_mesh("policy", self.engine.get_data_parallel_rank(), self.engine.is_mp_src_rank_with_outputs())
        self.rollout.bind_engine(self.engine, self.version)

    @register(dispatch_mode=SHARDED)
    async def generate(self, prompts: DataProto, sampling: SamplingParams) -> DataProto:
        """Return a response for each row, with the log-probs that it was sampled with."""
        return await generate_sequences(self.rollout, prompts, sampling)

    @register(dispatch_mode=SHARDED)
    def update(self, batch: DataProto, loss: engine.LossFunction) -> list[dict[str, float]]:
        """Take one optimizer step on a mini-batch; return its metrics, the same on every rank."""
        with self.engine.train_mode():
            output = self.engine.train_batch(batch, loss, engine.ForwardSettings(micro_batch_size_per_gpu=128))
        self.engine.lr_scheduler_step()
        self.version += 1
        self.rollout.bind_engine(self.engine, self.version)
        return [{**output.metrics, "grad_norm": output.grad_norm}]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export(self, path: Path) -> None:
        """Write the model as a Hugging Face folder."""
        self.engine.export(path)


# -- losses: from the log-probs of a micro-batch to its share of the mini-batch's loss ------------


def supervised_loss(inputs: engine.LossInputs) -> engine.LossOutput:
    """Return the negative log-likelihood, a mean over the mini-batch's tokens."""
    loss = -(cast("torch.Tensor", inputs.log_probs) * inputs.response_mask).sum() / inputs.denominators.tokens
    return engine.LossOutput(loss, {"loss": loss.detach()})


def grpo_loss(inputs: engine.LossInputs) -> engine.LossOutput:
    """Return PPO's clipped objective, a mean over the mini-batch's tokens."""
    advantages, mask = inputs.columns["advantages"], inputs.response_mask
    ratio = (cast("torch.Tensor", inputs.log_probs) - inputs.columns["rollout_log_probs"]).exp()
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    loss = (torch.maximum(-advantages * ratio, -advantages * clipped) * mask).sum() / inputs.denominators.tokens
    share = ((ratio != clipped) * mask).sum() / inputs.denominators.tokens
    return engine.LossOutput(loss, {"loss": loss.detach(), "clipped": share.detach()})


# -- data -----------------------------------------------------------------------------------------


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def draw(rows: Sequence[dict[str, str]], count: int, seed: int) -> Iterator[list[dict[str, str]]]:
    """Yield ``count`` rows at a time, shuffled anew in each epoch, without an end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(rows), generator=generator).tolist()
        for start in range(0, len(order) - count + 1, count):
            yield [rows[index] for index in order[start : start + count]]


def encode(texts: Sequence[str], tokenizer: Any, end: Sequence[int] = ()) -> Jagged:
    """Return the token ids of texts, int32, each followed by ``end``."""
    rows = [[*tokenizer.encode(text, add_special_tokens=False), *end] for text in texts]
    values = torch.tensor([token for row in rows for token in row], dtype=torch.int32)
    return Jagged.from_lengths(values, torch.tensor([len(row) for row in rows]))


def encode_prompts(rows: Sequence[dict[str, str]], tokenizer: Any) -> DataProto:
    """Return the batch of the rows' prompts, with their answers."""
    prompts = encode([row["prompt"] for row in rows], tokenizer).column()
    return DataProto.from_dict({"prompts": prompts}, {"answer": [row["ground_truth"] for row in rows]})


def encode_examples(rows: Sequence[dict[str, str]], tokenizer: Any) -> DataProto:
    """Return the batch of supervised rows: prompts, and responses that end with the EOS token."""
    prompts = encode([row["prompt"] for row in rows], tokenizer).column()
    responses = encode([row["response"] for row in rows], tokenizer, [tokenizer.eos_token_id])
    mask = responses.like(torch.ones(len(responses.values), dtype=torch.bool))
    return DataProto.from_dict({"prompts": prompts, "responses": responses.column(), "response_mask": mask})


# -- the algorithm --------------------------------------------------------------------------------


def score(batch: DataProto, answers: Sequence[str], tokenizer: Any) -> torch.Tensor:
    """Return 1 for each response that ended by itself and is the answer, else 0; float32 ``[B]``."""
    texts = [tokenizer.decode(row.tolist(), skip_special_tokens=True) for row in batch["responses"].unbind()]
    right = [text == answer for text, answer in zip(texts, answers, strict=True)]
    return torch.tensor(right).logical_and(batch["finished"]).float()


def with_advantages(batch: DataProto, rewards: torch.Tensor) -> DataProto:
    """Add GRPO's advantages: the reward against those of the same prompt's samples, for each of its tokens."""
    groups = rewards.view(-1, SAMPLES)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten()
    mask = Jagged.of(batch["response_mask"])
    return batch.with_columns({"advantages": mask.like(advantages[mask.rows])})


def evaluate(policy: Any, file: Path, tokenizer: Any, temperature: float) -> float:
    """Return the share of right answers to the prompts of a file; the temperature 0 is greedy."""
    prompts = encode_prompts(read_rows(file), tokenizer)
    batch = policy.generate(prompts.select(["prompts"]), SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS))
    return float(score(batch, prompts["answer"], tokenizer).mean())


def warm_up(policy: Any, data: Path, tokenizer: Any, steps: int, seed: int) -> None:
    """Train supervised, for at most ``steps`` steps, until a fifth of the sampled answers is right."""
    examples = draw(read_rows(data / "sft.jsonl"), PROMPTS, seed)
    for step in range(1, steps + 1):
        policy.update(encode_examples(next(examples), tokenizer), supervised_loss)
        if step % 10 == 0 and evaluate(policy, data / "sft_stop.jsonl", tokenizer, temperature=1.0) >= 0.2:
            log.info("warm-up: %d steps", step)
            return


def train(policy: Any, data: Path, tokenizer: Any, steps: int, seed: int) -> list[dict[str, float]]:
    """Train by GRPO; return the metrics of each step."""
    history = []
    sampling = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS)
    tasks = draw(read_rows(data / "train.jsonl"), PROMPTS, seed)
    order = torch.Generator().manual_seed(seed)
    for step in range(1, steps + 1):
        start = time.perf_counter()
        prompts = encode_prompts(next(tasks), tokenizer).repeat(SAMPLES, interleave=True)
        batch = policy.generate(prompts.select(["prompts"]), sampling)
        rewards = score(batch, prompts["answer"], tokenizer)
        batch = with_advantages(batch, rewards).drop(["finished"])
        for part in torch.randperm(len(batch), generator=order).chunk(MINI_BATCHES):
            metrics = policy.update(batch.select_idxs(part), grpo_loss)[0]
        metrics["seconds"] = time.perf_counter() - start
        history.append({"step": step, "reward": float(rewards.mean()), **metrics})
        log.info("  ".join(f"{name} {value:.4g}" for name, value in history[-1].items()))
    return history


@contextmanager
def started(
    machines: Runtime, ranks: int, model: engine.ModelConfig, optim: engine.OptimConfig, seed: int
) -> Iterator[Any]:
    """Start the workers; stop them at the end."""
    policy: Any = WorkerGroup(ResourcePool([ranks]), ClassWithInitArgs(Policy, model, optim, seed), runtime=machines)
    try:
        policy.start()
        yield policy
    finally:
        policy.shutdown()


def run(
    data: Path, runtime: str = "local", ranks: int = 1, warm_up_steps: int = 300, steps: int = 80, seed: int = 1
) -> list[dict[str, float]]:
    """Make the task, warm a model up, train it; return the metrics of each step of GRPO."""
    torch.manual_seed(seed)
    SortDigits().run(None, data, seed)
    tokenizer = read_tokenizer(data / "model")
    runtime_class = runtimes.get(runtime)
    supervised = engine.OptimConfig(lr=1e-3, lr_warmup_steps=20, betas=[0.9, 0.95], weight_decay=0.0)
    reinforced = replace(supervised, lr=4e-4, lr_warmup_steps=10, lr_scheduler_type="linear", min_lr_ratio=0.1)
    reinforced = replace(reinforced, total_training_steps=steps * MINI_BATCHES)
    drawn = engine.ModelConfig(path=str(data / "model"), random_init=True)
    warm = engine.ModelConfig(path=str(data / "warm"))
    with runtime_class.from_config(runtime_class.config_schema(), processes=ranks) as machines:
        with started(machines, ranks, drawn, supervised, seed) as policy:
            warm_up(policy, data, tokenizer, warm_up_steps, seed)
            policy.export(data / "warm")
        with started(machines, ranks, warm, reinforced, seed) as policy:
            log.info("right before GRPO: %.3f", evaluate(policy, data / "test.jsonl", tokenizer, temperature=0.0))
            history = train(policy, data, tokenizer, steps, seed)
            log.info("right after GRPO: %.3f", evaluate(policy, data / "test.jsonl", tokenizer, temperature=0.0))
    return history


def main() -> None:
    """Run with the command line's options."""
    parser = argparse.ArgumentParser(description="GRPO in one file.")
    parser.add_argument("--runtime", default="local", help="registry name of the runtime: local or ray")
    for name, value in {"ranks": 1, "warm-up-steps": 300, "steps": 80, "seed": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), **vars(parser.parse_args()))


if __name__ == "__main__":
    main()
