"""Hold a composed configuration to the dataclass schemas of its sections."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rollcast.config.schemas import ConfigSchema, RootConfig
from rollcast.config.sources import flatten
from rollcast.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = [
    "active_schemas",
    "build_section",
    "check_key",
    "is_mapping_key",
    "nearest",
    "open_mapping",
    "origin_of",
    "validate",
]

S = TypeVar("S")
_ABSENT = object()
_TYPE_NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
_PLURALS = {int: "integers", float: "numbers", str: "strings", bool: "true or false"}


def nearest(word: str, options: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The option that looks most like ``word``, if one does by at least ``cutoff`` (from 0 to 1)."""
    found = difflib.get_close_matches(word, list(options), n=1, cutoff=cutoff)
    return found[0] if found else None


def active_schemas(schemas: Sequence[ConfigSchema], choices: Mapping[str, str]) -> list[ConfigSchema]:
    """The schemas that hold for the chosen options."""
    return [
        schema
        for schema in schemas
        if not schema.group
        or (choices.get(schema.group) not in (None, "None") and schema.option in ("", choices[schema.group]))
    ]


def _field_types(schema: type) -> dict[str, Any]:
    hints = typing.get_type_hints(schema)
    return {entry.name: hints[entry.name] for entry in dataclasses.fields(schema)}


def _known_keys(schemas: Sequence[ConfigSchema]) -> dict[str, Any]:
    """Dotted key → its annotated type, for every leaf and section."""
    known: dict[str, Any] = {}

    def add(path: str, schema: type) -> None:
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            known.setdefault(".".join(parts[:depth]), None)
        for name, kind in _field_types(schema).items():
            key = f"{path}.{name}" if path else name
            inner = _dataclass_in(kind)
            known[key] = kind
            if inner is not None:
                add(key, inner)

    for schema in schemas:
        add(schema.path, schema.schema)
    known |= _field_types(RootConfig)
    known.pop("", None)
    return known


def _dataclass_in(kind: Any) -> type | None:
    for option in typing.get_args(kind) or (kind,):
        if isinstance(option, type) and dataclasses.is_dataclass(option):
            return option
    return None


def _is_mapping(kind: Any) -> bool:
    origin = typing.get_origin(kind) or kind
    if origin in (types.UnionType, typing.Union):
        return any(_is_mapping(option) for option in typing.get_args(kind))
    return origin in (dict, Mapping, typing.Mapping)


def is_mapping_key(key: str, schemas: Sequence[ConfigSchema]) -> bool:
    """Whether the key is a mapping whose own keys are free, such as ``reward.reward_kwargs``."""
    return _is_mapping(_known_keys(schemas).get(key))


def open_mapping(key: str, schemas: Sequence[ConfigSchema]) -> bool:
    """Whether the key lies inside a mapping whose keys are free."""
    known = _known_keys(schemas)
    parts = key.split(".")
    return any(_is_mapping(known.get(".".join(parts[:depth]))) for depth in range(1, len(parts)))


def check_key(key: str, config: DictConfig, schemas: Sequence[ConfigSchema], origin: str) -> None:
    """Refuse a key that neither the schemas nor the composed files know.

    Raises:
        ConfigError: with the nearest valid key.
    """
    from omegaconf import OmegaConf

    known = _known_keys(schemas)
    if key in known or OmegaConf.select(config, key, default=None, throw_on_missing=False) is not None:
        return
    raise ConfigError(_unknown_key(key, known, origin))


def _suggest(key: str, known: Mapping[str, Any], siblings: Sequence[str]) -> str | None:
    """A very near sibling; else the same leaf in another section; else what is near at all."""
    section, _, leaf = key.rpartition(".")
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    for cutoff, elsewhere in ((0.75, same_leaf), (0.5, [] if siblings else list(known))):
        close = nearest(leaf, siblings, cutoff)
        if close:
            return f"{section}.{close}" if section else close
        if elsewhere:
            return nearest(key, elsewhere) or (elsewhere[0] if elsewhere is same_leaf else None)
    return None


def _unknown_key(key: str, known: Mapping[str, Any], origin: str) -> str:
    section = key.rpartition(".")[0]
    siblings = sorted(name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == section)
    candidate = _suggest(key, known, siblings)
    sentences = [f"{origin}: there is no key {key!r}" + (f"; did you mean {candidate!r}?" if candidate else ".")]
    if siblings:
        sentences.append(f"Keys of {section or 'the top level'}: {', '.join(siblings)}.")
    elif known.get(section) is not None:
        sentences.append(f"{section!r} is a value, not a section.")
    if "trainer" not in known:
        sentences.append("No trainer is chosen: most keys come with trainer=... or recipe=...")
    return " ".join(sentences)


def origin_of(key: str, origins: Mapping[str, str]) -> str:
    """The file or override that a key's value came from."""
    parts = key.split("[")[0].split(".")
    for depth in range(len(parts), 0, -1):
        if ".".join(parts[:depth]) in origins:
            return origins[".".join(parts[:depth])]
    below = [origin for name, origin in origins.items() if name.startswith(f"{key}.")]
    return below[-1] if below else "config"


