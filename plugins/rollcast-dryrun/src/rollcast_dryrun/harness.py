"""Runs code of a CUDA rank on a machine without a device."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

from rollcast.errors import CapabilityError
from rollcast_automap.contract import DeviceKind
from rollcast_automap.costs.device_kinds import DEVICE_KINDS
from rollcast_dryrun.attention import attend
from rollcast_dryrun.kernels import kernel_replacements
from rollcast_dryrun.mode import LARGE_ON_HOST, DryRunMode
from rollcast_dryrun.record import Recorder
from rollcast_dryrun.sharing import sharing_replacements
from rollcast_dryrun.streams import MockEvent, MockStream
from rollcast_engine.weights import WeightFolder

__all__ = ["fake_cuda"]

#: Compute capability by kind of device.
_CAPABILITIES = {
    "a10": (8, 6),
    "a100": (8, 0),
    "a800": (8, 0),
    "b200": (10, 0),
    "l4": (8, 9),
    "l40s": (8, 9),
    **dict.fromkeys(("h100", "h20", "h200", "h800"), (9, 0)),
}


@contextmanager
def fake_cuda(
    world: int = 1,
    rank: int = 0,
    device: str | DeviceKind = "h100",
    node_ranks: int = 8,
    received: Mapping[str, Sequence[Sequence[int]]] | None = None,
) -> Iterator[Recorder]:
    """Pretend during the block that this process is a rank of CUDA devices, and record what it does.

    Operations on tensors of the device compute shapes only. Small tensors have values, as if every rank had the values
    of this one; other values that the host reads are 1. Kernels in Triton are compiled for the device.

    Args:
        world: number of ranks, which ``torch.distributed`` knows as its process group.
        rank: rank of this process.
        device: kind of device, an NVIDIA one of those that ``cluster.device`` knows, by name or with other figures.
        node_ranks: ranks of a node.
        received: phase → whole numbers that this rank receives from single ranks, in order, such as the shapes that
            stages of a pipeline announce; None for those that it sends.

    Raises:
        CapabilityError: :func:`~rollcast_dryrun.native.load_mock` was not called before torch was imported, or the kind
            of device is not known.
    """
    if not torch._C._get_accelerator().type == "cuda":
        raise CapabilityError("a dry run needs load_mock() before torch is imported; MockProcess does both")
    kind = DEVICE_KINDS.get(device) if isinstance(device, str) else device
    if kind is None or kind.name not in _CAPABILITIES:
        name = device if kind is None else kind.name
        raise CapabilityError(f"a dry run does not know the device {name!r}; known: {', '.join(_CAPABILITIES)}")
    mode = DryRunMode(node_ranks, kind, received)
    with ExitStack() as stack:
        for target, name, value in _replacements(mode, kind):
            stack.enter_context(mock.patch.object(target, name, value, create=not hasattr(target, name)))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        # torch.tensor(..., device="cuda") then makes a host tensor first, and sends it.
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        stack.callback(dist.destroy_process_group)
        stack.callback(_clear_sharding_prop_cache)  # it has the groups of these ranks
        stack.enter_context(mode)
        yield mode.recorder


def _replacements(mode: DryRunMode, kind: DeviceKind) -> Iterator[tuple[Any, str, Any]]:
    """Yield what is replaced: an object, an attribute and its value."""
    for name, value in (_cuda_functions(mode, kind) | _memory_functions(mode, kind)).items():
        if hasattr(torch.cuda, name):
            yield torch.cuda, name, value
    yield torch._C, "_cuda_getDevice", lambda: 0
    yield from _methods(mode)
    yield from _content(mode)
    yield WeightFolder, "read", _reader(mode)
    yield torch.nn.functional, "scaled_dot_product_attention", attend
    yield from _distributed(mode)
    yield from sharing_replacements(mode)
    yield from kernel_replacements(mode, _CAPABILITIES[kind.name])


def _methods(mode: DryRunMode) -> Iterator[tuple[Any, str, Any]]:
    """Yield replacements of what torch does to tensors and storages without an operation."""
    resize = torch.UntypedStorage.resize_

    def record_stream(tensor: torch.Tensor, stream: MockStream) -> None:
        mode.storages.hold(tensor, stream)

    def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:  # noqa: ARG001  # torch's signature
        return mode.storages.is_pinned(tensor)

    def read_list(tensor: torch.Tensor) -> Any:
        return mode.read_value(tensor).tolist()

    def read_array(tensor: torch.Tensor, force: bool = False) -> Any:  # noqa: ARG001  # torch's signature
        if tensor.device.type == "cuda":
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        return mode.read_value(tensor).numpy()

    def address(tensor: torch.Tensor) -> int:
        """Return an address that no other storage shares, aligned as an allocator's."""
        storage: int = tensor.untyped_storage()._cdata
        return (storage << 9) + int(tensor.storage_offset()) * tensor.element_size()

    def resize_noted(storage: torch.UntypedStorage, size: int) -> Any:
        mode.storages.resize(storage, size)
        return resize(storage, size)

    yield torch.Tensor, "record_stream", record_stream
    yield torch.Tensor, "is_pinned", is_pinned
    yield FakeTensor, "tolist", read_list
    yield FakeTensor, "numpy", read_array
    yield FakeTensor, "data_ptr", address
    yield torch.UntypedStorage, "resize_", resize_noted


