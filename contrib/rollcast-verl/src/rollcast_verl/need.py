"""Import of verl where a plugin needs it, with an error that says how to install verl."""

from __future__ import annotations

import importlib
from types import ModuleType

from rollcast.errors import CapabilityError

__all__ = ["need_verl"]


def need_verl(module: str, plugin: str) -> ModuleType:
    """Import a module of verl.

    Args:
        module: name of the module.
        plugin: plugin that needs it, for the error.

    Raises:
        CapabilityError: verl, or something that its module imports, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CapabilityError(
            f"{plugin} runs verl's own code, and {module} cannot be imported: {error}. Install verl 0.9 with "
            "rollcast-verl: pip install 'rollcast-verl[verl]', then pip install --no-deps verl==0.9.1"
        ) from error
