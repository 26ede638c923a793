"""What the tests run in the process with the mock: correct and faulty uses of a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from rollcast.errors import ConfigError
from rollcast.protocol import DataProto
from rollcast_dryrun.engines import EngineCell, build_engine, own_groups
from rollcast_dryrun.harness import fake_cuda
from rollcast_dryrun.mode import active_mode
from rollcast_dryrun.record import Recorder
from rollcast_dryrun.schemas import leaves_of
from rollcast_serving.syncs.cuda_ipc import DeviceMemory, open_tensor

MIB = 1 << 20


def report(recorder: Recorder) -> dict[str, Any]:
    phase, peak = recorder.current, recorder.allocator.peak_allocated
    return {
        **phase.as_dict(),
        "peak_allocated": peak,
        "faults": [[fault.kind, str(fault.place)] for fault in recorder.faults.values()],
    }


def reads_after_event() -> dict[str, Any]:
    """A copy on its own stream, read by the computation after an event: nothing is wrong."""
    return copy_ahead(waits=True)


def reads_without_event() -> dict[str, Any]:
    return copy_ahead(waits=False)


def copy_ahead(waits: bool) -> dict[str, Any]:
    with fake_cuda() as recorder:
        side = torch.cuda.Stream()
        host = torch.ones(MIB, pin_memory=True)
        with torch.cuda.stream(side):
            received = torch.empty(MIB, device="cuda")
            received.copy_(host, non_blocking=True)
        if waits:
            torch.cuda.current_stream().wait_event(side.record_event())
        received.record_stream(torch.cuda.current_stream())
        (received + 1).sum()
        return report(recorder)


def freed_under_a_copy(holds: bool) -> dict[str, Any]:
    """Offload an activation on a copy stream, drop it, and let the computation reuse its memory."""
    with fake_cuda() as recorder:
        side, compute = torch.cuda.Stream(), torch.cuda.current_stream()
        activation = torch.zeros(MIB, device="cuda")
        host = torch.empty(MIB, pin_memory=True)
        side.wait_stream(compute)
        with torch.cuda.stream(side):
            host.copy_(activation, non_blocking=True)
        if holds:
            activation.record_stream(side)
        del activation
        torch.zeros(MIB, device="cuda")
        return report(recorder)


def writes_what_is_read() -> dict[str, Any]:
    with fake_cuda() as recorder:
        side = torch.cuda.Stream()
        weight = torch.zeros(MIB, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            weight.sum()
        weight.add_(1)
        return report(recorder)


def reads_a_message(waits: bool) -> dict[str, Any]:
    """Read, on another stream, what a rank sends."""
    with fake_cuda(world=2) as recorder:
        received = torch.zeros(MIB, device="cuda")
        work: Any = dist.irecv(received, 1)
        with torch.cuda.stream(torch.cuda.Stream()):
            if waits:
                work.wait()
            received.sum()
        return report(recorder)


def host_reads_a_copy(waits: bool) -> dict[str, Any]:
    with fake_cuda() as recorder:
        host = torch.empty(1000, pin_memory=True)
        host.copy_(torch.zeros(1000, device="cuda"), non_blocking=True)
        if waits:
            torch.cuda.synchronize()
        host.sum()
        return report(recorder)


def reads_value_without_event() -> dict[str, Any]:
    with fake_cuda() as recorder:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            loss = torch.ones(3, device="cuda").sum()
        loss.item()
        return report(recorder)


def host_uses_large_memory(waits: bool) -> dict[str, Any]:
    """Write, on the host, a buffer so large that it is fake, while it may still be copied."""
    with fake_cuda() as recorder:
        host = torch.empty(8 * MIB, pin_memory=True)
        torch.empty(8 * MIB, device="cuda").copy_(host, non_blocking=True)
        if waits:
            torch.cuda.current_stream().synchronize()
        host.zero_()
        return report(recorder)


def waits_on_request() -> dict[str, Any]:
    with fake_cuda() as recorder:
        torch.zeros(3, device="cuda")
        torch.cuda.synchronize()
        torch.cuda.current_stream().record_event().synchronize()
        return report(recorder)


def host_writes_what_is_sent() -> dict[str, Any]:
    with fake_cuda() as recorder:
        host = torch.zeros(1000, pin_memory=True)
        torch.empty(1000, device="cuda").copy_(host, non_blocking=True)
        host.zero_()
        return report(recorder)


def unpinned_copy() -> dict[str, Any]:
    with fake_cuda() as recorder:
        torch.empty(MIB, device="cuda").copy_(torch.zeros(MIB), non_blocking=True)
        return report(recorder)


def item_in_a_loop() -> dict[str, Any]:
    with fake_cuda() as recorder:
        total = 0.0
        for row in torch.rand(5, 3, device="cuda"):
            total += row.sum().item()
        return report(recorder)


def gathers(times: int) -> dict[str, Any]:
    with fake_cuda(world=8) as recorder:
        whole, part = torch.empty(8 * MIB, device="cuda"), torch.zeros(MIB, device="cuda")
        for _ in range(times):
            dist.all_gather_into_tensor(whole, part)
        return report(recorder)


def reduces_over(size: int) -> dict[str, Any]:
    with fake_cuda(world=16) as recorder:
        group = dist.new_group(list(range(size)))
        dist.all_reduce(torch.zeros(MIB, device="cuda"), group=group)
        return report(recorder)


def product(dtype: str) -> dict[str, Any]:
    with fake_cuda() as recorder:
        left = torch.zeros(1024, 1024, dtype=torch.bfloat16, device="cuda")
        (left.to(getattr(torch, dtype)) @ left.to(getattr(torch, dtype))).float()
        return report(recorder)


def attends(masked: bool) -> dict[str, Any]:
    """Attention of 4 heads over 2,048 positions, forward and backward; its whole matrix has 32 MiB in bfloat16."""
    with fake_cuda() as recorder:
        query, key, value = (
            torch.zeros(1, heads, 2048, 16, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            for heads in (4, 2, 2)
        )
        mask = torch.ones(2048, 2048, dtype=torch.bool, device="cuda") if masked else None
        mixed = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=not masked, enable_gqa=True
        )
        mixed.sum().backward()
        shapes = [list(tensor.grad.shape) for tensor in (query, key, value) if tensor.grad is not None]
        return {**report(recorder), "gradients": shapes}


def two_copies_of_a_buffer() -> dict[str, Any]:
    with fake_cuda() as recorder:
        first = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        second = first.clone()
        assert second.shape == first.shape
        return report(recorder)


def buffer_on_the_host() -> str:
    with fake_cuda():
        try:
            torch.zeros(4, device="cuda") + torch.zeros(4)
        except RuntimeError as error:
            return str(error)
    return ""


def counts_of_all_ranks() -> list[float]:
    """Sum and gather small counts: every rank is taken to have the same ones."""
    with fake_cuda(world=4, rank=2):
        mine = torch.tensor([3.0, 5.0], device="cuda")
        rows = [torch.empty_like(mine) for _ in range(4)]
        dist.all_gather(rows, mine)
        dist.all_reduce(mine)
        return [*mine.tolist(), *torch.stack(rows).sum(0).tolist()]


def indices_of_a_mask() -> list[int]:
    with fake_cuda() as recorder:
        mask = torch.tensor([True, False, True, True], device="cuda")
        places = mask.nonzero().squeeze(1)
        assert sum(recorder.current.host_reads.values()) == 1
        found: list[int] = (places * 2).tolist()
        return found


def launches(name: str, waits: bool = True) -> dict[str, Any]:
    """Launch a kernel in Triton on what another stream has copied."""
    import triton_kernels

    with fake_cuda() as recorder:
        side = torch.cuda.Stream()
        host = torch.ones(1024, pin_memory=True)
        with torch.cuda.stream(side):
            source = torch.empty(1024, device="cuda")
            source.copy_(host, non_blocking=True)
        if waits:
            torch.cuda.current_stream().wait_event(side.record_event())
        source.record_stream(torch.cuda.current_stream())
        target = torch.empty_like(source)
        compiled = getattr(triton_kernels, name)[(4,)](source, target, 1024, block=256)
        return {**report(recorder), "ptx": compiled.asm["ptx"]}


def hands_over(mistake: str | None) -> list[str]:
    """Hand a buffer to another process, which reads it, and fill it again."""
    with fake_cuda() as recorder:
        replica = active_mode().add_process()
        buffer = DeviceMemory()
        buffer.reserve(MIB).fill_(1)
        if mistake != "unsettled":
            buffer.settle()
        handle = buffer.describe()[0]["handle"]
        with active_mode().run_as(replica):
            opened = open_tensor(handle)
            opened.sum()
            if mistake != "answered early":
                torch.cuda.synchronize()
            if mistake != "freed early":
                del opened
        if mistake != "unsettled":
            buffer.reserve(MIB).fill_(2)
        buffer.close()
        return [fault.kind for fault in (*recorder.faults.values(), *replica.recorder.faults.values())]


def shares_and_frees() -> dict[str, int]:
    with fake_cuda() as recorder:
        buffer, held = DeviceMemory(), {}
        buffer.reserve(MIB)
        opened = open_tensor(buffer.describe()[0]["handle"])
        buffer.close()
        held["open"] = recorder.allocator.allocated
        del opened
        held["closed"] = recorder.allocator.allocated
        torch.cuda.ipc_collect()
        held["collected"] = recorder.allocator.allocated
        return held


def batch_on_a_device() -> dict[str, Any]:
    """Send a batch to the device, take rows of it there, and bring it back; fake tensors are never jagged."""
    with fake_cuda() as recorder:
        batch = DataProto.from_dict({"scores": torch.arange(3.0), "ids": torch.arange(6).view(3, 2)}).to("cuda")
        rows = batch[[2, 0]]
        found = rows.to("cpu")
        return {
            **report(recorder),
            "device": str(rows["ids"].device),
            "scores": found["scores"].tolist(),
            "ids": found["ids"].tolist(),
        }


def describes_device() -> list[Any]:
    """Describe the worker's device as the profiler does."""
    from rollcast_automap.profiling.devices import describe_device

    with fake_cuda(device="h200"):
        worker: Any = SimpleNamespace(context=SimpleNamespace(local_rank=0))
        info = describe_device(worker)
        return [info.name, info.memory_bytes >> 30, info.peak_flops]


