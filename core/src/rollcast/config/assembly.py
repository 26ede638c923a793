"""Composition of a run's configuration from the files of installed plugins and the user's overrides."""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rollcast.config.overrides import REMOVED, Override, check_option, explain_option, parse_override, with_mappings
from rollcast.config.sections import BY_DEVICE, MISSING, Sections, find, option_of, origin_of, place_schemas
from rollcast.config.sources import (
    ConfigSource,
    Sources,
    find_config_files,
    find_options,
    find_sources,
    load_schemas,
    register_search_path,
)
from rollcast.contracts.config import flatten
from rollcast.contracts.device import configured_device
from rollcast.contracts.sections import PlacementConfig
from rollcast.errors import ConfigError
from rollcast.plugins import Registry
from rollcast.plugins.registry import find_registries

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["Composed", "compose", "registry_modules"]

logger = logging.getLogger(__name__)
#: Seconds after which the import of a plugin is reported; heavy libraries on a cold disk take half of that.
_SLOW_IMPORT_S = 60.0

_NO_GROUP = re.compile(r"(?:In '(?P<file>[^']+)': )?Could not override '(?P<group>[^'@]+)(?:@[^']*)?'")


@dataclass(frozen=True)
class Composed:
    """A resolved and validated configuration.

    Attributes:
        config: The whole tree, read-only.
        origins: Dotted key → file, override or default that set its value.
        choices: Config group → chosen option.
        sections: Schemas that apply.
    """

    config: DictConfig
    origins: dict[str, str]
    choices: dict[str, str]
    sections: Sections

    def load_plugins(self) -> None:
        """Import every plugin that the config names, to find a broken plugin before the run starts.

        Raises:
            PluginError: A plugin is missing, broken, or does not pass the check of its group; the cause is chained.
        """
        for registry, key, name in _find_named(self.config, self.sections):
            with _telling_if_slow(f"{key}={name}, the plugin of {registry.find(name)}"):
                registry.get(name, requested_by=f"{key} ({origin_of(key, self.origins)})")

    def by_device(self) -> dict[str, str]:
        """Return each key whose default the run's device decided, with the device and the reason."""
        keys = (key for key in flatten(self.plain()) if self.origins.get(key, "").startswith(BY_DEVICE))
        return {key: self.origins[key].removeprefix(BY_DEVICE) for key in keys}

    def plain(self) -> dict[str, Any]:
        """Return the tree as nested mutable mappings."""
        from omegaconf import OmegaConf

        tree: Any = OmegaConf.to_container(self.config, throw_on_missing=False)
        return dict(tree)


def compose(
    overrides: Sequence[str] = (),
    config_dir: Path | None = None,
    *,
    allow_missing: bool = False,
    needs_trainer: bool = False,
) -> Composed:
    """Compose, resolve and validate a configuration.

    Args:
        overrides: Hydra overrides, such as ``recipe=quickstart`` and ``trainer.seed=1``. ``~key`` resets a key to its
            default; ``mapping=FILE`` stands for the overrides in a file written by ``rollcast map --write``.
        config_dir: Folder of further config groups, searched first.
        allow_missing: True to leave unset mandatory values as ``???`` instead of raising an error.
        needs_trainer: True to reject a configuration without a trainer.

    Raises:
        ConfigError: An override cannot be parsed, names no existing option or key, or has an invalid value; names the
            file or override, the key and the nearest valid one.
        PluginNotFoundError: A key names a plugin that is not installed.
        PluginConflictError: A key names a plugin that two distributions claim.
    """
    from omegaconf import OmegaConf

    parsed = with_mappings([parse_override(text) for text in overrides])
    sources = find_sources(config_dir)
    schemas = load_schemas(sources.found)
    with _hydra(sources.found):
        chosen, values = _split(parsed, sources)
        group_texts = [override.text for override in chosen]
        texts = [*group_texts, *(override.hydra_text for override in values)]
        with _choice_resolver({}) as asked:
            composed, choices = _compose(texts, sources)
        if asked:  # a file depends on a choice, so the choices must be known before the file is read
            with _choice_resolver(choices):
                composed, choices = _compose(texts, sources)
        with _choice_resolver(choices):
            origins = _origins(sources.found, group_texts)
    _add_origins(origins, values)
    tree: Any = OmegaConf.to_container(composed, throw_on_missing=False)
    sections = place_schemas(schemas, choices, tree)
    _take_out_foreign(sections, tree, origins, chosen, values)
    sections.check_keys(tree, origins)
    _take_out_removed(tree)
    sections.fill(tree, origins, functools.cache(lambda: _device_of(tree)))
    tree = _resolve(OmegaConf.create(tree), origins)
    sections.validate(tree, origins, allow_missing)
    _check_options(sections, tree, origins, sources)
    if not tree["run_dir"]:
        raise ConfigError(f"{origin_of('run_dir', origins)}: run_dir is empty; give a folder to write into")
    config = OmegaConf.create(tree)
    OmegaConf.set_readonly(config, True)
    if needs_trainer and OmegaConf.select(config, "trainer.name") is None:
        raise ConfigError(_no_trainer(config_dir))
    for registry, key, name in _find_named(config, sections):  # from metadata alone
        registry.find(name, requested_by=f"{key} ({origin_of(key, origins)})")
    return Composed(config, origins, choices, sections)


