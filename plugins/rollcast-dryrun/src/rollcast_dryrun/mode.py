"""The dispatch mode that runs operations of the device on fake tensors, and records them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from threading import RLock, local
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from rollcast.errors import CapabilityError
from rollcast_automap.contract import DeviceKind
from rollcast_dryrun.collectives import describe, own_value
from rollcast_dryrun.record import Collective, Copy, Recorder, find_place
from rollcast_dryrun.schemas import is_view, leaves_of, reads_shape_only, written_arguments
from rollcast_dryrun.shapes import run_on_fakes
from rollcast_dryrun.storages import DeviceProcess, Storages
from rollcast_dryrun.streams import DeviceStreams
from rollcast_dryrun.values import (
    attach,
    choose_evenly,
    compute,
    compute_shape,
    copy_value,
    forget,
    get_value,
    has_values,
    set_value,
)

__all__ = ["LARGE_ON_HOST", "DryRunMode", "active_mode"]

aten = torch.ops.aten
#: Tensors of the host from this number of elements on that only enter or leave the device are fake too.
LARGE_ON_HOST = 1 << 22
#: Operations whose result is a value of the host; it is 1, or true, if it is not known.
_READS = (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default, aten.allclose.default)
_COLLECTIVES = ("c10d", "_c10d_functional")


class DryRunMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs what touches the device on fake tensors, and everything else for real.

    Args:
        node_ranks: ranks of a node.
        kind: figures of the device.
        received: phase → whole numbers that this rank receives from single ranks; None for those that it sends.
    """

    def __init__(
        self,
        node_ranks: int,
        kind: DeviceKind,
        received: Mapping[str, Sequence[Sequence[int]]] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lock = RLock()
        self.processes = [_new_process()]
        self._thread = local()
        self.storages = Storages(lambda: self.process, self._lock)
        self._node_ranks = node_ranks
        self._kind = kind
        self._unrecorded = False
        self._received = received
        self._receives = 0
        # Made before torch.cuda is mocked, which it asks for devices.
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    @property
    def process(self) -> DeviceProcess:
        """The process on the device for which this thread runs."""
        process: DeviceProcess = getattr(self._thread, "process", self.processes[0])
        return process

    @property
    def recorder(self) -> Recorder:
        """The record of this thread's process."""
        return self.process.recorder

    @property
    def streams(self) -> DeviceStreams:
        """The streams of this thread's process."""
        return self.process.streams

    def add_process(self) -> DeviceProcess:
        """Return a further process on the device."""
        self.processes.append(_new_process(self.processes[0]))
        return self.processes[-1]

    @contextmanager
    def run_as(self, process: DeviceProcess) -> Iterator[None]:
        """Run the block as another process, in this thread or in one that takes part in the dry run by it."""
        outer = self.process
        self._thread.process = process
        try:
            with nullcontext() if self in _get_current_dispatch_mode_stack() else self:
                yield
        finally:
            self._thread.process = outer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _dispatches_itself(tuple(types)):
            return NotImplemented  # of a sharded tensor, the operations on its parts come here
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))  # a question for a tensor's device or layout
        with self._lock:
            return self._dispatch(func, args, dict(kwargs or {}))

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = leaves_of((args, kwargs))
        fakes = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
        if any(fake.fake_mode is not self._fake for fake in fakes):
            return func(*args, **kwargs)  # DTensor computes the shapes of its results so
        if func.namespace in _COLLECTIVES and fakes:
            return self._collective(func, args, kwargs, leaves)
        if func in _READS and fakes:
            return self._read(func, args, kwargs, fakes)
        if func is aten.copy_.default and (fakes or args[0].device.type == "cuda"):
            return self._copy(args[0], args[1], *args[2:], **kwargs)
        if func is aten._to_copy.default and self._crosses(args[0], kwargs.get("device")):
            return self._send(args[0], kwargs)
        if not fakes and not _asks_device(leaves):
            return self._on_host(func, args, kwargs, leaves)
        return self._on_device(func, args, kwargs, leaves)

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Record nothing during the block, in which a library computes with tensors that no real run would make."""
        outer, self._unrecorded = self._unrecorded, True
        try:
            yield
        finally:
            self._unrecorded = outer

    def make_fake(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a host tensor without memory."""
        with self._fake:
            return torch.empty(tuple(shape), dtype=dtype)

    def note_kernel(
        self, name: str, tensors: Sequence[torch.Tensor], written: Sequence[torch.Tensor] = (), flops: float = 0.0
    ) -> None:
        """Record a kernel that is not one of torch's operations.

        Args:
            name: name of the kernel.
            tensors: its arguments; if ``written`` is not known, the values of floating-point ones are lost.
            written: the tensors that it writes, beside them.
            flops: its arithmetic, in 16 bits.
        """
        phase, tick = self.recorder.current, self.streams.current.tick()
        phase.operations += 1
        phase.kernels[name] += 1
        phase.flops += int(flops)
        arguments = [tensor for tensor in (*tensors, *written) if _on_device(tensor)]
        phase.kernel_seconds += max(flops / self._kind.flops["bfloat16"], self._access_seconds(arguments))
        changed = {id(tensor) for tensor in written}
        for tensor in arguments:
            self.storages.use(tensor, id(tensor) in changed, tick)
            if id(tensor) in changed or (not written and tensor.is_floating_point()):
                forget(tensor)

    def note_broadcast(self, tensor: torch.Tensor, ranks: int, writes: bool) -> None:
        """Record a broadcast in a group outside the process group, which may span nodes."""
        collective = Collective("broadcast", ranks, nodes=True)
        with self._lock:
            self.recorder.current.operations += 1
            self.recorder.current.collectives[collective] += 1
            self.recorder.current.collective_bytes[collective] += tensor.nbytes
            self.storages.use(tensor, writes, self.streams.current.tick())
            forget(tensor)

    def make_alias(self, handle: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor ``[size]`` that shares the device's memory behind another process's handle."""
        with self._lock:
            with self.unrecorded():
                flat = torch.empty(size, dtype=dtype, device="cuda:0")
            self.storages.open_handle(handle, flat)
            return flat

    # -- operations -------------------------------------------------------------------------------

    def _on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> Any:
        """Run an operation of real host tensors."""
        pinned = bool(kwargs.pop("pin_memory", False)) or func is aten._pin_memory.default
        if not is_view(func):
            self._note_host_use(leaves, _written(func, args, kwargs))
        if func is aten._pin_memory.default:
            result = args[0].clone()
        elif pinned and _numel(args) >= LARGE_ON_HOST:
            with self._fake:
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        if pinned:
            self.storages.add(result, pinned=True, host=True)
        return result

    def _on_device(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> Any:
        kwargs.pop("pin_memory", None)
        if self._unrecorded:
            with self._fake:
                return func(*args, **kwargs)
        try:
            result = run_on_fakes(self._fake, func, args, kwargs)
            # Not of large results, for which the values would take their memory.
            outputs = leaves_of(result)
            is_small = all(has_values(leaf) for leaf in outputs if isinstance(leaf, torch.Tensor))
            known, values = compute(func, args, kwargs) if is_small else (False, None)
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            known, values = compute(func, args, kwargs)
            if not known and (values := compute_shape(func, args, kwargs)) is None:
                raise CapabilityError(
                    f"the dry run does not know the values on which {func} depends, at {find_place()}"
                ) from error
            self._note_host_read(*(leaf for leaf in leaves if isinstance(leaf, FakeTensor)))
            if not isinstance(values, torch.Tensor):
                return values
            with self._fake:
                result = torch.empty_strided(
                    values.shape, values.stride(), dtype=values.dtype, device=_device_of(leaves)
                )
        self._note_use(func, args, kwargs, leaves, result)
        if known:
            attach(func, args, result, values)
        else:
            written = _written(func, args, kwargs)
            for leaf in leaves:
                if isinstance(leaf, torch.Tensor) and id(leaf) in written:
                    forget(leaf)
            if func is aten.topk.default:
                choose_evenly(args[0], result[1])
        return result

    def _note_use(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any], result: Any
    ) -> None:
        """Record an operation, its memory, and the order of its reads and writes."""
        if is_view(func):
            return
        written = _written(func, args, kwargs)
        self._note_host_use(leaves, written)
        outputs = [leaf for leaf in leaves_of(result) if isinstance(leaf, torch.Tensor) and _on_device(leaf)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and _on_device(leaf)]
        if not (outputs or any(id(tensor) in written for tensor in tensors)):
            return  # computes nothing on the device
        for output in outputs:
            self.storages.add(output)
        self.recorder.current.operations += 1
        if func.namespace not in _COLLECTIVES:
            self._price(func, args, kwargs, result, tensors, outputs)
        tick = self.streams.current.tick()
        inputs = {id(tensor) for tensor in tensors}
        for tensor in () if reads_shape_only(func) else tensors:
            self.storages.use(tensor, id(tensor) in written, tick)
        for output in outputs:
            if id(output) not in inputs:
                self.storages.use(output, True, tick)

    def _price(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> None:
        """Add an operation's arithmetic, and the time that it takes at least."""
        phase, arithmetic = self.recorder.current, 0.0
        if (count := flop_registry.get(func.overloadpacket)) is not None:
            flops = int(count(*args, **kwargs, out_val=result))
            # The factors decide: products of bfloat16 are summed in float32 at no cost.
            narrow = min(tensor.element_size() for tensor in inputs if tensor.is_floating_point()) <= 2
            arithmetic = flops / self._kind.flops["bfloat16" if narrow else "float32"]
            phase.flops += flops
        phase.kernel_seconds += max(arithmetic, self._access_seconds([*inputs, *outputs]))

    def _access_seconds(self, tensors: Sequence[torch.Tensor]) -> float:
        """Return the time in which the device reads or writes each of the tensors once."""
        return sum({id(tensor): tensor.nbytes for tensor in tensors}.values()) / self._kind.memory_bandwidth

    def _note_host_use(self, leaves: list[Any], written: set[int]) -> None:
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and not _on_device(leaf):
                self.storages.use_on_host(leaf, id(leaf) in written)

    def _collective(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> Any:
        try:
            with self._fake:
                result = func(*args, **kwargs)
        except UnsupportedOperatorException:  # coalesced ones, which return no tensor
            args_without_data, options = tree_map_only(torch.Tensor, lambda _: torch.empty(0), (args, kwargs))
            result = func(*args_without_data, **options)
        self._note_use(func, args, kwargs, leaves, result)
        self.streams.send()
        collective, nbytes = describe(func, args, self._node_ranks)
        if collective is None:
            return result
        self.recorder.current.collectives[collective] += 1
        self.recorder.current.collective_bytes[collective] += nbytes
        if collective.kind in ("send", "recv"):
            self._note_message(collective.kind, args[0])
        else:
            own_value(collective, args)
        return result

    def _note_message(self, kind: str, tensors: Sequence[torch.Tensor]) -> None:
        """Note the whole numbers that a rank sends, and set those that it receives."""
        for tensor in tensors:
            value = get_value(tensor)
            if tensor.dtype.is_floating_point or value is None:
                forget(tensor)
            elif kind == "send":
                self.recorder.current.sent.append(value.tolist())
            else:
                sent, name = self.recorder.current.sent, self.recorder.current_name
                messages = sent if self._received is None else self._received.get(name, sent)
                if messages:  # forward and backward passes announce the same shapes
                    value.copy_(torch.tensor(messages[self._receives % len(messages)]))
                else:
                    forget(tensor)
                self._receives += 1

    # -- values that leave and enter the device ---------------------------------------------------

    def _note_host_read(self, *tensors: torch.Tensor) -> None:
        """Record that the host waits for values of these tensors, which the current stream copies."""
        tensors = tuple(tensor for tensor in tensors if _on_device(tensor))
        if not tensors:
            return
        self.recorder.current.host_reads[find_place()] += 1
        tick = self.streams.current.tick()
        for tensor in tensors:
            self.storages.use(tensor, False, tick)
        self.streams.wait_on_host(self.streams.current.clock)

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], fakes: list[FakeTensor]) -> Any:
        self._note_host_read(*fakes)
        known, value = compute(func, args, kwargs)
        if known:
            return value
        if func is not aten._local_scalar_dense.default:
            return True
        dtype = args[0].dtype
        return 1.0 if dtype.is_floating_point else dtype is torch.bool or 1

    def read_value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's values on the host, which takes one copy from the device; ones if they are not known."""
        self._note_host_read(tensor)
        value = get_value(tensor)
        return torch.ones(tensor.shape, dtype=tensor.dtype) if value is None else value

    def replace_content(self, tensor: FakeTensor, other: torch.Tensor) -> None:
        """Do ``tensor.data = other`` for a fake tensor; the memory of a real one becomes fake."""
        if not isinstance(other, FakeTensor):
            pinned = self.storages.is_pinned(other)
            with self._fake:
                other = torch.empty_strided(other.size(), other.stride(), dtype=other.dtype, device=other.device)
            if pinned:
                self.storages.add(other, pinned=True, host=True)
        torch._C.TensorBase.data.__set__(tensor, other.data)  # type: ignore[attr-defined]
        tensor.fake_device = other.device

    def _crosses(self, source: torch.Tensor, device: Any) -> bool:
        sides = {source.device.type} | ({torch.device(device).type} if device is not None else set())
        return sides == {"cpu", "cuda"}

    def _send(self, source: torch.Tensor, options: dict[str, Any]) -> Any:
        """Return a tensor's copy on the other side."""
        dtype, device = options.get("dtype") or source.dtype, torch.device(options["device"])
        value = _value_of(source)
        values = value.to(dtype, copy=True) if value is not None and has_values(value) else None
        if device.type == "cpu" and values is not None:
            target = values
        else:
            with self._fake:
                target = torch.empty_strided(source.size(), source.stride(), dtype=dtype, device=device)
            if values is not None:
                set_value(target, values)
        non_blocking = bool(options.get("non_blocking"))
        if device.type == "cuda":
            self.storages.add(target)
        elif non_blocking:
            self.storages.add(target, pinned=True, host=True)  # torch pins what it makes for such a copy
        self._note_copy(target, source, non_blocking)
        return target

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """Copy into a tensor, over the bus or on the device."""
        fits = torch.broadcast_shapes(target.shape, source.shape)  # type: ignore[no-untyped-call]
        if fits != target.shape:
            raise RuntimeError(f"copy_: a tensor {list(source.shape)} does not fit into {list(target.shape)}")
        if _on_device(target) != _on_device(source):
            self._note_copy(target, source, non_blocking)
        else:
            self._note_use(aten.copy_.default, (target, source), {}, [target, source], target)
        value = _value_of(source)
        if isinstance(target, FakeTensor):
            copy_value(target, value)
        elif value is not None:
            target.copy_(value)
        return target

    def _note_copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        to_device = _on_device(target)
        host, device = (source, target) if to_device else (target, source)
        pinned = self.storages.is_pinned(host)
        blocking = not (non_blocking and pinned)  # without a pinned buffer, CUDA copies through one of its own
        phase = self.recorder.current
        copy = Copy(to_device, pinned, blocking, find_place())
        phase.copies[copy] += 1
        phase.copy_bytes[copy] += device.nbytes
        phase.operations += 1
        tick = self.streams.current.tick()
        self.storages.use(source, False, tick)
        self.storages.use(target, True, tick)
        if blocking:
            self.streams.wait_on_host(self.streams.current.clock)
        if blocking and not to_device:
            phase.host_reads[copy.place] += 1


