"""Peak memory of log-probs with gradient and entropy at 2048 tokens of a vocabulary of 151,936 words.

Measured in a process of its own, as the most that it ever had resident, less what it had before and less
the two gradients, which every way has to give. The other figure is the size of the full logits in float32,
of which the plain way holds at least two. The values are compared with the plain way's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from _report import Comparison, write_report

from rollcast_fsdp.fused import linear_stats
from rollcast_fsdp.logprobs import token_entropy, token_log_probs

Shape = tuple[int, int, int]


def make_inputs(shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states ``[M, H]``, a head ``[V, H]`` and tokens ``[M]``, with logits of a trained model's size."""
    tokens, vocabulary, hidden = shape
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, hidden, generator=generator)
    weight = torch.randn(vocabulary, hidden, generator=generator).mul_(2.0 / hidden**0.5)
    chosen = torch.randint(vocabulary, (tokens,), generator=generator)
    return states.requires_grad_(), weight.requires_grad_(), chosen


def backward(log_probs: torch.Tensor, entropy: torch.Tensor) -> None:
    (-log_probs.mean() - 0.01 * entropy.mean()).backward()


def measure(connection: Connection, shape: Shape, chunk: int, threads: int) -> None:
    """Send values, seconds, and bytes beyond inputs and gradients."""
    torch.set_num_threads(threads)
    states, weight, chosen = make_inputs(shape)
    # What the first call of an operation loads is no memory of log-probs.
    small = (states[:2].detach().requires_grad_(), weight[:64].detach().requires_grad_(), chosen[:2] % 64)
    warm = linear_stats(*small[:2], None, small[2], sum_pi_squared=False)
    backward(warm.log_probs, warm.entropy)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    if chunk:
        stats = linear_stats(states, weight, None, chosen, sum_pi_squared=False, chunk_size=chunk)
        log_probs, entropy = stats.log_probs, stats.entropy
    else:
        logits = states @ weight.T
        log_probs, entropy = token_log_probs(logits, chosen), token_entropy(logits)
    backward(log_probs, entropy)
    seconds = time.perf_counter() - start
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    connection.send((log_probs.detach(), entropy.detach(), seconds, peak - states.nbytes - weight.nbytes))


def run(shape: Shape, chunk: int, threads: int) -> tuple[torch.Tensor, torch.Tensor, float, int]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=measure, args=(theirs, shape, chunk, threads))
    process.start()
    log_probs, entropy, seconds, extra = ours.recv()
    process.join()
    return log_probs, entropy, seconds, extra


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=64, help="tokens of a chunk (log_probs_chunk_size)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/logprob_memory.json"))
    options = parser.parse_args()
    torch.multiprocessing.set_sharing_strategy("file_system")
    shape = (options.tokens, options.vocabulary, options.hidden)
    full = 4 * options.tokens * options.vocabulary
    ours, plain = (run(shape, chunk, options.threads) for chunk in (options.chunk, 0))
    differences = [
        float(((mine - theirs).abs() / theirs.abs().clamp(min=1.0)).max())
        for mine, theirs in zip(ours[:2], plain[:2], strict=True)
    ]
    comparisons = [
        Comparison("peak memory against full fp32 logits (MB)", ours[3] / 1e6, full / 1e6, at_most=1 / 8),
        Comparison("largest difference of values against 1e-6", max(differences), 1e-6, at_most=1.0),
    ]
    notes = [
        f"the plain way: {plain[3] / 1e6:,.0f} MB, {plain[2]:.1f} s; ours {ours[2]:.1f} s, forward and backward",
        f"{options.tokens} tokens, {options.vocabulary} words, hidden size {options.hidden}, "
        f"{options.chunk} tokens a chunk, {options.threads} thread(s)",
    ]
    write_report("log-probs and entropy without full logits", comparisons, notes, options.output)


if __name__ == "__main__":
    main()
