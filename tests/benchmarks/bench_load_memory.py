"""Peak memory of a node while eight ranks load one checkpoint, as a multiple of the checkpoint.

Each rank is a process with an FSDP engine on a CPU, so that the shards themselves are in host memory too. The sum of
the processes' proportional set sizes (``/proc/<pid>/smaps_rollup``) is sampled while they load. What they had before is
subtracted: each rank has then loaded a checkpoint of one small layer, because an engine imports libraries and torch
allocates buffers at the first load, which no checkpoint takes. Linux only.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from _report import Comparison, write_report
from safetensors.torch import save_file

from rollcast.contracts.engine import EngineSetup, ModelConfig
from rollcast.contracts.worker import WorkerContext
from rollcast_engine.process_group import join_process_group
from rollcast_fsdp.engine import FsdpEngine
from rollcast_fsdp.schemas import FsdpConfig


def write_model(folder: Path, layers: int, hidden: int) -> int:
    """Write a checkpoint of random tensors in files of four layers; return its bytes."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        shapes = {name: each.shape for name, each in AutoModelForCausalLM.from_config(config).state_dict().items()}
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    parts: dict[str, dict[str, torch.Size]] = {}
    for name, shape in shapes.items():
        layer = name.split(".")[2] if ".layers." in name else "0"
        parts.setdefault(f"model-{int(layer) // 4:05d}.safetensors", {})[name] = shape
    total = 0
    for file, tensors in parts.items():
        made = {name: torch.randn(shape) * 0.02 for name, shape in tensors.items()}
        total += sum(tensor.nbytes for tensor in made.values())
        save_file(made, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, names in parts.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def load(connection: Connection, small: str, folder: str, context: WorkerContext) -> None:
    torch.set_num_threads(1)
    join_process_group(context)
    first, engine = (
        FsdpEngine(EngineSetup("language_model", ModelConfig(path=path), FsdpConfig(), None, context, section="actor"))
        for path in (small, folder)
    )
    first.initialize()
    connection.send("ready")
    connection.recv()
    start = time.perf_counter()
    engine.initialize()
    connection.send(time.perf_counter() - start)
    connection.recv()


def pss(pids: list[int], kind: str = "Pss") -> int:
    """Return the sum of the proportional set sizes in bytes; ``kind`` may be ``Pss_File`` for pages of files only."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(f"{kind}:"):
                total += int(line.split()[1]) * 1024
    return total


def measure(small: Path, folder: Path, ranks: int) -> tuple[int, int, int, float]:
    """Return bytes beyond what the ranks had before, and the longest load in seconds.

    The bytes are the peak, the sum in the end, and the part of the latter that is pages of files.
    """
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes: list[Any] = [context.Pipe() for _ in range(ranks)]
    places = [
        WorkerContext(rank=rank, world_size=ranks, master_addr="127.0.0.1", master_port=port) for rank in range(ranks)
    ]
    processes = [
        context.Process(target=load, args=(theirs, str(small), str(folder), place))
        for (_, theirs), place in zip(pipes, places, strict=True)
    ]
    for process in processes:
        process.start()
    connections = [ours for ours, _ in pipes]
    for connection in connections:
        connection.recv()
    pids = [process.pid for process in processes if process.pid]
    before = peak = pss(pids)
    files = pss(pids, "Pss_File")
    for connection in connections:
        connection.send("go")
    while not all(connection.poll() for connection in connections):
        peak = max(peak, pss(pids))
        time.sleep(0.02)
    final = pss(pids)
    files = pss(pids, "Pss_File") - files
    seconds = max(connection.recv() for connection in connections)
    for connection in connections:
        connection.send("stop")
    for process in processes:
        process.join()
    return max(peak, final) - before, final - before, files, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/load_memory.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        small, folder = Path(root, "small"), Path(root, "model")
        write_model(small, 1, 64)
        size = write_model(folder, options.layers, options.hidden)
        peak, final, files, seconds = measure(small, folder, options.ranks)
    comparisons = [
        Comparison("peak memory of the node against the checkpoint (MB)", peak / 1e6, size / 1e6, at_most=1.3)
    ]
    end = f"{final / 1e6:,.0f} MB in the end, of which {files / 1e6:,.0f} MB are pages of files"
    notes = [f"{options.ranks} ranks, {size / 1e9:.2f} GB; {end}; {seconds:.1f} s to load"]
    write_report("memory of a node that loads one checkpoint", comparisons, notes, options.output)


if __name__ == "__main__":
    main()
