"""Public names of a package that resolve on first use, so that importing the package costs next to nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["lazy_exports"]


def lazy_exports(
    package: str, exports: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package.

    Type checkers and editors read the same names from imports under ``TYPE_CHECKING``::

        if TYPE_CHECKING:
            from my_package.engine import Engine as Engine

        __getattr__, __dir__, __all__ = lazy_exports(__name__, {"engine": ["Engine"]})

    Args:
        package: ``__name__`` of the package.
        exports: module to the names it defines; a module is relative to the package unless it
            begins with the package's top-level name, as ``rollcast.errors`` does in ``rollcast``.
    """
    root = package.partition(".")[0]
    homes = {
        name: module if module.split(".")[0] == root else f"{package}.{module}"
        for module, names in exports.items()
        for name in names
    }
    names = sorted(homes)

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it exports {', '.join(names)}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *names}), names
