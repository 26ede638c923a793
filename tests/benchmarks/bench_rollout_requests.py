"""The request path between driver and replicas: makespan, bytes on the wire, and the driver's time for each token.

    python tests/benchmarks/bench_rollout_requests.py

Makespan: 4,096 sequences with log-normal lengths on 8 simulated replicas, the sliding window against an ideal one without
delay, and the chunks that it replaced. Bytes: request and response of groups of 8 with 64 prompt tokens. Time: a batch of
answers decoded and assembled into columns, in CPU time of this process.
"""

from __future__ import annotations

import argparse
import time
from array import array
from pathlib import Path

import msgpack
import numpy as np
import torch
from _report import Comparison, write_report

from rollcast.contracts.rollout import RolloutOutput, RolloutSequence, SamplingParams
from rollcast.protocol import DataProto, Jagged
from rollcast_serving.generation import assemble_sequences, build_requests
from rollcast_serving.simulation import ideal_makespan, simulate_window
from rollcast_serving.wire import decode_output, encode_output, encode_requests, unpack

REPLICAS, WINDOW, SEQUENCES, GROUP = 8, 256, 4096, 8
PROMPT = 64


def draw_lengths(count: int, sigma: float) -> list[float]:
    """Return log-normal lengths with median 512."""
    return np.clip(np.random.default_rng(0).lognormal(np.log(512), sigma, count), 1, 32_768).astype(int).tolist()


def chunked_makespan(lengths: list[float], chunk: int = 64, streams: int = 4) -> float:
    """Return the makespan if each stream of a replica waits for all sequences of its chunk."""
    chunks = [max(lengths[start : start + chunk]) for start in range(0, len(lengths), chunk)]
    return ideal_makespan(chunks, REPLICAS * streams)


def make_prompts(rows: int) -> DataProto:
    """Return prompts in groups, with a seed for each row."""
    ids = torch.arange(rows // GROUP).repeat_interleave(GROUP)[:, None] + torch.arange(PROMPT)
    column = Jagged.from_padded(ids.int(), torch.ones_like(ids)).column()
    return DataProto.from_dict({"prompts": column, "seed": torch.arange(rows)})


def measure_wire(rows: int) -> tuple[float, float]:
    """Return bytes for each token, and microseconds of CPU for each token decoded and assembled."""
    lengths = [int(length) for length in draw_lengths(rows, 0.8)]
    prompts, sampling = make_prompts(rows), SamplingParams(max_tokens=32_768)
    requests = build_requests(prompts, sampling)
    outputs = [
        RolloutOutput(
            request.request_id,
            [RolloutSequence(array("i", [7]) * n, array("f", [-0.5]) * n, "stop", array("q", [3]) * n)],
            sampling,
        )
        for request, n in zip(requests, lengths, strict=True)
    ]
    sent = 0
    for start in range(0, rows, GROUP):
        group = {f"0123456789abcdef/{start + place}": requests[start + place] for place in range(GROUP)}
        sent += len(encode_requests(group)[0])
    messages = [
        msgpack.packb([{"id": f"0123456789abcdef/{row}", "output": encode_output(output)}])
        for row, output in enumerate(outputs)
    ]
    sent += sum(map(len, messages))
    best = float("inf")
    for _ in range(5):
        start_s = time.process_time()
        came = [
            decode_output(unpack(data)[0]["output"], request) for data, request in zip(messages, requests, strict=True)
        ]
        batch = assemble_sequences(prompts, came, sampling.max_tokens)
        best = min(best, time.process_time() - start_s)
    tokens = len(Jagged.of(batch["responses"]).values)
    return sent / tokens, best / tokens * 1e6


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=SEQUENCES)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/rollout_requests.json"))
    options = parser.parse_args()
    comparisons, notes = [], []
    for sigma in (0.6, 1.0, 1.4):
        lengths = draw_lengths(SEQUENCES, sigma)
        ideal = ideal_makespan(lengths, REPLICAS * WINDOW)
        for group in (1, GROUP):
            found = simulate_window(lengths, REPLICAS, WINDOW, group, latency=2.0)
            name = f"makespan, sigma {sigma}, groups of {group}, against the ideal window"
            comparisons.append(Comparison(name, found, ideal, at_most=1.05))
        notes.append(
            f"sigma {sigma}: chunks of 64 in 4 streams take {chunked_makespan(lengths) / ideal:.2f} x the ideal"
        )
    size, cpu = measure_wire(options.rows)
    comparisons.append(Comparison("bytes for each token on the wire", size, 1.0, at_most=9.0))
    comparisons.append(Comparison("microseconds of CPU for each token, decode and assemble", cpu, 1.0, at_most=0.05))
    write_report("Requests between driver and replicas", comparisons, notes, options.output)


if __name__ == "__main__":
    main()