def active_mode() -> DryRunMode:
    """Return the mode of the dry run around the caller.

    Raises:
        RuntimeError: there is none.
    """
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if isinstance(mode, DryRunMode):
            return mode
    raise RuntimeError("no dry run is around this call; use fake_cuda")


def _new_process(first: DeviceProcess | None = None) -> DeviceProcess:
    recorder = Recorder()
    return DeviceProcess(recorder, DeviceStreams(recorder.note_wait, None if first is None else first.streams))


@cache
def _dispatches_itself(kinds: tuple[type, ...]) -> bool:
    """Return True if a class of tensors carries out operations itself, such as DTensor."""
    plain: Any = torch.Tensor.__torch_dispatch__
    return any(kind is not FakeTensor and kind.__torch_dispatch__ is not plain for kind in kinds)  # type: ignore[attr-defined]


def _value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor's values; None if they are not known."""
    return get_value(tensor) if isinstance(tensor, FakeTensor) else tensor


def _on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda"


def _asks_device(leaves: list[Any]) -> bool:
    return any(
        (isinstance(leaf, torch.device) and leaf.type == "cuda")
        or (isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda")
        for leaf in leaves
    )


def _device_of(leaves: list[Any]) -> torch.device:
    return next(leaf.device for leaf in leaves if isinstance(leaf, FakeTensor))


def _numel(args: tuple[Any, ...]) -> int:
    """Return the number of elements that a factory makes; 0 for other operations."""
    if not args or not isinstance(args[0], list | tuple | torch.Size) or not all(isinstance(n, int) for n in args[0]):
        return 0
    return math.prod(args[0])


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Return the ids of tensors that an operation writes in place."""
    written: set[int] = set()
    for place, name in written_arguments(func):
        value = args[place] if place < len(args) else kwargs.get(name)
        written |= {id(leaf) for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)}
    return written
