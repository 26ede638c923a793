"""The log level of all processes of a run: the environment variable ``ROLLCAST_LOGGING_LEVEL``."""

from __future__ import annotations

import logging
import os

from rollcast.errors import ConfigError
from rollcast.plugins.discovery import find_groups, find_plugins

__all__ = ["LOG_LEVEL_VARIABLE", "log_environment", "set_log_level"]

#: Name of the variable, which the driver passes on to workers.
LOG_LEVEL_VARIABLE = "ROLLCAST_LOGGING_LEVEL"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def log_environment() -> dict[str, str]:
    """Return the variable as other processes of the run need it; nothing if it is unset here."""
    value = os.environ.get(LOG_LEVEL_VARIABLE)
    return {} if value is None else {LOG_LEVEL_VARIABLE: value}


def set_log_level(default: int | None = None, others: int = logging.WARNING) -> None:
    """Log messages of rollcast's packages from the level of the variable on, and of others from ``others`` on.

    A root logger without a handler gets one that writes to standard error.

    Args:
        default: level if the variable is unset; None leaves the process as it is.
        others: least level of messages of other libraries; the level of the variable counts too if it is higher.

    Raises:
        ConfigError: the variable names no level.
    """
    level = _named_level() or default
    if level is None:
        return
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger().setLevel(max(level, others))
    packages = {part.module.split(".")[0] for group in find_groups() for part in find_plugins(group)}
    for package in {"rollcast", *packages}:
        if package.startswith("rollcast"):
            logging.getLogger(package).setLevel(level)


def _named_level() -> int | None:
    """Return the level that the variable names, such as ``logging.DEBUG``; None if it is unset or empty."""
    value = os.environ.get(LOG_LEVEL_VARIABLE, "")
    name = value.strip().upper()
    if name and name not in _LEVELS:
        raise ConfigError(
            f"the environment variable {LOG_LEVEL_VARIABLE} is {value!r}; it has to be "
            f"{', '.join(_LEVELS[:-1])} or {_LEVELS[-1]}"
        )
    return logging.getLevelNamesMapping()[name] if name else None
