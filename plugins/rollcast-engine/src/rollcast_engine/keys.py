"""Errors about an engine's keys, named by the config section of the role that the engine serves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rollcast.errors import ConfigError

__all__ = ["EngineKeyError", "naming_keys"]


class EngineKeyError(ConfigError):
    """A key of an engine asks for something that the model or the machine cannot do.

    Code that does not know the role raises it; :func:`naming_keys` puts the section before the key.

    Args:
        key: name of the key within the engine's section.
        problem: rest of the message, which completes "<key> …".
    """

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(key, problem)
        self.key = key
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.key} {self.problem}"


@contextmanager
def naming_keys(section: str) -> Iterator[None]:
    """Re-raise every :class:`EngineKeyError` of the block with the full path of its key.

    Args:
        section: config section of the role, such as ``critic``.

    Raises:
        ConfigError: a key was refused; the message begins with ``<section>.engine.<key>``.
    """
    try:
        yield
    except EngineKeyError as error:
        raise ConfigError(f"{section}.engine.{error}") from error
