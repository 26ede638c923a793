"""Bytes of token columns that a step's stages move, and the driver's memory for its advantages; ratios are printed.

A batch with log-normal response lengths, the longest 8 times the mean. For each column that a stage of PPO or GRPO sends
to workers, the bytes on the wire are compared with 4 bytes for each real token. The advantages are estimated in the
chunks of the trainer, and the largest memory beyond the batch is compared with the batch.

    python tests/benchmarks/bench_driver.py --rows 1024 --mean 512
"""

from __future__ import annotations

import argparse
import gc
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import torch

from rollcast.contracts.algorithm import advantages
from rollcast.protocol import DataProto, Jagged
from rollcast_algorithms.schemas import AlgorithmConfig
from rollcast_trainer.stages.advantage import estimate_advantages

MODEL = ("prompts", "responses", "response_mask")
#: Columns that each call of a step reads.
CALLS = {
    "ppo": {
        "compute_log_prob": MODEL,
        "compute_ref_log_prob": MODEL,
        "compute_values": MODEL,
        "update_critic": (*MODEL, "values", "returns"),
        "update_actor": (*MODEL, "old_log_probs", "ref_log_prob", "advantages"),
    },
    "grpo": {
        "compute_log_prob": MODEL,
        "compute_ref_log_prob": MODEL,
        "update_actor": (*MODEL, "old_log_probs", "ref_log_prob", "advantages"),
    },
}
ESTIMATORS = {"ppo": "gae", "grpo": "grpo"}


def draw_lengths(rows: int, mean: int) -> torch.Tensor:
    """Return log-normal lengths, int64 ``[rows]``, with this mean and none above 8 times it."""
    drawn = torch.randn(rows, generator=torch.Generator().manual_seed(0)).exp()
    lengths = (drawn * mean / drawn.mean()).clamp(1, 8 * mean).long()
    lengths[0] = 8 * mean
    return lengths


def make_batch(rows: int, mean: int) -> DataProto:
    """Return a generated and scored batch, eight samples a prompt."""
    lengths = draw_lengths(rows, mean)
    total = int(lengths.sum())
    responses = Jagged.from_lengths(torch.randint(0, 50_000, (total,), dtype=torch.int32), lengths)
    sizes = torch.full((rows,), 64)
    prompts = Jagged.from_lengths(torch.randint(0, 50_000, (64 * rows,), dtype=torch.int32), sizes)
    floats = ("old_log_probs", "ref_log_prob", "values", "token_level_rewards")
    return DataProto.from_dict(
        {
            "prompts": prompts.column(),
            "responses": responses.column(),
            "response_mask": responses.like(torch.ones(total, dtype=torch.bool)),
            **{name: responses.like(torch.randn(total)) for name in floats},
            "uid": torch.arange(rows) // 8,
        }
    )


def sent_bytes(batch: DataProto) -> int:
    """Return the bytes of a batch on the wire."""
    buffers: list[pickle.PickleBuffer] = []
    header = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    return len(header) + sum(buffer.raw().nbytes for buffer in buffers)


def resident() -> int:
    """Return the bytes of the process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Peak:
    """The largest memory of the process beyond that at the start, sampled in a thread."""

    def __enter__(self) -> Peak:
        gc.collect()
        self.start, self.most, self._ends = resident(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ends.is_set():
            self.most = max(self.most, resident() - self.start)
            time.sleep(0.001)

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()


def _arguments(kind: str, batch: DataProto) -> tuple[Any, dict[str, Any], torch.Tensor, AlgorithmConfig]:
    columns = {name: batch[name] for name in ("token_level_rewards", "response_mask", "values")}
    return advantages.get(ESTIMATORS[kind]), columns, batch["uid"], AlgorithmConfig()


def measure(kind: str, rows: int, mean: int) -> None:
    """Print the ratios of one algorithm."""
    batch = make_batch(rows, mean)
    arguments = _arguments(kind, batch)
    estimate_advantages(*_arguments(kind, make_batch(16, 16)))  # what the first call loads is no part of a step
    with Peak() as peak:
        found = estimate_advantages(*arguments)
    batch = batch.with_columns({"advantages": found[0], "returns": found[1]})
    prompt, response = (len(Jagged.of(batch[name]).values) for name in ("prompts", "responses"))
    moved = least = padded = 0
    for names in CALLS[kind].values():
        moved += sent_bytes(batch.select(names))
        least += sum(4 * (prompt if name == "prompts" else response) for name in names)
        padded += sum(8 * rows * (64 if name == "prompts" else 8 * mean) for name in names)
    print(f"{kind}: {batch.nbytes / 1e6:.0f} MB, {rows} rows, {response} response tokens")
    print(f"  token columns moved / (4 bytes x real tokens x columns read): {moved / least:.3f}")
    print(f"  padded int64 would be: {padded / least:.3f}")
    added = 4 * response * len({found[0].values.data_ptr(), found[1].values.data_ptr()})
    print(
        f"  memory while advantages are estimated, less batch and result / batch: {(peak.most - added) / batch.nbytes:.3f}"
    )


def main() -> None:
    """Measure PPO and GRPO."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--mean", type=int, default=512)
    options = parser.parse_args()
    for kind in CALLS:  # what torch loads on first use is no part of a step
        estimate_advantages(*_arguments(kind, make_batch(64, 16)))
    for kind in CALLS:
        measure(kind, options.rows, options.mean)


if __name__ == "__main__":
    main()
