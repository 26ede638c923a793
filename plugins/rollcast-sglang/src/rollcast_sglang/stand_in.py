"""Code that the stand-in packages for CPU machines share; imported only by SGLang's processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["stand_in"]


class _Missing(type):
    """The metaclass of stand-in names: they can be passed around and have attributes, but cannot be called."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{cls.__name__}.{name}", (), {})

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        raise NotImplementedError(f"{cls.__name__} is only a stand-in of rollcast-sglang for machines without a GPU")


class _Finder(MetaPathFinder, Loader):
    """Finder that finds every module below a package."""

    def __init__(self, package: str) -> None:
        self._prefix = f"{package}."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(self._prefix) else None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = _getattr_of(module.__name__)


def stand_in(package: str) -> Callable[[str], Any]:
    """Return a module-level ``__getattr__`` for a package whose submodules and names all exist but do nothing."""
    sys.meta_path.append(_Finder(package))
    return _getattr_of(package)


def _getattr_of(module: str) -> Callable[[str], Any]:
    def get(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{module}.{name}", (), {})

    return get