def _content(mode: DryRunMode) -> Iterator[tuple[Any, str, Any]]:
    """Yield replacements of what sets the content of tensors."""
    make_tensor, swap = torch.tensor, torch.utils.swap_tensors
    own_data: Any = torch.Tensor.data

    def make_tensor_of_values(values: Any, **options: Any) -> torch.Tensor:
        # torch reads scalar tensors among the values below the dispatch modes.
        return make_tensor(tree_map_only(FakeTensor, lambda value: value.item(), values), **options)

    def take_content(tensor: torch.Tensor, other: torch.Tensor) -> None:
        """Let a parameter have another tensor's content; ``Module.to`` swaps fake ones, which does not work."""
        if isinstance(tensor, FakeTensor):
            mode.replace_content(tensor, other)
        else:
            swap(tensor, other)  # type: ignore[no-untyped-call]

    def move(parameter: torch.nn.Parameter, other: torch.Tensor) -> None:
        """Do ``parameter.data = other``, which takes a parameter of the host to the device."""
        if isinstance(other, FakeTensor):
            _become(parameter, torch.nn.Parameter(other, parameter.requires_grad))
        else:
            own_data.__set__(parameter, other)

    yield torch.nn.Parameter, "data", property(own_data.__get__, move)
    yield torch, "tensor", make_tensor_of_values
    yield torch.utils, "swap_tensors", take_content
    yield FakeTensor, "data", property(own_data.__get__, mode.replace_content)


