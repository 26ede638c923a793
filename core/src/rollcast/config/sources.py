"""Sources of configuration: the config packages of installed plugins, and a folder of the user."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rollcast.contracts.config import ConfigSchema
from rollcast.errors import ConfigError
from rollcast.plugins import Registry
from rollcast.plugins.discovery import find_plugins, find_source

__all__ = [
    "ConfigSource",
    "Sources",
    "find_config_files",
    "find_options",
    "find_sources",
    "load_schemas",
    "register_search_path",
]

logger = logging.getLogger(__name__)


def _is_package(obj: object) -> str | None:
    return None if isinstance(obj, ModuleType) else f"is a {type(obj).__name__}, not a package"


def _find_bad_file(package: object) -> str | None:
    """Return a complaint about a file that cannot be read, or that another installed package ships too."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    file_of_package = getattr(package, "__file__", None)
    if file_of_package is None:
        return "has no __init__.py, which rollcast needs to find its files"
    folder = Path(file_of_package).parent
    sources = ((part, find_source(part)) for part in find_plugins(configs.group))
    others = [(part, source.parent) for part, source in sources if source is not None and source.parent != folder]
    for file in sorted(folder.rglob("*.yaml")):
        path = file.relative_to(folder)
        try:
            OmegaConf.load(file)
        except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
            return f"has {path}, which is not YAML: {' '.join(str(error).split())}"
        for part, other in others:
            if len(path.parts) > 1 and (other / path).is_file():
                chosen = f"{path.parent}={path.stem}"
                return f"has {path}, as {part} has: {chosen} is refused until one of them is renamed or uninstalled"
    return None


configs: Registry[ModuleType] = Registry(
    "rollcast.configs",
    _is_package,
    description="packages of YAML files on the configuration search path",
    probe=_find_bad_file,
)

_state: dict[str, tuple[ConfigSource, ...]] = {"sources": ()}


@dataclass(frozen=True)
class ConfigSource:
    """A folder of YAML files, in an installed package or of the user.

    Attributes:
        provider: Name of the distribution; ``--config-dir`` for the user's folder.
        package: Name of the package that contains the files; empty for the user's folder.
        folder: Path of the files.
    """

    provider: str
    package: str
    folder: Path

    @property
    def search_path(self) -> str:
        """The folder in Hydra's notation."""
        return f"pkg://{self.package}" if self.package else f"file://{self.folder}"

    def describe(self, config_path: str) -> str:
        """Return the name of a file of this source, for messages."""
        return f"{self.provider}: {config_path}.yaml" if self.package else str(self.folder / f"{config_path}.yaml")


@dataclass(frozen=True)
class Sources:
    """All readable sources in search order, and a line of text about each unreadable one."""

    found: tuple[ConfigSource, ...]
    broken: tuple[str, ...] = ()


def find_sources(config_dir: Path | None = None) -> Sources:
    """Return the user's folder, then every installed config package that can be located.

    A package that cannot be imported is logged and left out, because a run that does not use it must not fail.

    Raises:
        ConfigError: ``config_dir`` is not a folder.
    """
    sources: list[ConfigSource] = []
    broken: list[str] = []
    if config_dir is not None:
        if not config_dir.is_dir():
            raise ConfigError(f"--config-dir {config_dir} is not a folder")
        sources.append(ConfigSource("--config-dir", "", config_dir.resolve()))
    for part in find_plugins(configs.group):
        try:
            module = importlib.import_module(part.value)
            _check_schemas(module)
        except Exception as error:  # noqa: BLE001  # third-party packages may raise anything
            cause = f"{type(error).__name__}: {error}"
            broken.append(f"config package {part.value} of {part.owner} cannot be used: {cause}")
            logger.warning("%s", broken[-1])
            continue
        if module.__file__ is not None:
            sources.append(ConfigSource(part.distribution, part.value, Path(module.__file__).parent))
    return Sources(tuple(sources), tuple(broken))


def _check_schemas(module: Any) -> None:
    for entry in getattr(module, "SCHEMAS", ()):
        if not isinstance(entry, ConfigSchema):
            raise TypeError(f"SCHEMAS holds {entry!r}, which is not a ConfigSchema")


def load_schemas(sources: Sequence[ConfigSource]) -> list[ConfigSchema]:
    """Return the schemas that the sources declare; the user's folder declares none."""
    packages = [importlib.import_module(source.package) for source in sources if source.package]
    return [schema for package in packages for schema in getattr(package, "SCHEMAS", ())]


def find_config_files(sources: Sequence[ConfigSource], config_path: str) -> list[tuple[ConfigSource, Path]]:
    """Return every file for ``group/option`` in search order; Hydra uses the first."""
    files = [(source, source.folder / f"{config_path}.yaml") for source in sources]
    return [(source, file) for source, file in files if file.is_file()]


def find_options(group: str, config_dir: Path | None = None) -> list[str]:
    """Return the options of a config group, sorted."""
    sources = find_sources(config_dir).found
    return sorted({file.stem for source in sources for file in (source.folder / group).glob("*.yaml")})


def register_search_path(sources: Sequence[ConfigSource]) -> None:
    """Register the sources with Hydra's search path, replacing those of an earlier call."""
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
