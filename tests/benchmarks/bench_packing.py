"""Packing against padding: tokens a second of a training step of the FSDP engine, on one rank.

Both engines have the same model, rows and settings of micro-batches; only ``use_remove_padding`` differs. All
rows in one pass are what the name says: padding to the widest row. With smaller micro-batches the padded engine
leaves out most of the padding too, for it sorts rows by length and cuts each micro-batch to its longest; what
packing adds to that is in the other lines. Steps of the two alternate, and the median of each counts.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from _report import Comparison, write_report
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollcast.contracts.engine import EngineSetup, ForwardSettings, ModelConfig, OptimConfig
from rollcast.contracts.worker import WorkerContext
from rollcast.protocol import DataProto
from rollcast_fsdp.engine import FsdpEngine
from rollcast_fsdp.schemas import FsdpConfig
from rollcast_testing.tiny import nll_loss

VOCABULARY = 4096


def make_model(folder: Path) -> None:
    """A random Qwen2 of 4 layers whose head does not outweigh them."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)


def make_batch(rows: int, shortest: int, longest: int) -> DataProto:
    """Rows of ``shortest`` to ``longest`` tokens, of which few are long; a quarter of each is the prompt."""
    generator = torch.Generator().manual_seed(1)
    skewed = torch.rand(rows, generator=generator) ** 3
    lengths = (shortest + (longest - shortest) * skewed).round().long()
    lengths[0], lengths[1] = shortest, longest
    prompts = (lengths // 4).clamp(min=1)
    width, response_width = int(prompts.max()), int((lengths - prompts).max())
    column = torch.arange(width + response_width)
    attention = ((column >= width - prompts.unsqueeze(1)) & (column < width + (lengths - prompts).unsqueeze(1))).long()
    ids = torch.randint(1, VOCABULARY, attention.shape, generator=generator) * attention
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "responses": ids[:, width:],
            "response_mask": attention[:, width:],
        }
    )


def build(folder: Path, packs: bool) -> FsdpEngine:
    config = FsdpConfig(use_remove_padding=packs)
    setup = EngineSetup("language_model", ModelConfig(str(folder)), config, OptimConfig(lr=1e-5), WorkerContext())
    engine = FsdpEngine(setup)
    engine.initialize()
    return engine


def seconds_of_a_step(engine: FsdpEngine, batch: DataProto, settings: ForwardSettings) -> float:
    start = time.perf_counter()
    with engine.train_mode():
        engine.train_batch(batch, nll_loss, settings)
    return time.perf_counter() - start


def compare(folder: Path, batch: DataProto, settings: ForwardSettings, repeats: int) -> tuple[float, float]:
    """Tokens a second with packing and with padding."""
    engines = {packs: build(folder, packs) for packs in (True, False)}
    times: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(repeats + 1):
        for packs, engine in engines.items():
            seconds = seconds_of_a_step(engine, batch, settings)
            if turn:  # the first warms up
                times[packs].append(seconds)
    tokens = float(batch["attention_mask"].sum())
    return tokens / statistics.median(times[True]), tokens / statistics.median(times[False])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/packing.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    batch = make_batch(options.rows, 8, 256)
    comparisons = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        for name, settings, goal in (
            ("all rows in one pass", ForwardSettings(), 1.4),
            ("passes of 16 rows, sorted", ForwardSettings(micro_batch_size_per_gpu=16), 1.2),
            ("passes of 2048 tokens, sorted", ForwardSettings(max_token_len_per_gpu=2048), 1.2),
        ):
            packed, padded = compare(Path(folder), batch, settings, options.repeats)
            comparisons.append(Comparison(f"tokens/s, {name}", packed, padded, at_least=goal))
    mask = batch["attention_mask"]
    notes = [
        f"{len(batch)} rows of 8 to 256 tokens, {int(mask.sum())} tokens, {mask.numel()} with padding to the widest",
        f"{options.threads} thread(s), median of {options.repeats} steps each, in turn",
    ]
    write_report("packing (ours) against padding (other)", comparisons, notes, options.output)


if __name__ == "__main__":
    main()
