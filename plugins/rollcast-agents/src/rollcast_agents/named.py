"""Loading the user's objects that the config names by file or module."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from rollcast.contracts.storage import explain_local, is_url
from rollcast.errors import ConfigError

__all__ = ["load_named"]


def load_named(path: str, key: str) -> Any:
    """Return the object named ``file.py:name`` or ``module:name``.

    Args:
        path: name of the object; the path of a file is absolute or relative to the working directory.
        key: config key, for messages.

    Raises:
        ConfigError: there is no such object, or it is not callable.
    """
    where, _, name = path.rpartition(":")
    if not where or not name:
        raise ConfigError(f"{key}={path} is not the name of an object; write file.py:function or module:function")
    if is_url(where):
        raise ConfigError(explain_local(key, path))
    try:
        module = _import_file(Path(where).resolve()) if where.endswith(".py") else importlib.import_module(where)
        attribute = getattr(module, name)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise ConfigError(f"{key}={path} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(attribute):
        raise ConfigError(f"{key}={path} is a {type(attribute).__name__}, which cannot be called")
    return attribute


@functools.cache
def _import_file(file: Path) -> ModuleType:
    number = hashlib.sha256(str(file).encode()).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"rollcast_agents_user_{file.stem}_{number}", file)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(file)
    module = importlib.util.module_from_spec(spec)
    # Type hints of the module's functions are resolved through sys.modules.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
