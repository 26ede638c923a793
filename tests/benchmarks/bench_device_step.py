"""A training step of the FSDP engine on one device, at the shapes of Qwen2.5 with random weights: MFU and tokens/s.

Rows are packed, passes compute in bf16, and layers are recomputed in the backward pass. Weights of 0.5B and 1.5B are
float32 with bf16 passes, as a run on a device has them; those of 7B are bf16, because one device of 80 GB does not hold
float32 weights with their AdamW. The model's operations are those of `rollcast_automap.profiling`, without recomputation.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config

from rollcast.contracts.device import current_device, empty_cache, synchronize
from rollcast.contracts.engine import EngineSetup, ForwardSettings, ModelConfig, OptimConfig, engines
from rollcast.contracts.worker import WorkerContext
from rollcast.protocol import DataProto
from rollcast_automap.costs.device_kinds import PEAK_TFLOPS, find_part
from rollcast_automap.profiling.flops import read_model_flops
from rollcast_testing.tiny import nll_loss, random_batch


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, and the dtype of its weights."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    weights: str = "fp32"


SHAPES = {
    "0.5B": Shape(896, 4864, 24, 14, 2, 151_936, True),
    "1.5B": Shape(1536, 8960, 28, 12, 2, 151_936, True),
    "7B": Shape(3584, 18_944, 28, 28, 4, 152_064, False, "bf16"),
    # For a run of the benchmark itself on a CPU.
    "tiny": Shape(64, 128, 2, 4, 2, 512, True),
}


@dataclass(frozen=True)
class Measured:
    """Result at one shape; ``mfu`` is None for a device without a published peak."""

    shape: str
    parameters: int
    seconds: float
    tokens_per_s: float
    tflops: float
    mfu: float | None
    peak_memory: int


def product_name() -> str:
    """Return the device's name on the market, by which its published peak is listed."""
    return torch.cuda.get_device_name() if current_device().name == "cuda" else "CPU"


def write_config(folder: Path, shape: Shape, length: int) -> None:
    Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=length,
        tie_word_embeddings=shape.tied,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(folder)


def build_engine(folder: Path, shape: Shape) -> Any:
    engine_class = engines.get("fsdp")
    keys = {
        "model_dtype": shape.weights,
        "param_dtype": "bf16",
        "enable_gradient_checkpointing": True,
        "use_remove_padding": True,
        "use_fused_kernels": True,
    }
    model = ModelConfig(str(folder), random_init=True)
    optim = OptimConfig(lr=1e-6)
    engine = engine_class(
        EngineSetup("language_model", model, engine_class.config_schema(**keys), optim, WorkerContext())
    )
    engine.initialize()
    return engine


def time_steps(engine: Any, batch: DataProto, tokens: int, repeats: int) -> float:
    """Return the median time of a step in seconds; one more step warms up."""
    settings, times = ForwardSettings(max_token_len_per_gpu=tokens), []
    for turn in range(repeats + 1):
        synchronize()
        start = time.perf_counter()
        with engine.train_mode():
            engine.train_batch(batch, nll_loss, settings)
        synchronize()
        if turn:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(name: str, options: argparse.Namespace) -> Measured:
    shape, on_cuda = SHAPES[name], current_device().name == "cuda"
    batch = random_batch(options.rows, options.prompt, options.response, seed=1)
    lengths = batch["attention_mask"].sum(-1).tolist()
    answers = int(batch["response_mask"].sum())
    with tempfile.TemporaryDirectory() as place:
        write_config(Path(place), shape, options.prompt + options.response)
        work = read_model_flops(Path(place)).count(lengths, answers, "train")
        engine = build_engine(Path(place), shape)
        parameters = sum(each.numel() for each in engine.module.parameters())
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds = time_steps(engine, batch, options.tokens, options.repeats)
    peak = torch.cuda.max_memory_allocated() if on_cuda else 0
    part = find_part(product_name())
    mfu = None if part is None else work / seconds / (PEAK_TFLOPS[part] * 1e12)
    return Measured(name, parameters, seconds, sum(lengths) / seconds, work / seconds / 1e12, mfu, peak)


def write_table(found: list[Measured], options: argparse.Namespace) -> None:
    title = f"Steps of the FSDP engine on {product_name()}, torch {torch.__version__}"
    rows = (
        f"{options.rows} rows of up to {options.prompt} + {options.response} tokens, {options.tokens} in a micro-batch"
    )
    table = Table(title=title, caption=f"{rows}; median of {options.repeats} steps; {options.output}")
    for heading in ("shape", "parameters", "weights", "s a step", "tokens/s", "TFLOP/s", "MFU", "peak memory, GB"):
        table.add_column(heading, justify="left" if heading == "shape" else "right")
    for each in found:
        mfu = "unknown peak" if each.mfu is None else f"{each.mfu:.3f}"
        numbers = (f"{each.seconds:.3f}", f"{each.tokens_per_s:,.0f}", f"{each.tflops:.4g}", mfu)
        memory = f"{each.peak_memory / 1e9:.1f}" if each.peak_memory else "not measured"
        table.add_row(each.shape, f"{each.parameters:,}", SHAPES[each.shape].weights, *numbers, memory)
    Console(width=140).print(table)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps([vars(each) for each in found], indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["0.5B", "1.5B", "7B"])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--response", type=int, default=1536)
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens of a micro-batch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/device_step.json"))
    chosen = parser.parse_args()
    results = []
    for wanted in chosen.shapes:
        results.append(measure(wanted, chosen))
        gc.collect()
        empty_cache()
    write_table(results, chosen)
