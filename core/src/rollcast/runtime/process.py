"""The worker's side of a runtime whose workers live in processes of their own."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollcast.controller.hosting import HostInfo, Outcome, Store, WorkerHost
from rollcast.controller.worker import WorkerContext
from rollcast.errors import WorkerError
from rollcast.plugins.inprocess import install_snapshot
from rollcast.runtime.control import ControlServer, Interrupted, Interruptible
from rollcast.runtime.device import use_device
from rollcast.runtime.visible_devices import local_device_index

__all__ = ["HostProcess"]


class HostProcess:
    """A :class:`WorkerHost`, and how its process is set up before anything of the user's is imported."""

    def __init__(self, store: Store | None = None) -> None:
        self.host = WorkerHost(store)
        self._main = Interruptible()
        self._control: ControlServer | None = None

    def introduce(self, node: str) -> HostInfo:
        """Where this process is; from now on it answers there while it is busy."""
        if self._control is None:
            self._control = ControlServer(node, {"interrupt": self._main.interrupt, "stack": self._main.stack})
        return replace(self.host.describe(node), control=self._control.address)

    def token(self) -> str:
        """The runtime's own name for the call that runs."""
        return ""

    def build(self, context: WorkerContext, env: Mapping[str, str], driver_path: list[str], blob: bytes) -> None:
        """Set up this process, then unpickle the classes: the order lets ``env`` reach their imports.

        Args:
            context: this rank's place.
            env: environment variables, over those of the context.
            driver_path: the driver's ``sys.path``; its folders that exist here are added.
            blob: pickle of the in-process parts and of the pickled roles.

        Raises:
            WorkerRaised: a constructor raised.
            ResourceError: ``env`` hides the device that the process was given.
        """
        os.environ.update({"OMP_NUM_THREADS": str(context.threads), **context.environment(), **env})
        sys.path.extend(entry for entry in driver_path if entry not in sys.path and Path(entry).exists())
        parts, roles = pickle.loads(blob)
        if parts is not None:
            install_snapshot(parts)
        if "torch" in sys.modules:
            import torch

            torch.set_num_threads(context.threads)
        index = self._device_index(context)
        use_device(index)
        self.host.build(replace(context, device_index=index), pickle.loads(roles))

    def accelerators(self) -> Mapping[str, Sequence[str]]:
        """Kind of accelerator → ids of those that the runtime gave this process."""
        return {}

    def _device_index(self, context: WorkerContext) -> int | None:
        for kind, ids in self.accelerators().items():
            if ids:
                return local_device_index(os.environ, ids, context.local_rank, kind)
        return None

    def install(self, parts: bytes | None) -> None:
        """Make the driver's in-process parts known here, in place of earlier ones."""
        install_snapshot(parts)

    def call(self, role: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], outcome: Outcome) -> Any:
        """Run a method, see :meth:`WorkerHost.call`, so that it can be interrupted.

        Raises:
            WorkerRaised: the method raised.
            WorkerError: the controller gave the call up.
        """
        try:
            with self._main.running(self.token()):
                return self.host.call(role, method, args, kwargs, outcome)
        except Interrupted:
            raise WorkerError(f"{role}.{method} was given up by the controller") from None

    def close(self) -> None:
        """Close the workers.

        Raises:
            WorkerRaised: a ``close()`` raised.
        """
        if self._control is not None:
            self._control.close()
            self._control = None
        self.host.close()
