"""Compose a run's configuration from the installed plugins' files and a person's overrides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcast.config.schemas import ConfigSchema
from rollcast.config.sources import (
    ConfigSource,
    find_config_file,
    find_sources,
    flatten,
    load_schemas,
    register_search_path,
)
from rollcast.config.validation import active_schemas, check_key, nearest, open_mapping, validate
from rollcast.errors import ConfigError
from rollcast.plugins.groups import find_provider

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["Composed", "compose"]

#: Config group → the registry group whose parts its options name.
_PART_GROUPS = {
    "engine": "rollcast.engines",
    "rollout": "rollcast.rollouts",
    "trainer": "rollcast.trainers",
    "runtime": "rollcast.runtimes",
    "algorithm": "rollcast.advantages",
    "reward": "rollcast.rewards",
    "data": "rollcast.datasets",
}


@dataclass(frozen=True)
class Composed:
    """A resolved configuration.

    Attributes:
        config: the whole tree, validated.
        origins: dotted key → the file or override that its value came from.
        choices: config group → chosen option.
        schemas: the schemas in force.
    """

    config: DictConfig
    origins: dict[str, str]
    choices: dict[str, str]
    schemas: list[ConfigSchema] = field(default_factory=list)


def compose(overrides: Sequence[str] = (), config_dir: Path | None = None) -> Composed:
    """Compose, resolve and validate.

    Args:
        overrides: Hydra overrides, such as ``recipe=quickstart`` and ``trainer.seed=1``.
        config_dir: a folder of further config groups, searched first.

    Raises:
        ConfigError: an override cannot be read, names no option or key, or a value has the wrong
            type; the message names the file or override, the key and the nearest valid one.
    """
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    sources = find_sources(config_dir)
    schemas = load_schemas(sources)
    register_search_path(sources)
    GlobalHydra.instance().clear()
    with initialize_config_module("rollcast.config.conf", version_base="1.3"):
        group_overrides, value_overrides = _split_overrides(overrides)
        base, choices = _compose(group_overrides)
        active = active_schemas(schemas, choices)
        prepared = [_prepare(text, key, base, active) for text, key in value_overrides]
        config, choices = _compose([*group_overrides, *prepared])
        origins = _origins(sources, group_overrides)
    for text, key in value_overrides:
        origins[key] = f"override {text!r}"
    validate(config, active, origins)
    return Composed(config, origins, choices, active)


def _split_overrides(overrides: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Overrides that choose an option of a config group, and those that set a value (with its key)."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.plugins import Plugins  # noqa: F401  # the parser needs the plugin system loaded
    from hydra.errors import HydraException

    loader = GlobalHydra.instance().config_loader()
    groups = [name for name in loader.list_groups("") if name != "hydra"]
    chosen: list[str] = []
    values: list[tuple[str, str]] = []
    for text in overrides:
        try:
            parsed = OverridesParser.create().parse_override(text)
        except HydraException as error:
            raise ConfigError(f"override {text!r} cannot be read: {error}; write key=value") from error
        key = parsed.key_or_group
        option = parsed.value()
        if key in groups and (isinstance(option, str) or option is None):
            options = loader.get_group_options(key)
            if option is not None and option not in options:
                raise ConfigError(_unknown_option(key, option, options))
            chosen.append(text)
        else:
            values.append((text, key))
    return chosen, values


def _unknown_option(group: str, option: str, options: Sequence[str]) -> str:
    message = f"{group}={option}: no installed plugin provides it; installed: {', '.join(options) or 'none'}"
    close = nearest(option, options)
    if close:
        message += f"; did you mean {group}={close}?"
    provider = find_provider(_PART_GROUPS[group], option) if group in _PART_GROUPS else None
    if provider:
        message += f"; to add it: pip install {provider}"
    return message


def _compose(overrides: Sequence[str]) -> tuple[DictConfig, dict[str, str]]:
    from hydra import compose as hydra_compose
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        config = hydra_compose("config", list(overrides), return_hydra_config=True)
        choices = {str(k): str(v) for k, v in config.hydra.runtime.choices.items() if not str(k).startswith("hydra/")}
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain_hydra(error)) from error
    OmegaConf.set_struct(config, False)
    del config["hydra"]
    return config, choices


def _explain_hydra(error: Exception) -> str:
    text = str(error).strip()
    missing = getattr(error, "missing_cfg_file", None)
    if isinstance(missing, str) and "/" in missing:
        group, option = missing.split("/", 1)
        return _unknown_option(group, option, list(getattr(error, "options", None) or ()))
    return f"the configuration cannot be composed: {text}"


def _prepare(text: str, key: str, base: DictConfig, schemas: Sequence[ConfigSchema]) -> str:
    """Check an override's key; a key inside a free-form mapping is added rather than replaced."""
    if text.startswith(("+", "~")) or open_mapping(key, schemas):
        return text if text.startswith(("+", "~")) else f"++{text}"
    check_key(key, base, schemas, f"override {text!r}")
    return text


def _origins(sources: Sequence[ConfigSource], overrides: Sequence[str]) -> dict[str, str]:
    """For each dotted key the last file that sets it, in the order in which Hydra merges them."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    defaults = GlobalHydra.instance().config_loader().compute_defaults_list("config", list(overrides), RunMode.RUN)
    origins: dict[str, str] = {}
    for entry in defaults.defaults:
        path = entry.config_path
        if path is None or path.startswith("hydra/"):
            continue
        found = find_config_file(sources, path)
        if found is None:
            continue
        source, file = found
        tree = OmegaConf.to_container(OmegaConf.load(file))
        if isinstance(tree, dict):
            tree.pop("defaults", None)
            leaves: dict[str, Any] = flatten(tree, entry.package or "")
            origins |= dict.fromkeys(leaves, f"{source.provider}: {path}.yaml")
    return origins