def unfit_for_packed_rows(dtype: str, head_size: int, device: str = "h100") -> list[str]:
    """Return why no attention kernel takes packed rows."""
    from rollcast_fsdp.varlen import AttentionNeeds, find_kernel

    with fake_cuda(device=device):
        needs = AttentionNeeds(getattr(torch, dtype), head_size=head_size)
        return list(find_kernel("sdpa", torch.device("cuda", 0), needs)[1])


def liger_refuses() -> str:
    """Ask for Liger's kernels in a model that it does not know."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from rollcast_fsdp.kernels import apply_liger

    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=1, vocab_size=16))
    with fake_cuda():
        try:
            apply_liger(model, torch.device("cuda", 0))
        except ConfigError as error:
            return str(error)
    return ""


def random_state_of_a_new_engine() -> bool:
    """Return True if building an engine leaves the device's random numbers as they were."""
    with fake_cuda():
        torch.manual_seed(11)
        before = torch.cuda.get_rng_state()
        build_engine(EngineCell("fsdp", {"param_dtype": "bf16"})).initialize()
        return torch.equal(torch.cuda.get_rng_state(), before)


def layout_of_weights(cell: dict[str, Any]) -> dict[str, Any]:
    """Return the shapes of a Megatron engine's weights as they are exported, and as they are placed in a checkpoint."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    from rollcast_megatron.checkpoint import _sharded

    described = EngineCell(**cell)
    with fake_cuda(described.world, described.rank), own_groups():
        engine: Any = build_engine(described)
        engine.initialize()
        exported = {name: list(tensor.shape) for name, tensor in engine.get_per_tensor_param()}
        entries = _sharded(engine.checkpoint_state(), engine.optimizer).values()
        built = [entry.build() if isinstance(entry, ShardedTensorFactory) else entry for entry in entries]
        placed = [
            [part.key, list(part.local_shape), list(part.global_shape), list(part.global_offset)]
            for part in leaves_of(built)
            if isinstance(part, ShardedTensor)
        ]
        return {"exported": exported, "placed": sorted(placed), "entries": len(entries)}
