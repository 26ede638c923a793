"""Functions of the user, named by ``file.py:function`` or ``module:function`` in the config."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rollcast.contracts.storage import explain_local, is_url
from rollcast.errors import ConfigError

__all__ = ["FORM", "UserFunction", "find_function"]

FORM = "'file.py:function' or 'module:function'"


class UserFunction:
    """A callable of the user and its place.

    Attributes:
        path: absolute path of the file or name of the module, a colon, and the function's name; it finds the same
            function in another process.
        name: the function's own name.
        label: file or module, and name, for messages.
        call: the callable.
    """

    def __init__(self, path: str, name: str, label: str, call: Callable[..., Any]) -> None:
        self.path, self.name, self.label, self.call = path, name, label, call


def find_function(path: str, key: str) -> UserFunction:
    """Import the file or module that ``path`` names and return its function.

    Args:
        path: ``file.py:function``, relative to the working directory or absolute, or ``module:function``.
        key: key of the config that holds the path, for messages.

    Raises:
        ConfigError: the file or module does not exist or cannot be imported, or has no such function.
    """
    text, separator, name = str(path).rpartition(":")
    if not separator or not text or not name.isidentifier():
        raise ConfigError(f"{key} is {path!r}; it has to be {FORM}")
    if _is_module_name(text):
        module, place = _import_module(text, key), text
        label = f"{text}:{name}"
    else:
        file = _existing(text, key)
        module, place = _import_file(file, key), str(file)
        label = f"{file.name}:{name}"
    return UserFunction(f"{place}:{name}", name, label, _attribute(module, place, name, key))


def _is_module_name(text: str) -> bool:
    """Return True for ``package.module``; a name that ends with ``.py`` or exists as a file is a file."""
    return (
        all(part.isidentifier() for part in text.split(".")) and not text.endswith(".py") and not Path(text).is_file()
    )


def _existing(text: str, key: str) -> Path:
    if is_url(text):
        raise ConfigError(explain_local(key, text))
    file = Path(text).expanduser().absolute()
    if not file.is_file():
        folder = file.parent
        names = sorted(path.name for path in folder.glob("*.py")) if folder.is_dir() else []
        near = difflib.get_close_matches(file.name, names, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else f"; Python files there: {', '.join(names) or 'none'}"
        raise ConfigError(f"{key}: {file} does not exist{hint}")
    return file


def _import_module(name: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError) and name.split(".")[0] == error.name
        hint = f"; it is no installed module, and a file is named with its ending, {name}.py" if missing else ""
        raise ConfigError(f"{key}: the module {name} does not import: {type(error).__name__}: {error}{hint}") from error


def _import_file(file: Path, key: str) -> ModuleType:
    # A unique module name, so that a file json.py hides no module and two files of one name differ.
    name = f"_rollcast_reward_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{key}: {file} is not a Python file (its name does not end with .py)")
    module = importlib.util.module_from_spec(spec)
    previous = sys.modules.get(name)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(name)
        if previous is not None:
            sys.modules[name] = previous
        raise ConfigError(f"{key}: {file} does not import: {type(error).__name__}: {error}") from error
    return module


def _attribute(module: ModuleType, place: str, name: str, key: str) -> Callable[..., Any]:
    if not hasattr(module, name):
        functions = sorted(
            variable
            for variable, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not variable.startswith("_")
        )
        raise ConfigError(f"{key}: {place} has no {name!r}; its functions: {', '.join(functions) or 'none'}")
    function = getattr(module, name)
    if not callable(function):
        raise ConfigError(f"{key}: {name!r} in {place} is of type {type(function).__name__} and cannot be called")
    checked: Callable[..., Any] = function
    return checked