@contextmanager
def _telling_if_slow(what: str) -> Iterator[None]:
    """Warn if the block takes long: an import that hangs says nothing by itself."""
    timer = threading.Timer(
        _SLOW_IMPORT_S,
        logger.warning,
        (
            "importing %s has taken %g seconds so far; if it hangs, end this command and fix or uninstall the plugin: "
            "rollcast plugins --check imports each one with a time limit",
            what,
            _SLOW_IMPORT_S,
        ),
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def registry_modules() -> tuple[str, ...]:
    """Return the core's modules that declare registries; importing them imports no plugin."""
    import rollcast.contracts

    contracts = (f"rollcast.contracts.{module.name}" for module in pkgutil.iter_modules(rollcast.contracts.__path__))
    return (*contracts, "rollcast.config.sources")


def _find_named(config: DictConfig, sections: Sections) -> Iterator[tuple[Registry[Any], str, str]]:
    """Yield registry, dotted key and name of every plugin that the config names with a registry's key.

    A key such as ``actor.engine.name`` is also read in the sections that are declared to be like ``actor.engine``.
    """
    from omegaconf import OmegaConf

    for module in registry_modules():
        importlib.import_module(module)
    likes = {section.path: section.hosts.like for section in sections.placed if section.hosts and section.hosts.like}
    for registry in find_registries():
        also = (f"{path}.name" for path, like in likes.items() if f"{like}.name" in registry.config_keys)
        for key in (*registry.config_keys, *also):
            value = OmegaConf.select(config, key, throw_on_missing=False)
            names = [value] if isinstance(value, str) else list(value) if OmegaConf.is_list(value) else []
            for name in names:
                yield registry, key, name


def _no_trainer(config_dir: Path | None) -> str:
    recipes, trainers = (", ".join(find_options(group, config_dir)) for group in ("recipe", "trainer"))
    return (
        "no trainer is chosen: give recipe=... or trainer=...\n"
        f"recipes: {recipes or 'none (install a plugin that has some, or give --config-dir)'}\n"
        f"trainers: {trainers or 'none (pip install rollcast-trainer)'}"
    )


def _add_origins(origins: dict[str, str], values: Sequence[Override]) -> None:
    for override in values:
        # An override may set a whole section as one mapping.
        leaves = flatten({override.key: override.value}) if override.value != {} else {}
        if override.deletes:
            for key in [key for key in origins if f"{key}.".startswith(f"{override.key}.")]:
                del origins[key]
        origins |= dict.fromkeys(leaves, override.origin)


def _take_out_foreign(
    sections: Sections,
    tree: dict[str, Any],
    origins: dict[str, str],
    chosen: Sequence[Override],
    values: Sequence[Override],
) -> None:
    """Take out keys that a recipe sets for its own engine or rollout where the user chose another, and say so."""
    typed = {key for value in values for key in flatten({value.key: value.value}) if not value.deletes}
    notes: dict[tuple[str, str], list[str]] = {}
    for key in sections.take_out_foreign(tree, {override.key for override in chosen}, typed):
        path, group = sections.foreign[key]
        option = sections.options.get(path) or next(
            (override.value for override in chosen if override.key == group), ""
        )
        notes.setdefault((origin_of(key, origins), f"{group}={option}"), []).append(key)
        for name in [name for name in origins if f"{name}.".startswith(f"{key}.")]:
            del origins[name]
    for (origin, choice), keys in notes.items():
        logger.info("left out %s of %s: %s has no such key", ", ".join(keys), origin, choice)


def _check_options(sections: Sections, tree: Mapping[str, Any], origins: Mapping[str, str], sources: Sources) -> None:
    """Refuse a key that names an option of a config group which no installed package has."""
    # Not the user's folder: who reads the option later may not know of it.
    installed = [source for source in sources.found if source.package]
    for key, kind in sections.known().items():
        mark, value = option_of(kind), find(tree, key)
        if mark is None or value in (None, MISSING) or find_config_files(installed, f"{mark.group}/{value}"):
            continue
        options = sorted({file.stem for source in installed for file in (source.folder / mark.group).glob("*.yaml")})
        where = f"{origin_of(key, origins)}: {key}: "
        raise ConfigError(explain_option(mark.group, value, options, sources.broken, where))


def _device_of(tree: Mapping[str, Any]) -> str:
    """Return the kind of device of a run whose placement may not be filled in yet."""
    from omegaconf import OmegaConf

    named = OmegaConf.select(OmegaConf.create(dict(tree)), "placement.device")
    return configured_device(str(named or PlacementConfig.device))


def _take_out_removed(tree: dict[str, Any]) -> None:
    for key, value in list(tree.items()):
        if value == REMOVED:
            del tree[key]
        elif isinstance(value, dict):
            _take_out_removed(value)


def _resolve(config: DictConfig, origins: Mapping[str, str]) -> dict[str, Any]:
    """Return the tree with every interpolation resolved."""
    from omegaconf import OmegaConf
    from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

    for key, raw in flatten(OmegaConf.to_container(config)).items():
        if "${" not in str(raw):
            continue
        try:
            value = OmegaConf.select(config, key)
            if OmegaConf.is_config(value):
                OmegaConf.to_container(value, resolve=True)
        except InterpolationToMissingValueError:
            # A missing value that an interpolation refers to is reported later, when all values are known.
            OmegaConf.update(config, key, "???")
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{origin_of(key, origins)}: {key}={raw}: {reason}") from error
    return cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True, throw_on_missing=False))