def _become(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange two tensors, as ``torch.utils.swap_tensors`` does if nothing has weak references to them."""
    torch._C._swap_tensor_impl(tensor, other)
    tensor.__class__, other.__class__ = other.__class__, tensor.__class__
    tensor.__dict__, other.__dict__ = other.__dict__, tensor.__dict__


def _reader(mode: DryRunMode) -> Callable[..., torch.Tensor]:
    """Return a replacement of ``WeightFolder.read`` that reads small tensors only, which may have a meaning."""
    read = WeightFolder.read

    def read_small(folder: WeightFolder, name: str, region: Sequence[slice] | None = None) -> torch.Tensor:
        shape = folder.shapes[name]
        parts = [slice(None)] * len(shape) if region is None else region
        sizes = [len(range(*part.indices(size))) for part, size in zip(parts, shape, strict=True)]
        if math.prod(sizes) < LARGE_ON_HOST:
            return read(folder, name, region)
        first = read(folder, name, [slice(0, 1)] * len(shape))
        return mode.make_fake(sizes, first.dtype)

    return read_small


def _distributed(mode: DryRunMode) -> Iterator[tuple[Any, str, Any]]:
    """Yield replacements of what needs other ranks."""
    new_group, propagate = dist.new_group, ShardingPropagator._propagate_tensor_meta_non_cached

    def noted(wait: Callable[..., bool]) -> Callable[..., bool]:
        def wait_on_stream(work: dist.Work, *timeout: Any) -> bool:
            mode.streams.wait_for_sent()
            return wait(work, *timeout)

        return wait_on_stream

    def new_fake_group(*args: Any, **options: Any) -> Any:
        named = inspect.signature(new_group).bind(*args, **options)
        return new_group(**{**named.arguments, "backend": "fake", "pg_options": None})

    def propagate_unrecorded(propagator: ShardingPropagator, schema: Any) -> Any:
        with mode.unrecorded():
            return propagate(propagator, schema)

    kinds: tuple[Any, ...] = (dist.Work, *dist.Work.__subclasses__())  # the fake group's handles have their own class
    for kind in kinds:
        if "wait" in vars(kind):
            yield kind, "wait", noted(kind.wait)
    yield ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate_unrecorded
    yield dist, "new_group", new_fake_group
    yield dist, "all_gather_object", _all_gather_object
    yield dist, "broadcast_object_list", _broadcast_object_list
    yield dist, "barrier", lambda *_, **__: None


def _broadcast_object_list(objects: list[Any], *_: Any, **__: Any) -> None:
    """Leave this rank's objects as they are; in place of those that it waits for it gets empty ones."""
    objects[:] = [{} if value is None else value for value in objects]


class _Generator:
    """The state of a device's random numbers, of which a dry run draws none."""

    def __init__(self) -> None:
        self._state = torch.zeros(16, dtype=torch.uint8)

    def seed(self, number: int) -> None:
        self._state = torch.tensor(list((number % 2**64).to_bytes(16, "little")), dtype=torch.uint8)

    def get_state(self) -> torch.Tensor:
        return self._state.clone()

    def set_state(self, state: torch.Tensor) -> None:
        self._state = state.clone()


def _all_gather_object(objects: list[Any], mine: Any, group: Any = None) -> None:  # noqa: ARG001  # torch's signature
    objects[:] = [mine] * len(objects)


def _cuda_functions(mode: DryRunMode, kind: DeviceKind) -> dict[str, Any]:
    capability, generator = _CAPABILITIES[kind.name], _Generator()
    properties = types.SimpleNamespace(
        name=f"NVIDIA {kind.name.upper()}",
        major=capability[0],
        minor=capability[1],
        total_memory=kind.memory_bytes,
        multi_processor_count=132,
        L2_cache_size=50 << 20,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block_optin=232448,
        gcnArchName="",
        uuid="GPU-0",
    )

    class Stream(MockStream):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(mode.streams)

    class Event(MockEvent):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(mode.streams)

    def use_stream(stream: MockStream | None) -> AbstractContextManager[MockStream | None]:
        return mode.streams.use(stream)

    def set_stream(stream: MockStream) -> None:
        mode.streams.set_current(stream)

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "device": lambda _: nullcontext(),
        "device_of": lambda _: nullcontext(),
        "synchronize": lambda _=None: mode.streams.synchronize(),
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda _=None: mode.streams.current,
        "default_stream": lambda _=None: mode.streams.default,
        "stream": use_stream,
        "set_stream": set_stream,
        "get_device_capability": lambda _=None: capability,
        "get_device_properties": lambda _=None: properties,
        "get_device_name": lambda _=None: properties.name,
        "default_generators": (generator,),
        "get_rng_state": lambda _=None: generator.get_state(),
        "set_rng_state": lambda state, _=None: generator.set_state(state),
        "manual_seed": generator.seed,
        "manual_seed_all": generator.seed,
        "is_bf16_supported": lambda *_: capability >= (8, 0),
        "is_current_stream_capturing": lambda: False,
    }


def _memory_functions(mode: DryRunMode, kind: DeviceKind) -> dict[str, Any]:
    def stats(_: Any = None) -> dict[str, int]:
        memory = mode.recorder.allocator
        return {
            "allocated_bytes.all.current": memory.allocated,
            "allocated_bytes.all.peak": memory.peak_allocated,
            "reserved_bytes.all.current": memory.reserved,
            "reserved_bytes.all.peak": memory.peak_reserved,
        }

    def free_and_total(_: Any = None) -> tuple[int, int]:
        reserved = sum(process.recorder.allocator.reserved for process in mode.processes)
        return kind.memory_bytes - reserved, kind.memory_bytes

    def empty_cache() -> None:
        mode.recorder.allocator.empty_cache()

    return {
        "memory_allocated": lambda _=None: mode.recorder.allocator.allocated,
        "max_memory_allocated": lambda _=None: mode.recorder.allocator.peak_allocated,
        "memory_reserved": lambda _=None: mode.recorder.allocator.reserved,
        "max_memory_reserved": lambda _=None: mode.recorder.allocator.peak_reserved,
        "memory_stats": stats,
        "reset_peak_memory_stats": lambda _=None: mode.recorder.allocator.reset_peak(),
        "mem_get_info": free_and_total,
        "empty_cache": empty_cache,
        "ipc_collect": mode.storages.collect,
    }
