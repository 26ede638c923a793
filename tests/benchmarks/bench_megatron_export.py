"""How long two ranks of the Megatron engine take to export a model, with parameters in one collective each or together.

    python tests/benchmarks/bench_megatron_export.py [--layers 24] [--hidden 256] [--repeats 5]

A random Qwen2 in float32, on two processes with gloo, one thread each; best of the repeats on the first rank.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from rollcast.contracts.engine import EngineSetup, ModelConfig
from rollcast.contracts.worker import WorkerContext
from rollcast_megatron.engine import MegatronEngine
from rollcast_megatron.schemas import MegatronConfig
from rollcast_megatron.weights import gather
from rollcast_testing.ranks import Ranks
from rollcast_testing.tiny import tiny_model_folder

LIMITS = {"one at a time": 1, "up to 64 MiB": 64 << 20}


def export(context: WorkerContext, folder: Path, repeats: int, tensor: int, pipeline: int) -> dict[str, float]:
    """Return the best seconds for each limit."""
    torch.set_num_threads(1)
    config = MegatronConfig(tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline)
    model = ModelConfig(path=str(folder), random_init=True)
    engine = MegatronEngine(EngineSetup("language_model", model, config, None, context, seed=3))
    engine.initialize()
    parameters = dict(engine.stage.named_parameters())
    best = dict.fromkeys(LIMITS, float("inf"))
    for _ in range(repeats):
        for name, limit in LIMITS.items():
            start = time.perf_counter()
            for _ in gather(engine.plan, parameters, engine.shapes, limit):
                pass
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    ranks = Ranks()
    with tempfile.TemporaryDirectory() as folder:
        tiny_model_folder(Path(folder), hidden=arguments.hidden, layers=arguments.layers, weights=False)
        for tensor, pipeline in ((2, 1), (1, 2)):
            best = ranks.run(export, folder=Path(folder), repeats=arguments.repeats, tensor=tensor, pipeline=pipeline)[
                0
            ]
            for name, seconds in best.items():
                print(f"tensor {tensor} x pipeline {pipeline}, {name:14} {seconds * 1e3:7.1f} ms")
    ranks.close()


if __name__ == "__main__":
    main()
