"""A worker's place in its group, and worker classes with their constructor arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rollcast.contracts.storage import NodeCopy

__all__ = ["ClassWithInitArgs", "WorkerContext"]

W = TypeVar("W")


@dataclass(frozen=True)
class WorkerContext:
    """A worker's rank, node and devices within its group.

    Attributes:
        rank, world_size: rank in the whole group, and its number of ranks.
        local_rank, local_world_size: rank among the group's ranks on the same node, and their number.
        master_addr, master_port: rendezvous address of ``torch.distributed``.
        node: address of the node.
        group, role: names of the group and the role, for messages.
        threads: CPU threads that this process should use.
        device_index: index of this process's accelerator among the visible ones; None without an accelerator.
        device_id: id of the accelerator as used in visibility variables; empty without an accelerator.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    node: str = "localhost"
    group: str = "group"
    role: str = "worker"
    threads: int = 1
    device_index: int | None = None
    device_id: str = ""

    def environment(self) -> dict[str, str]:
        """Return the environment variables that ``torch.distributed`` reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


class ClassWithInitArgs(Generic[W]):
    """A worker class with its constructor arguments, to be instantiated in another process.

    Raises:
        TypeError: the arguments do not match the constructor, or ``cls`` is not a plain class, such as a class
            decorated with ``@ray.remote``.
    """

    def __init__(self, cls: type[W], *args: Any, **kwargs: Any) -> None:
        if not isinstance(cls, type) or getattr(cls, "__ray_actor_class__", None) is not None:
            raise TypeError(
                f"ClassWithInitArgs takes a plain worker class, not {cls!r:.100} of type {type(cls).__name__}; if it "
                "is decorated with @ray.remote, remove the decorator: the runtime makes the actors"
            )
        try:
            inspect.signature(cls).bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{cls.__name__}{inspect.signature(cls)} cannot be built: {error}") from None
        self.cls = cls
        self.args = args
        self.kwargs = kwargs
        self.env: dict[str, str] = {}
        self.runtime_env: dict[str, Any] = {}
        self.copies: tuple[NodeCopy, ...] = ()

    def with_options(
        self,
        *,
        env: Mapping[str, str] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        copies: Sequence[NodeCopy] = (),
    ) -> ClassWithInitArgs[W]:
        """Return a copy with options for the worker's process.

        Args:
            env: environment variables, which override those of the group.
            runtime_env: runtime environment as defined by Ray (``env_vars``, ``pip``, ``working_dir`` and others),
                which overrides that of the group. Its ``env_vars`` are set before the process starts.
            copies: files and folders that the worker's node needs a copy of before the worker is built.
        """
        copy = ClassWithInitArgs(self.cls, *self.args, **self.kwargs)
        copy.env = {**self.env, **(env or {})}
        copy.runtime_env = {**self.runtime_env, **(runtime_env or {})}
        copy.copies = (*self.copies, *copies)
        return copy

    def __call__(self) -> W:
        for copy in self.copies:
            copy.make()
        return self.cls(*self.args, **self.kwargs)

    def __repr__(self) -> str:
        return f"ClassWithInitArgs({self.cls.__name__})"
