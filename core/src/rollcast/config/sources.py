"""Where configuration comes from: the packages that installed plugins announce, read as files."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollcast.config.schemas import ConfigSchema
from rollcast.errors import ConfigError
from rollcast.plugins.metadata import find_parts

__all__ = ["ConfigSource", "find_config_file", "find_sources", "flatten", "load_schemas", "register_search_path"]

logger = logging.getLogger(__name__)
GROUP = "rollcast.configs"
_state: dict[str, tuple[ConfigSource, ...]] = {"sources": ()}


@dataclass(frozen=True)
class ConfigSource:
    """A folder of YAML files: an installed package's, or a folder of the user's."""

    provider: str
    search_path: str
    folder: Path


def find_sources(config_dir: Path | None = None) -> tuple[ConfigSource, ...]:
    """The user's folder first, then every installed config package that can be located.

    Raises:
        ConfigError: ``config_dir`` is not a folder.
    """
    sources: list[ConfigSource] = []
    if config_dir is not None:
        if not config_dir.is_dir():
            raise ConfigError(f"--config-dir {config_dir} is not a folder")
        sources.append(ConfigSource("--config-dir", f"file://{config_dir.resolve()}", config_dir.resolve()))
    for part in find_parts(GROUP):
        try:
            module = importlib.import_module(part.value)
        except Exception as error:  # noqa: BLE001
            # One plugin's broken package must not stop a run that does not use it.
            logger.warning("config package %s of %s cannot be imported: %s", part.value, part.distribution, error)
            continue
        if module.__file__ is not None:
            sources.append(ConfigSource(part.distribution, f"pkg://{part.value}", Path(module.__file__).parent))
    return tuple(sources)


def load_schemas(sources: Sequence[ConfigSource]) -> list[ConfigSchema]:
    """The schemas that the sources announce; a user's folder announces none."""
    schemas: list[ConfigSchema] = []
    for source in sources:
        if source.search_path.startswith("pkg://"):
            module = importlib.import_module(source.search_path.removeprefix("pkg://"))
            schemas.extend(getattr(module, "SCHEMAS", ()))
    return schemas


def find_config_file(sources: Sequence[ConfigSource], config_path: str) -> tuple[ConfigSource, Path] | None:
    """The file that Hydra takes for ``group/option``: the first one on the search path."""
    for source in sources:
        file = source.folder / f"{config_path}.yaml"
        if file.is_file():
            return source, file
    return None


def register_search_path(sources: Sequence[ConfigSource]) -> None:
    """Let Hydra find the sources; later calls replace the list."""
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    if not _state["sources"]:

        class RollcastSearchPath(SearchPathPlugin):
            def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
                for source in reversed(_state["sources"]):
                    search_path.prepend(provider=source.provider, path=source.search_path)

        Plugins.instance().register(RollcastSearchPath)
    _state["sources"] = tuple(sources)


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key → leaf of nested mappings; empty mappings and lists are leaves."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree} if prefix else {}
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return leaves
