"""Lazy exports: public names of a package that are imported on first use, so that importing the package is cheap."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["lazy_exports"]


def lazy_exports(
    package: str, exports: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Build ``__getattr__``, ``__dir__`` and ``__all__`` of a package.

    For type checkers and editors, import the same names under ``TYPE_CHECKING``::

        if TYPE_CHECKING:
            from my_package.engine import Engine as Engine

        __getattr__, __dir__, __all__ = lazy_exports(__name__, {"engine": ["Engine"]})

    Args:
        package: ``__name__`` of the package.
        exports: module → names that it defines. A module is relative to the package unless it starts with the
            package's top-level name, such as ``rollcast.errors`` in ``rollcast``.
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
