"""An engine's step against plain PyTorch that does the same work, on one rank.

The plain step is what one writes by hand: a forward for each micro-batch with logits of the response only,
their log-probs, a token-mean loss over the whole batch, backward, clipping, fused AdamW. Both have the same
model, rows and micro-batches; steps alternate, and the median of each counts.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _report import Comparison, write_report
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rollcast.contracts.engine import EngineSetup, ForwardSettings, ModelConfig, OptimConfig, engines
from rollcast.contracts.worker import WorkerContext
from rollcast.protocol import DataProto
from rollcast_testing.tiny import nll_loss, random_batch

__all__ = ["compare_steps"]

OPTIM = OptimConfig(lr=1e-5, weight_decay=0.1)


def make_model(folder: Path, hidden: int) -> None:
    config = Qwen2Config(
        vocab_size=2048,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=4,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)


def plain_step(folder: Path, batch: DataProto, rows: int) -> Callable[[], float]:
    """A step in plain PyTorch, that gives its loss."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=OPTIM.lr, betas=(0.9, 0.999), weight_decay=OPTIM.weight_decay, fused=True
    )
    length = batch["responses"].size(1)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        count, total = batch["response_mask"].sum(), 0.0
        for start in range(0, len(batch), rows):
            ids, attention, positions, responses, mask = (
                batch[name][start : start + rows]
                for name in ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")
            )
            logits = model(
                input_ids=ids[:, :-1],
                attention_mask=attention[:, :-1],
                position_ids=positions[:, :-1],
                use_cache=False,
                logits_to_keep=length,
            ).logits
            chosen = logits.gather(-1, responses.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
            loss = -(chosen * mask).sum() / count
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip_grad)
        optimizer.step()
        return total

    return step


def engine_step(name: str, folder: Path, batch: DataProto, rows: int) -> Callable[[], float]:
    """A step of the engine of that name, with its defaults, that gives its loss."""
    engine_class = engines.get(name)
    setup = EngineSetup(
        "language_model", ModelConfig(str(folder)), engine_class.config_schema(), OPTIM, WorkerContext()
    )
    engine = engine_class(setup)
    engine.initialize()
    settings = ForwardSettings(micro_batch_size_per_gpu=rows)

    def step() -> float:
        with engine.train_mode():
            return engine.train_batch(batch, nll_loss, settings).metrics["nll"]

    return step


def compare_steps(engine: str, title: str, at_most: float) -> None:
    """Measure, as the command line says, and report.

    Args:
        engine: its name in the registry.
        title: of the report.
        at_most: goal of its time over that of the plain step.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path(f"runs/bench/{engine}_step.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # Rows of one length: the engine would leave out padding, which the plain step does not.
    batch = random_batch(options.rows, 32, 96, seed=1)
    full = torch.ones_like(batch["attention_mask"])
    batch = batch.with_columns(
        {
            "input_ids": batch["input_ids"].clamp(min=4),
            "responses": batch["responses"].clamp(min=4),
            "attention_mask": full,
            "position_ids": full.cumsum(-1) - 1,
        }
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, options.hidden)
        steps = {
            "ours": engine_step(engine, folder, batch, options.micro_batch),
            "plain": plain_step(folder, batch, options.micro_batch),
        }
        times: dict[str, list[float]] = {"ours": [], "plain": []}
        losses: dict[str, float] = {}
        for turn in range(options.repeats + 1):
            for side, step in steps.items():
                start = time.perf_counter()
                losses[side] = step()
                if turn:  # the first warms up
                    times[side].append(time.perf_counter() - start)
    medians = {side: statistics.median(each) for side, each in times.items()}
    comparisons = [Comparison("seconds a step", medians["ours"], medians["plain"], at_most=at_most)]
    notes = [
        f"{options.rows} rows of 128 tokens in micro-batches of {options.micro_batch}, hidden size {options.hidden}",
        f"loss of the last step: {losses['ours']:.6f} and {losses['plain']:.6f}",
        f"{options.threads} thread(s), median of {options.repeats} steps each, in turn",
    ]
    write_report(title, comparisons, notes, options.output)
