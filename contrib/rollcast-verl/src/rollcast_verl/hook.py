"""The import hook: ``import rollcast_verl.hook`` puts verl's worker groups on rollcast.

Import this module before ``verl.single_controller``. Afterwards ``verl.single_controller.ray`` has the worker groups
and resource pools of :mod:`rollcast_verl.controller`. verl's declarations (``Worker``, ``register``, ``Dispatch``,
``Execute`` and the dispatch functions) stay verl's own classes; rollcast reads them. Workers install the hook by
themselves.

verl also gets a platform ``cpu`` (``VERL_PLATFORM=cpu``), with the backend gloo, for machines without an accelerator.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType

__all__ = ["CONTROLLER", "PLATFORMS"]

CONTROLLER = "verl.single_controller.ray.base"
PLATFORMS = "verl.plugin.platform.platform_manager"


class _ControllerLoader(Loader):
    """A loader that fills verl's module with the names of :mod:`rollcast_verl.controller`."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        importlib.import_module("rollcast_verl.batches").install_meta_rule()
        ours = importlib.import_module("rollcast_verl.controller")
        vars(module).update({name: getattr(ours, name) for name in ours.__all__})


class _PlatformLoader(Loader):
    """A loader that runs verl's module of platforms and registers the platform ``cpu``."""

    def __init__(self, theirs: Loader) -> None:
        self._theirs = theirs

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._theirs.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._theirs.exec_module(module)
        from rollcast_verl.platform import make_platform

        module.PlatformRegistry.register("cpu")(make_platform(module.PlatformBase))


class _Finder(MetaPathFinder):
    """A finder of the two modules that the hook replaces or completes."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == CONTROLLER:
            return importlib.machinery.ModuleSpec(fullname, _ControllerLoader(), origin="rollcast_verl.controller")
        if fullname == PLATFORMS:
            spec = importlib.machinery.PathFinder.find_spec(fullname, path)
            if spec is not None and spec.loader is not None:
                spec.loader = _PlatformLoader(spec.loader)
            return spec
        return None


def _install() -> None:
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if CONTROLLER in sys.modules:
        raise ImportError(
            f"{CONTROLLER} is imported already, with verl's own worker groups: import rollcast_verl.hook before it, or "
            "start the script with `python -m rollcast_verl.run SCRIPT`"
        )
    sys.meta_path.insert(0, _Finder())


_install()
