"""Arguments of a call in the worker's process: remote columns are read, and in-place writes are detected.

The arguments of a call may share memory with other ranks, with other readers of stored rows and, in a single-process
runtime, with the controller. A method registered with ``mutates`` gets copies of the named arguments. For all other
arguments, the state of each tensor is compared before and after the call:

- torch's count of writes (``Tensor._version``), which includes writes through views and ``detach()``;
- bytes, for writes that torch does not count (NumPy, ``Tensor.data``, native code): all bytes of a small tensor, and
  eight bytes of each page of a large one.

NumPy arrays are passed read-only, so a write raises inside the method.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rollcast.controller.dispatch import Registered
from rollcast.errors import WorkerError

if TYPE_CHECKING:
    import torch

    from rollcast.protocol import DataProto
    from rollcast.protocol._remote import Fetch, StoredBatch

__all__ = ["Arguments", "is_batch", "is_future"]

#: Largest size in bytes of a tensor that is compared as a whole.
_SMALL = 64 << 10
_PAGE = 4096
#: Number of bytes compared in each page of a larger tensor.
_WORD = 8
#: Types whose values contain no tensor, future or container.
_PLAIN = frozenset({int, float, str, bool, bytes, complex, type(None)})


def _loaded(module: str, name: str) -> Any:
    """Return a class of a module without importing it; None if the module is not loaded."""
    loaded = sys.modules.get(module)
    return None if loaded is None else getattr(loaded, name)


def is_future(value: Any) -> bool:
    """Return True if ``value`` is a :class:`~rollcast.protocol.future.DataProtoFuture`."""
    future = _loaded("rollcast.protocol.future", "DataProtoFuture")
    return future is not None and isinstance(value, future)


def is_batch(value: Any) -> bool:
    """Return True if ``value`` is a :class:`~rollcast.protocol.batch.DataProto`."""
    return _is(value, "rollcast.protocol.batch", "DataProto")


def _is(value: Any, module: str, name: str) -> bool:
    cls = _loaded(module, name)
    return cls is not None and isinstance(value, cls)


class _Watched:
    """The state of one tensor before a call."""

    def __init__(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        self.kind = kind
        self.name = name
        self._tensor = tensor
        self._version = None if tensor.is_inference() else tensor._version
        self._bytes = _sampled(tensor)

    def changed(self) -> bool:
        """Return True if the tensor was written to."""
        if self._version is not None and self._tensor._version != self._version:
            return True
        if self._bytes is None:
            return False
        now = _sampled(self._tensor)
        return now is None or not bool((now == self._bytes).all())


def _sampled(tensor: torch.Tensor) -> Any:
    """Copy sampled bytes that reveal most writes; return None if bytes cannot be compared cheaply."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
        return None
    import torch

    raw = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    if raw.nbytes <= _SMALL:
        return raw.copy()
    step = _PAGE
    pages = raw[: raw.nbytes // step * step].reshape(-1, step)
    return pages[:, :_WORD].copy()


@lru_cache(maxsize=1024)
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the positional parameters of a method's function, without ``self``."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[1:]
    except (TypeError, ValueError):
        return ()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(parameter.name for parameter in parameters if parameter.kind in positional)


class Arguments:
    """The arguments of one call, prepared for the method.

    Args:
        entry: registration of the method; None if it is not registered.
        fetch: function that reads remote rows.
        same_process: True if the arguments are the controller's own objects.
    """

    def __init__(self, entry: Registered | None, fetch: Fetch, same_process: bool) -> None:
        self._entry = entry
        self._fetch = fetch
        self._same_process = same_process
        self._watched: list[_Watched] = []
        self._kept: list[tuple[frozenset[str], tuple[StoredBatch, ...]]] = []

    def arrive(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Read remote columns, copy what the method may write to, watch all else, and return the arguments."""
        names = _parameters(getattr(method, "__func__", method)) if args else ()
        arrived = [self._value(value, names[i] if i < len(names) else f"{i}") for i, value in enumerate(args)]
        return arrived, {key: self._value(value, key) for key, value in kwargs.items()}

    def check(self, where: str) -> None:
        """Raise an error if the method wrote to shared memory; mark stored rows that it damaged.

        Raises:
            WorkerError: the method wrote to shared memory; names ``where`` and the columns or arguments.
            DataProtoError: another process damaged the rows during the call.
        """
        written = {(watched.kind, watched.name): None for watched in self._watched if watched.changed()}
        if written:
            what = ", ".join(f"{kind} {name!r}" for kind, name in written)
            message = (
                f"{where} wrote in place to {what}, which other ranks and readers may share. Register the method with "
                f"mutates={tuple(name for _, name in written)!r} to get a copy of its own, or write to a clone()"
            )
            for columns, stored in self._kept:
                if any(kind == "column" and name in columns for kind, name in written):
                    for value in stored:
                        value.damage(message)
            raise WorkerError(message)
        for _, stored in self._kept:
            for value in stored:
                value.check()

    def _may_write(self, *names: str) -> bool:
        return self._entry is not None and self._entry.may_write(*names)

    def _value(self, value: Any, name: str) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is list or kind is tuple:
            return kind(value) if _PLAIN.issuperset(map(type, value)) else kind(self._value(v, name) for v in value)
        if kind is dict:
            return {key: self._value(item, f"{name}[{key!r}]" if name else key) for key, item in value.items()}
        if is_future(value):
            return self._value(value.argument(), name)
        if is_batch(value):
            return self._batch(value, name)
        if _is(value, "torch", "Tensor"):
            return self._tensor(value, name)
        if self._same_process and _is(value, "numpy", "ndarray"):
            return self._array(value, name)
        return value

    def _batch(self, batch: DataProto, name: str) -> DataProto:
        """Return a new batch, with its remote columns read, and its shared columns copied or watched."""
        import torch

        from rollcast.protocol._columns import kind_of, map_tensors

        if batch.is_remote:
            batch = batch.bound(self._fetch)
            if self._entry is not None and not self._entry.materialize_futures:
                return batch
        reading = batch.read()
        self._kept.append((reading.shared, reading.stored))
        own = batch.remote_columns().keys() - reading.shared
        mine = dict(reading.columns)
        written: dict[str, torch.Tensor] = {}
        for label, column in reading.columns.items():
            if kind_of(column) == "object":
                mine[label] = _own_objects(column) if self._same_process else column
            elif label in own:
                continue
            elif self._may_write(label, name):
                written[label] = column
            else:
                self._watch("column", label, column)
        # Copied in one call, so that jagged columns keep sharing their offsets.
        return type(batch)._of(len(batch), {**mine, **map_tensors(written, torch.clone)}, batch.meta_info)

    def _watch(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        parts = [tensor] if not tensor.is_nested else [tensor._values, tensor._offsets]  # type: ignore[attr-defined]
        self._watched += [_Watched(kind, name, part) for part in parts]

    def _tensor(self, value: torch.Tensor, name: str) -> torch.Tensor:
        if self._may_write(name, name.partition("[")[0]):
            return value.clone()
        self._watch("argument", name.partition("[")[0], value)
        return value

    def _array(self, value: Any, name: str) -> Any:
        if self._may_write(name, name.partition("[")[0]):
            return value.copy()
        view = value.view()
        view.flags.writeable = False
        return view


def _own_objects(column: Any) -> Any:
    """Copy the containers of the objects, as pickling does on other runtimes."""
    from rollcast.protocol._objects import ObjectColumn, object_array
    from rollcast.protocol._values import copy_value

    positions, used = column.compact()
    objects = used.tolist()
    if _PLAIN.issuperset(map(type, objects)):
        return column
    import torch

    return ObjectColumn.wrap(torch.from_numpy(positions), object_array(map(copy_value, objects), len(objects)))