@contextmanager
def _hydra(sources: Sequence[ConfigSource]) -> Iterator[None]:
    """Initialize Hydra with the sources; afterwards, restore the Hydra state of the calling application."""
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    register_search_path(sources)
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("rollcast.config.conf", version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = outer


@contextmanager
def _choice_resolver(choices: Mapping[str, str]) -> Iterator[set[str]]:
    """Register the resolver ``${choice:engine}`` for a group's choice in defaults lists; yield the groups requested.

    Hydra's own ``${engine}`` resolves only groups that precede it, which excludes the groups of a recipe's trainer.
    """
    from omegaconf import OmegaConf

    asked: set[str] = set()

    def choice(group: str) -> str:
        asked.add(group)
        return choices.get(group, "none")

    OmegaConf.register_new_resolver("choice", choice, replace=True)
    try:
        yield asked
    finally:
        OmegaConf.clear_resolver("choice")


def _split(overrides: Sequence[Override], sources: Sources) -> tuple[list[Override], list[Override]]:
    """Divide overrides into choices of a config group's option and values of keys."""
    from hydra.core.global_hydra import GlobalHydra

    loader = GlobalHydra.instance().config_loader()
    groups = [name for name in loader.list_groups("") if name != "hydra"]
    chosen: list[Override] = []
    values: list[Override] = []
    for override in overrides:
        # ``trainer={seed: 1}`` sets keys of the section with the group's name.
        if override.key in groups and not isinstance(override.value, dict):
            check_option(override, loader.get_group_options(override.key), sources.broken)
            chosen.append(override)
        elif override.packaged:
            raise ConfigError(f"{override.origin}: {override.key!r} is not a config group that something chosen has")
        else:
            values.append(override)
    return chosen, values


def _compose(overrides: Sequence[str], sources: Sources) -> tuple[DictConfig, dict[str, str]]:
    from hydra import compose as hydra_compose
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        config = hydra_compose("config", list(overrides), return_hydra_config=True)
        choices = {str(k): str(v) for k, v in config.hydra.runtime.choices.items() if not str(k).startswith("hydra/")}
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain_hydra(error, overrides, sources)) from error
    except YAMLError as error:
        raise ConfigError(f"a configuration file is not YAML: {' '.join(str(error).split())}") from error
    OmegaConf.set_struct(config, False)
    del config["hydra"]
    return config, choices


