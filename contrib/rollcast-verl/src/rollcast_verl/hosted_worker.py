"""The worker of rollcast that hosts a worker of verl: batches are converted where a call enters and leaves it.

Methods are named by a path: ``add``, or ``actor/add`` for the worker ``actor`` inside a fused worker. The class of the
hosted worker arrives as bytes, because it can be unpickled only after the import hook is installed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

from ray import cloudpickle

from rollcast import DataProto, DispatchMode, Worker, WorkerGroup, register
from rollcast.contracts.dispatch import MeshInfo
from rollcast.errors import DispatchError

__all__ = ["RAY_CALL", "HostedWorker", "attribute_of", "hosted_worker_class"]

#: Path of :meth:`HostedWorker.call_with_worker`, which stands for Ray's ``__ray_call__``.
RAY_CALL = "()"


class HostedWorker(Worker):
    """Base class of the workers that host a worker of verl.

    Args:
        packed: pickle of the class and its arguments.
    """

    def __init__(self, packed: bytes) -> None:
        importlib.import_module("rollcast_verl.hook")
        from rollcast_verl.batches import install_meta_rule

        install_meta_rule()
        # Ray shows each process its own device only, and verl's workers choose a device by their local rank.
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        cls, args, kwargs = cloudpickle.loads(packed)
        self.hosted = cls(*args, **kwargs)

    def find(self, prefix: str) -> Any:
        """Return the hosted worker, or the worker inside it that is called ``prefix``.

        Raises:
            DispatchError: there is no such worker.
        """
        inside: Mapping[str, Any] = getattr(self.hosted, "fused_worker_dict", {})
        if prefix and prefix not in inside:
            raise DispatchError(f"no worker {prefix!r} in this process; there are: {', '.join(inside) or 'none'}")
        return inside[prefix] if prefix else self.hosted

    def pass_on(self, path: str, convert: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the hosted worker's method with batches of verl.

        Args:
            path: path of the method.
            convert: True to return batches as rollcast's, which stay here until somebody reads them.
        """
        from rollcast_verl.batches import to_verl

        prefix, _, name = path.rpartition("/")
        method = getattr(self.find(prefix), name)
        values = [to_verl(value) if isinstance(value, DataProto) else value for value in args]
        named = {key: to_verl(value) if isinstance(value, DataProto) else value for key, value in kwargs.items()}
        result = method(*values, **named)
        if not convert:
            return result
        return self._converted_later(result) if inspect.iscoroutine(result) else self._converted(result)

    def _converted(self, result: Any) -> Any:
        from rollcast_verl.batches import from_verl, is_convertible

        return from_verl(result, self.rank) if is_convertible(result) else result

    async def _converted_later(self, result: Any) -> Any:
        return self._converted(await result)

    def call_with_worker(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function with the hosted worker, as Ray's ``__ray_call__`` does."""
        return function(self.hosted, *args, **kwargs)

    @register(dispatch_mode="one_to_all")
    def query_mesh(self, mesh_name: str) -> MeshInfo:
        """Return the place of this rank in a mesh, ``prefix/name`` for a worker inside a fused one."""
        prefix, _, name = mesh_name.rpartition("/")
        worker = self.find(prefix)
        known = worker.get_dispatch_collect()["dispatch_dp_rank"]
        if name not in known:
            raise DispatchError(
                f"{type(worker).__name__} has no mesh {name!r} (registered: {', '.join(known) or 'none'}); call "
                "self._register_dispatch_collect_info before the first call"
            )
        return MeshInfo(worker._query_dispatch_info(name), worker._query_collect_info(name))

    def __getattr__(self, name: str) -> Any:
        if name == "hosted" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        if name == RAY_CALL:
            return self.call_with_worker
        return functools.partial(_unregistered, self, name)


def _method(path: str, is_async: bool, convert: bool) -> Callable[..., Any]:
    """Return a method that calls the hosted worker's."""
    if not is_async:

        def method(self: HostedWorker, /, *args: Any, **kwargs: Any) -> Any:
            return self.pass_on(path, convert, args, kwargs)

        return method

    async def async_method(self: HostedWorker, /, *args: Any, **kwargs: Any) -> Any:
        return await self.pass_on(path, convert, args, kwargs)

    return async_method


@register(dispatch_mode="one_to_all", mutates=True)
def _unregistered(self: HostedWorker, name: str, /, *args: Any, **kwargs: Any) -> Any:
    return self.pass_on(name, False, args, kwargs)


def attribute_of(path: str) -> str:
    """Return the name of the method for a path: the path, unless the name means something to a group."""
    return f"verl:{path}" if path.startswith("_") or hasattr(WorkerGroup, path) else path


def hosted_worker_class(
    name: str, methods: Mapping[str, tuple[Callable[..., Any], DispatchMode | None, bool]]
) -> type[HostedWorker]:
    """Return the class that hosts a worker of verl.

    Args:
        name: name of the class, for messages.
        methods: path → the registered method, the dispatch mode of rollcast that splits and joins its batches (None
            if functions of verl do), and True if the call waits for the result.
    """
    members: dict[str, Any] = {}
    for path, (function, mode, blocking) in methods.items():
        wrapped = _method(path, inspect.iscoroutinefunction(function), mode is not None)
        # verl's methods write to their arguments, so that each gets copies of its own.
        chosen = mode if mode is not None else "one_to_all"
        members[attribute_of(path)] = register(dispatch_mode=chosen, blocking=blocking, mutates=True)(wrapped)
    return type(name, (HostedWorker,), members)
