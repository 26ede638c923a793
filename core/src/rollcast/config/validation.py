"""Hold a composed configuration to the dataclass schemas of its sections."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rollcast.config.schemas import ConfigSchema, RootConfig
from rollcast.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["active_schemas", "build_section", "check_key", "nearest", "open_mapping", "validate"]

S = TypeVar("S")


def nearest(word: str, options: Iterable[str]) -> str | None:
    """The option that looks most like ``word``."""
    found = difflib.get_close_matches(word, list(options), n=1, cutoff=0.5)
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


def open_mapping(key: str, schemas: Sequence[ConfigSchema]) -> bool:
    """Whether the key lies inside a mapping whose keys are free, such as ``reward_kwargs``."""
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


def _unknown_key(key: str, known: Mapping[str, Any], origin: str) -> str:
    section, _, leaf = key.rpartition(".")
    siblings = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == section]
    close = nearest(leaf, siblings)
    candidate = f"{section}.{close}" if close and section else close or nearest(key, known)
    message = f"{origin}: there is no key {key!r}"
    if candidate:
        message += f"; did you mean {candidate!r}?"
    if siblings:
        message += f" Keys of {section or 'the top level'}: {', '.join(sorted(siblings))}"
    elif section and section not in known:
        message += f" (no installed and chosen plugin has a section {section!r})"
    return message


def _origin_of(key: str, origins: Mapping[str, str]) -> str:
    parts = key.split(".")
    for depth in range(len(parts), 0, -1):
        if ".".join(parts[:depth]) in origins:
            return origins[".".join(parts[:depth])]
    below = [origin for name, origin in origins.items() if name.startswith(f"{key}.")]
    return below[-1] if below else "config"


def validate(config: DictConfig, schemas: Sequence[ConfigSchema], origins: Mapping[str, str]) -> None:
    """Check every key and value against the schemas, and resolve interpolations in place.

    Raises:
        ConfigError: unknown key, wrong type, missing mandatory value, or an interpolation that
            does not resolve.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        OmegaConf.resolve(config)
    except OmegaConfBaseException as error:
        key = str(getattr(error, "full_key", "") or "")
        raise ConfigError(f"{_origin_of(key, origins)}: {key}: {str(error).splitlines()[0]}") from error
    known = _known_keys(schemas)
    _check_known(OmegaConf.to_container(config, throw_on_missing=False), "", known, origins)
    for schema in schemas:
        node = OmegaConf.select(config, schema.path)
        if node is not None:
            build_section(schema.schema, node, schema.path, origins)
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        key = missing[0]
        raise ConfigError(f"{key} must be set; {_origin_of(key, origins)} leaves it open: add {key}=... to the command")


def _check_known(tree: Any, prefix: str, known: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    if not isinstance(tree, dict):
        return
    for name, value in tree.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        if key not in known:
            raise ConfigError(_unknown_key(key, known, _origin_of(key, origins)))
        if not _is_mapping(known[key]):
            _check_known(value, key, known, origins)


def build_section(schema: type[S], node: Any, path: str = "", origins: Mapping[str, str] | None = None) -> S:
    """A section of the config as an instance of its dataclass; keys of other schemas are left out.

    Raises:
        ConfigError: a value has the wrong type; names the key, its origin and what it should be.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    fields = _field_types(schema)
    container = OmegaConf.to_container(node, throw_on_missing=False) if OmegaConf.is_config(node) else dict(node)
    own = {key: value for key, value in typing.cast("dict[str, Any]", container).items() if key in fields}
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), own)
    except OmegaConfBaseException as error:
        name = str(getattr(error, "full_key", None) or getattr(error, "key", "") or "")
        key = f"{path}.{name}" if path else name
        reason = str(getattr(error, "msg", None) or error).splitlines()[0]
        raise ConfigError(f"{_origin_of(key, origins or {})}: {key}: {reason}") from error
    if OmegaConf.missing_keys(merged):
        # A mandatory value that is still open is reported once, for the whole tree.
        return typing.cast("S", None)
    return typing.cast("S", OmegaConf.to_object(merged))