def _explain_hydra(error: Exception, overrides: Sequence[str], sources: Sources) -> str:
    text = str(error).strip()
    file = re.match(r"In '([^']+)':", text)
    where = f"{_describe(file[1], sources.found)}: " if file else ""
    missing = getattr(error, "missing_cfg_file", None)
    if isinstance(missing, str) and "/" in missing:
        group, option = missing.rsplit("/", 1)
        if file and file[1] == "config":
            where = _find_chooser(option, overrides, sources.found)
        return explain_option(group, option, list(getattr(error, "options", None) or ()), sources.broken, where)
    unmatched = _NO_GROUP.match(text)
    if unmatched and unmatched["file"]:
        return (
            f"{where}it chooses an option of the group {unmatched['group']!r}, which nothing else that was chosen has "
            f"({', '.join(overrides)}): do these choices belong together?"
        )
    if unmatched:
        return (
            f"the group {unmatched['group']!r} is part of nothing that was chosen ({', '.join(overrides)}); "
            "choose a recipe=... or a trainer=... that has it"
        )
    return f"the configuration cannot be composed: {text}"


def _find_chooser(option: str, overrides: Sequence[str], sources: Sequence[ConfigSource]) -> str:
    """Return the chosen file that overrides the base's choice, because Hydra's error names the base instead."""
    for override in overrides:
        path = override.replace("=", "/")
        for source, file in find_config_files(sources, path)[:1]:
            if re.search(rf":\s*{re.escape(option)}\s*$", file.read_text(encoding="utf-8"), re.MULTILINE):
                return f"{source.describe(path)}: "
    return ""


def _describe(config_path: str, sources: Sequence[ConfigSource]) -> str:
    files = find_config_files(sources, config_path)
    return files[0][0].describe(config_path) if files else f"{config_path}.yaml"


def _origins(sources: Sequence[ConfigSource], overrides: Sequence[str]) -> dict[str, str]:
    """Return for each dotted key the last file that sets it, in Hydra's merge order.

    Raises:
        ConfigError: Two installed distributions provide the same chosen file.
    """
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    defaults = GlobalHydra.instance().config_loader().compute_defaults_list("config", list(overrides), RunMode.RUN)
    origins: dict[str, str] = {}
    for entry in defaults.defaults:
        path = entry.config_path
        if path is None or path.startswith("hydra/"):
            continue
        files = find_config_files(sources, path)
        if not files:
            continue
        source, file = files[0]
        _check_claims(path, files)
        tree = OmegaConf.to_container(OmegaConf.load(file))
        if isinstance(tree, dict):
            tree.pop("defaults", None)
            leaves: Mapping[str, Any] = flatten(tree, entry.package or "")
            origins |= dict.fromkeys(leaves, source.describe(path))
    return origins


def _check_claims(path: str, files: Sequence[tuple[ConfigSource, Path]]) -> None:
    """Reject a file provided by two installed distributions; a file in the user's folder may replace it."""
    owners = [source.provider for source, _ in files]
    if files[0][0].package and len(files) > 1:
        raise ConfigError(
            f"{path.replace('/', '=')} is provided by {' and by '.join(owners)}: uninstall one of them, "
            f"or put a {path}.yaml into a folder of your own and give it as --config-dir"
        )