def validate(
    config: DictConfig,
    schemas: Sequence[ConfigSchema],
    origins: dict[str, str],
    allow_missing: bool = False,
) -> None:
    """Check every key and value against the schemas.

    In place, interpolations are resolved, values take their schema's type, and keys that no file
    sets get their schema's default (and an entry in ``origins`` that says so).

    Raises:
        ConfigError: unknown key, wrong type, missing mandatory value, or an interpolation that
            does not resolve.
    """
    from omegaconf import OmegaConf

    _resolve(config, origins)
    known = _known_keys(schemas)
    _check_known(OmegaConf.to_container(config, throw_on_missing=False), "", known, origins)
    for schema in [ConfigSchema("", RootConfig), *schemas]:
        node = OmegaConf.select(config, schema.path) if schema.path else config
        if node is None:
            continue
        section = OmegaConf.to_container(_merge(schema.schema, node, schema.path, origins))
        default = f"default of {schema.schema.__module__}.{schema.schema.__qualname__}"
        for leaf in flatten(section, schema.path):
            if OmegaConf.select(config, leaf, default=_ABSENT, throw_on_missing=False) is _ABSENT:
                origins.setdefault(leaf, default)
        node.merge_with(section)
    missing = sorted(OmegaConf.missing_keys(config))
    if missing and not allow_missing:
        raise ConfigError(_unset(missing[0], origins))
    if not config.run_dir:
        raise ConfigError(f"{origin_of('run_dir', origins)}: run_dir is empty; give a folder to write into")


def _unset(key: str, origins: Mapping[str, str]) -> str:
    return f"{key} must be set; {origin_of(key, origins)} leaves it open: add {key}=... to the command"


def _resolve(config: DictConfig, origins: Mapping[str, str]) -> None:
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
            # The value that it refers to is reported as missing, once it is certain that nothing sets it.
            OmegaConf.update(config, key, "???")
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{origin_of(key, origins)}: {key}={raw}: {reason}") from error
    OmegaConf.resolve(config)


def _check_known(tree: Any, prefix: str, known: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    if not isinstance(tree, dict):
        return
    for name, value in tree.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        if key not in known:
            raise ConfigError(_unknown_key(key, known, origin_of(key, origins)))
        if not _is_mapping(known[key]):
            _check_known(value, key, known, origins)


def _merge(schema: type, node: Any, path: str, origins: Mapping[str, str]) -> DictConfig:
    """The schema's defaults under the section's own values; keys of other schemas are left out."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    fields = _field_types(schema)
    container = OmegaConf.to_container(node, throw_on_missing=False) if OmegaConf.is_config(node) else dict(node)
    own = {key: value for key, value in typing.cast("dict[str, Any]", container).items() if key in fields}
    try:
        merged = typing.cast("DictConfig", OmegaConf.merge(OmegaConf.structured(schema), own))
    except OmegaConfBaseException as error:
        name = _find_flat_section(schema, own) or str(getattr(error, "full_key", None) or getattr(error, "key", ""))
        key = f"{path}.{name}" if path else name
        raise ConfigError(_ill_typed(schema, name, own, key, str(error), origins)) from error
    for leaf, value in flatten(own).items():
        if value == "???":  # what a file leaves open stays open, whatever the schema's default
            OmegaConf.update(merged, leaf, value)
    return merged


def _ill_typed(
    schema: type, name: str, own: Mapping[str, Any], key: str, reason: str, origins: Mapping[str, str]
) -> str:
    """The message for a value that its section's schema refuses; ``name`` is its key within the section."""
    kind: Any = schema
    value: Any = own
    for step in name.split("[")[0].split("."):
        inner = _dataclass_in(kind)
        if inner is None:
            break
        kind = _field_types(inner).get(step)
        value = value.get(step) if isinstance(value, Mapping) else None
    where = origin_of(key, origins)
    if kind is None:
        return f"{where}: {key}: {reason.splitlines()[0]}"
    return f"{where}: {key} must be {_describe_type(kind)}, got {_show(value)}"


def _find_flat_section(schema: type, own: Mapping[str, Any]) -> str | None:
    """The key of a section that has a plain value in its place; OmegaConf's error would not name it."""
    for name, kind in _field_types(schema).items():
        inner, value = _dataclass_in(kind), own.get(name)
        if inner is None or value is None or value == "???":
            continue
        if not isinstance(value, Mapping):
            return name
        below = _find_flat_section(inner, value)
        if below is not None:
            return f"{name}.{below}"
    return None


def _show(value: Any) -> str:
    return "null" if value is None else repr(value)


def _describe_type(kind: Any) -> str:
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return f"a section with the keys {', '.join(_field_types(kind))}"
    arguments = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_describe_type(option) for option in arguments)
    if kind is type(None):
        return "null"
    if origin is list:
        inner = arguments[0] if arguments else Any
        return f"a list of {_PLURALS.get(inner, 'values')}"
    if _is_mapping(kind):
        return "a mapping"
    return _TYPE_NAMES.get(kind, str(getattr(kind, "__name__", kind)))


def build_section(schema: type[S], node: Any, path: str = "", origins: Mapping[str, str] | None = None) -> S:
    """A section of the config as an instance of its dataclass; keys of other schemas are left out.

    Raises:
        ConfigError: a value has the wrong type, or a mandatory one is missing; names the key, its
            origin and what it should be.
    """
    from omegaconf import OmegaConf

    merged = _merge(schema, node, path, origins or {})
    missing = sorted(OmegaConf.missing_keys(merged))
    if missing:
        raise ConfigError(_unset(f"{path}.{missing[0]}" if path else missing[0], origins or {}))
    return typing.cast("S", OmegaConf.to_object(merged))
