"""Logging of the command line, the only place that sets any."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from rollcast.plugins.discovery import find_groups, find_plugins

__all__ = ["set_up_logging"]


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what ``sys.stderr`` is at the moment: a live display replaces it while it runs."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        raise AttributeError("this handler always writes to sys.stderr")


class _PlainFormatter(logging.Formatter):
    """The message; from warnings upwards with the level in front."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the name is logging's
        if record.levelno < logging.WARNING:
            return record.message
        return f"{record.levelname.lower()}: {record.message}"


def set_up_logging() -> None:
    """Show rollcast's own messages from INFO upwards, and everybody else's from WARNING upwards."""
    root = logging.getLogger()
    if any(isinstance(handler, _StderrHandler) for handler in root.handlers):
        return
    handler = _StderrHandler()
    handler.setFormatter(_PlainFormatter())
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    packages = {part.module.split(".")[0] for group in find_groups() for part in find_plugins(group)}
    for package in {"rollcast", *packages}:
        if package.startswith("rollcast"):
            logging.getLogger(package).setLevel(logging.INFO)
