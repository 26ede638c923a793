"""How fast an engine writes a Hugging Face folder, and in how much memory.

    python tests/benchmarks/bench_export.py [--megabytes 500] [--repeats 5]

A random Qwen2 in float32, on one rank in this process: the live model, and a checkpoint of it, which is read
again bucket by bucket. Beside them what transformers' save_pretrained takes for the same model. Times are the
best of the repeats, to the page cache; memory is what the process has for itself beyond what it had before,
at its highest, sampled every 2 ms.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from _report import Comparison, write_report

from rollcast.contracts.engine import EngineSetup, ModelConfig
from rollcast.contracts.worker import WorkerContext
from rollcast_fsdp.engine import FsdpEngine
from rollcast_fsdp.schemas import FsdpConfig
from rollcast_testing.tiny import tiny_model_folder

#: What an export may take at a time.
BUCKET = 64 << 20
HIDDEN = 1024


class PeakMemory:
    """The highest memory of this process's own while the block runs, beyond what it had before."""

    def __enter__(self) -> PeakMemory:
        self._process = psutil.Process()
        self._before = self.now()
        self.bytes = 0
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._run)
        self._watch.start()
        return self

    def now(self) -> int:
        return int(self._process.memory_full_info().uss)

    def _run(self) -> None:
        while not self._over.wait(0.002):
            self.bytes = max(self.bytes, self.now() - self._before)

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._watch.join()


def measure(write: Callable[[Path], Any], folder: Path, repeats: int) -> tuple[float, int]:
    """Best seconds, and the peak of a run apart from those that are timed."""
    seconds = []
    for _ in range(repeats):
        shutil.rmtree(folder, ignore_errors=True)
        start = time.perf_counter()
        write(folder)
        seconds.append(time.perf_counter() - start)
    shutil.rmtree(folder, ignore_errors=True)
    with PeakMemory() as peak:
        write(folder)
    return min(seconds), peak.bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/export.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        comparisons, notes = run(Path(name), arguments.megabytes, arguments.repeats)
    write_report("Hugging Face exports", comparisons, notes, arguments.output)


def run(place: Path, megabytes: int, repeats: int) -> tuple[list[Comparison], list[str]]:
    """Measure all of it in a folder."""
    layer = 4 * (4 * HIDDEN * HIDDEN + 3 * 2 * HIDDEN * HIDDEN)
    source = tiny_model_folder(
        place / "model", hidden=HIDDEN, layers=max(1, megabytes * 1_000_000 // layer), head_dim=64, weights=False
    )
    model = ModelConfig(path=str(source), random_init=True)
    engine = FsdpEngine(EngineSetup("language_model", model, FsdpConfig(), None, WorkerContext()))
    engine.initialize()
    parameters = list(engine.module.parameters())
    size = sum(parameter.nbytes for parameter in parameters)
    largest = max(parameter.nbytes for parameter in parameters)
    engine.save_checkpoint(place / "checkpoint")
    live = measure(engine.export, place / "live", repeats)
    saved = measure(
        lambda path: FsdpEngine.export_checkpoint(place / "checkpoint", model, path), place / "saved", repeats
    )
    module: Any = engine.module
    plain = measure(module.save_pretrained, place / "plain", repeats)
    print(f"model of {size / 1e6:.0f} MB, largest tensor {largest / 1e6:.0f} MB")
    bucket = max(BUCKET, largest)
    comparisons = [
        Comparison("live model, GB/s against 1", size / live[0] / 1e9, 1.0, at_least=0.5),
        Comparison("live model, MB of extra memory against one bucket", live[1] / 1e6, bucket / 1e6, at_most=1.0),
        Comparison("checkpoint, MB of extra memory against two buckets", saved[1] / 1e6, 2 * bucket / 1e6, at_most=1.0),
    ]
    notes = [
        f"{size / 1e6:.0f} MB in float32, {torch.get_num_threads()} thread",
        f"checkpoint, with its shards' checksums: {size / saved[0] / 1e9:.2f} GB/s",
        f"save_pretrained: {size / plain[0] / 1e9:.2f} GB/s, {plain[1] / 1e6:.0f} MB of extra memory",
    ]
    return comparisons, notes


if __name__ == "__main__":
    main()
