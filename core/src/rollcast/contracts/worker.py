"""A worker's place in its group, and a worker class that is to be built elsewhere."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

__all__ = ["ClassWithInitArgs", "WorkerContext"]

W = TypeVar("W")


@dataclass(frozen=True)
class WorkerContext:
    """A worker's place in its group.

    Attributes:
        rank, world_size: in the whole group.
        local_rank, local_world_size: among the group's ranks on the same node.
        master_addr, master_port: rendezvous for ``torch.distributed``.
        node: address of the node.
        group, role: names, for messages.
        threads: CPU threads that this process should use.
        device_index: number of this process's accelerator among those that it sees; None without one.
        device_id: id of the accelerator as visibility variables write it; empty without one.
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
        """Return the variables that ``torch.distributed`` reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


class ClassWithInitArgs(Generic[W]):
    """A worker class with its constructor's arguments, to be built later in another process.

    Raises:
        TypeError: at once, if the arguments do not fit the constructor, or ``cls`` is no class, such as what
            ``@ray.remote`` makes of one.
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

    def with_options(
        self, *, env: Mapping[str, str] | None = None, runtime_env: Mapping[str, Any] | None = None
    ) -> ClassWithInitArgs[W]:
        """Return a copy that asks for options of the worker's process.

        Args:
            env: environment variables, over those of the group.
            runtime_env: runtime environment as Ray defines it, over that of the group: ``env_vars``, ``pip``,
                ``working_dir`` and the rest. Its ``env_vars`` are set before the process starts.
        """
        made = ClassWithInitArgs(self.cls, *self.args, **self.kwargs)
        made.env = {**self.env, **(env or {})}
        made.runtime_env = {**self.runtime_env, **(runtime_env or {})}
        return made

    def __call__(self) -> W:
        return self.cls(*self.args, **self.kwargs)

    def __repr__(self) -> str:
        return f"ClassWithInitArgs({self.cls.__name__})"
