"""Sections of a composed config tree and their schemas: known keys, defaults, validation and error messages."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from rollcast.contracts.config import (
    ConfigSchema,
    Ge,
    Gt,
    Hosts,
    Le,
    Len,
    LocalPath,
    Lt,
    OnAccelerator,
    OnThisMachine,
    OptionOf,
    OrInfinity,
    config,
    field_docs,
    flatten,
)
from rollcast.contracts.device import CPU
from rollcast.contracts.storage import explain_local, is_url
from rollcast.errors import ConfigError

__all__ = [
    "BY_DEVICE",
    "RootConfig",
    "Section",
    "Sections",
    "build_section",
    "declarations",
    "nearest",
    "option_of",
    "origin_of",
    "place_schemas",
    "unknown_key",
    "validate_section",
]

S = TypeVar("S")
MISSING = "???"
#: Start of the origin of a value that the run's device decided.
BY_DEVICE = "default on "
_TYPE_NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
_PLURALS = {int: "integers", float: "numbers", str: "strings", bool: "true or false"}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


@config
class RootConfig:
    """Keys at the top level of the config."""

    run_dir: LocalPath = "runs/run"
    """Folder for all files that the run writes; no URL."""
    trackers: list[str] = field(default_factory=list)
    """Registry names of the trackers."""
    tracker_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the trackers, by tracker name."""
    trainer_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of a trainer that accepts free keys; only that trainer reads them."""
    disabled_hooks: list[str] = field(default_factory=list)
    """Names of installed listeners (group `rollcast.hooks`) that are not called in the run."""


@dataclass(frozen=True)
class Section:
    """A schema and the path of the section that it applies to.

    Attributes:
        path: Dotted path; empty for the top level.
        schema: Dataclass of the schema.
        hosts: Marker of the field that hosts the section; None if the schema declares its own path.
    """

    path: str
    schema: type
    hosts: Hosts | None = None


# -- reading schemas ----------------------------------------------------------------------------


@cache
def field_types(schema: type) -> dict[str, Any]:
    """Return the annotation, with metadata, of each field by name."""
    hints = typing.get_type_hints(schema, include_extras=True)
    return {entry.name: hints[entry.name] for entry in dataclasses.fields(schema)}


def _unwrap(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the bare type and its metadata."""
    if typing.get_origin(kind) is typing.Annotated:
        return typing.get_args(kind)[0], kind.__metadata__
    return kind, ()


def _options(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


def dataclass_in(kind: Any) -> type | None:
    options = (_unwrap(option)[0] for option in _options(_unwrap(kind)[0]))
    return next((option for option in options if isinstance(option, type) and dataclasses.is_dataclass(option)), None)


def _is_mapping(kind: Any) -> bool:
    return any((typing.get_origin(option) or option) in (dict, Mapping) for option in _options(_unwrap(kind)[0]))


def hosts_of(kind: Any) -> Hosts | None:
    return next((annotation for annotation in _unwrap(kind)[1] if isinstance(annotation, Hosts)), None)


def option_of(kind: Any) -> OptionOf | None:
    """Return the mark of a field that names an option of a config group, else None."""
    return next((annotation for annotation in _unwrap(kind)[1] if isinstance(annotation, OptionOf)), None)


def on_accelerator(kind: Any) -> OnAccelerator | None:
    """Return the default of a field on an accelerator, if it has one of its own."""
    return next((annotation for annotation in _unwrap(kind)[1] if isinstance(annotation, OnAccelerator)), None)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def walk(path: str, schema: type) -> Iterator[tuple[str, Any]]:
    """Yield every key of a schema below ``path``, including sections, with its annotation."""
    for name, kind in field_types(schema).items():
        key, inner = _join(path, name), dataclass_in(kind)
        yield key, kind
        if inner is not None:
            yield from walk(key, inner)


def walk_docs(path: str, schema: type) -> dict[str, str]:
    """Return the documentation of every key of a schema below ``path``."""
    docs = {_join(path, name): text for name, text in field_docs(schema).items()}
    for name, kind in field_types(schema).items():
        inner = dataclass_in(kind)
        docs |= walk_docs(_join(path, name), inner) if inner else {}
    return docs


def defaults_of(schema: type) -> dict[str, Any]:
    """Return the defaults of a schema as nested mappings; ``???`` for a field without a default."""
    tree: dict[str, Any] = {}
    for entry in dataclasses.fields(schema):
        value: Any = entry.default
        if entry.default_factory is not dataclasses.MISSING:
            value = entry.default_factory()
        tree[entry.name] = MISSING if value is dataclasses.MISSING else _plain(value)
    return tree


def _owners(schema: type, path: str) -> dict[str, str]:
    """Return the origin of each default, the class that declares the field, by dotted key."""
    owners: dict[str, str] = {}
    for name, kind in field_types(schema).items():
        declares = next(base for base in schema.__mro__ if name in inspect.get_annotations(base))
        inner = dataclass_in(kind)
        owners[_join(path, name)] = f"default of {declares.__module__}.{declares.__qualname__}"
        owners |= _owners(inner, _join(path, name)) if inner else {}
    return owners


def _plain(value: Any) -> Any:
    """Convert dataclasses to mappings and sequences to lists, recursively."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def find(tree: Any, path: str) -> Any:
    """Return the value at a dotted path of nested mappings; None if there is none."""
    for step in path.split(".") if path else ():
        tree = tree.get(step) if isinstance(tree, Mapping) else None
    return tree


# -- the sections of a run ----------------------------------------------------------------------


def place_schemas(schemas: Sequence[ConfigSchema], choices: Mapping[str, str], tree: Mapping[str, Any]) -> Sections:
    """Determine the schema of each section, from the chosen options and the ``name`` of sections that host a group."""

    def holds(schema: ConfigSchema) -> bool:
        chosen = choices.get(schema.group)
        return not schema.group or (chosen not in (None, "None") and schema.option in ("", chosen))

    # The most specific first, because its defaults override those of a schema for any option.
    ranked = sorted(schemas, key=lambda schema: (not schema.option, not schema.group))
    placed = [Section(schema.path, schema.schema) for schema in ranked if schema.path is not None and holds(schema)]
    placed.append(Section("", RootConfig))
    hosts = {
        key: mark for section in placed for key, kind in walk(section.path, section.schema) if (mark := hosts_of(kind))
    }
    options: dict[str, str | None] = {}
    for path, mark in sorted(hosts.items(), key=lambda item: bool(item[1].like)):
        able = [schema for schema in ranked if schema.path is None and schema.group == mark.group]
        named = find(tree, f"{path}.name")
        # An engine without its own schema uses that of the chosen option.
        known = named in {schema.option for schema in able}
        options[path] = named if known else options.get(mark.like) or choices.get(mark.group)
        for schema in able:
            if schema.option in ("", options[path]):
                placed.append(Section(path, schema.schema, mark))
    foreign = {
        key: (path, schema.group)
        for schema in ranked
        for path in ([schema.path] if schema.path is not None else [p for p in hosts if hosts[p].group == schema.group])
        if schema.option and schema.option != options.get(path, choices.get(schema.group))
        for key, _ in walk(path, schema.schema)
    }
    return Sections(tuple(placed), options, foreign)


@dataclass(frozen=True)
class Sections:
    """The schemas of a run.

    Attributes:
        placed: Schemas that apply, with their paths.
        options: Path of each section that hosts a group → option whose schema applies.
        foreign: Dotted key of an option that was not chosen → its section and config group.
    """

    placed: tuple[Section, ...]
    options: Mapping[str, str | None]
    foreign: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def known(self) -> dict[str, Any]:
        """Return the annotation of every key and section by dotted path; None for a section without an annotation."""
        known: dict[str, Any] = {}
        for section in self.placed:
            parts = section.path.split(".") if section.path else []
            for depth in range(1, len(parts) + 1):
                known.setdefault(".".join(parts[:depth]), None)
            known |= dict(walk(section.path, section.schema))
        return known

    def docs(self) -> dict[str, str]:
        """Return the documentation of every documented key and section, by dotted path."""
        docs: dict[str, str] = {}
        for section in reversed(self.placed):
            docs |= walk_docs(section.path, section.schema)
        return docs

    def check_keys(self, tree: Mapping[str, Any], origins: Mapping[str, str]) -> None:
        """Check that every key belongs to a schema.

        Raises:
            ConfigError: A key is unknown; names the key, its origin and the nearest valid key.
        """
        known = self.known()

        def check(node: Any, prefix: str) -> None:
            for name, value in node.items() if isinstance(node, Mapping) else ():
                key = _join(prefix, str(name))
                if key not in known:
                    leaf = next(iter(flatten({name: value}, prefix)))
                    raise ConfigError(unknown_key(leaf, known, origins))
                if hosts_of(known[key]) or not _is_mapping(known[key]):
                    check(value, key)

        check(tree, "")

    def take_out_foreign(self, tree: dict[str, Any], chosen: Collection[str], typed: Collection[str]) -> list[str]:
        """Remove, in place, keys of an option that the user has replaced by another; return them.

        A recipe may set keys of its own engine. They mean nothing to the engine that the user chose instead.

        Args:
            tree: The composed tree.
            chosen: Config groups whose option the user chose.
            typed: Dotted keys that the user set, which stay, and are refused if no schema has them.
        """
        known = self.known()
        removed = []
        for key, (path, group) in self.foreign.items():
            if key in known or not (group in chosen or f"{path}.name" in typed):
                continue
            section, _, leaf = key.rpartition(".")
            node = find(tree, section)
            is_typed = any(
                f"{typed_key}.".startswith(f"{key}.") or f"{key}.".startswith(f"{typed_key}.") for typed_key in typed
            )
            if isinstance(node, dict) and leaf in node and not is_typed:
                del node[leaf]
                removed.append(key)
        return removed

    def fill(self, tree: dict[str, Any], origins: dict[str, str], device: Callable[[], str]) -> None:
        """Add missing keys in place, with the values of the ``like`` section if there is one, else the defaults.

        Args:
            tree: The composed tree.
            origins: Dotted key → what set it; the new keys are added.
            device: Function that returns the kind of device of the run; called only if a default depends on it.
        """
        for path, schema, mark in ((section.path, section.schema, section.hosts) for section in self.placed):
            target = tree
            for step in path.split(".") if path else ():
                if not isinstance(target.get(step), dict):
                    target[step] = {} if target.get(step) in (None, MISSING) else target[step]
                target = target[step] if isinstance(target[step], dict) else {}
            if mark is not None and mark.like and self.options[path] == self.options.get(mark.like):
                like = find(tree, mark.like)
                _merge(target, like, path, {f"{path}.{key}": f"as {mark.like}.{key}" for key in flatten(like)}, origins)
            _merge_by_device(target, schema, path, device, origins)
            _merge(target, defaults_of(schema), path, _owners(schema, path), origins)

    def validate(self, tree: dict[str, Any], origins: Mapping[str, str], allow_missing: bool) -> None:
        """Convert every value to the type in its schema, in place.

        Raises:
            ConfigError: A value is invalid, or a mandatory value is not set.
        """
        unset = sorted(key for key, value in flatten(tree).items() if value == MISSING)
        for section in self.placed:
            node = find(tree, section.path)
            instance = validate_section(section.schema, node, section.path, origins, unset)
            if instance is not None:
                _overlay(node, _plain(instance))
        if unset and not allow_missing:
            raise ConfigError(_unset(unset[0], origins))


def declarations(sections: Sections) -> dict[str, dict[str, Any]]:
    """Return ``doc``, ``takes`` (valid values), ``default`` and ``declared`` (the class) of each key.

    A key with a default of its own on accelerators also has ``on_accelerator``, that default, and ``reason``.
    """
    about_by_key: dict[str, dict[str, Any]] = {}
    for section in sections.placed:
        docs, owners = walk_docs(section.path, section.schema), _owners(section.schema, section.path)
        defaults = flatten(nest(section.path, defaults_of(section.schema)))
        for key, kind in walk(section.path, section.schema):
            if dataclass_in(kind) is None:
                about = {"doc": docs.get(key, ""), "takes": describe(kind), "default": defaults.get(key)}
                mark = on_accelerator(kind)
                about |= {"on_accelerator": mark.value, "reason": mark.reason} if mark else {}
                about_by_key.setdefault(key, {**about, "declared": owners[key].removeprefix("default of ")})
    return about_by_key


def _merge(target: dict[str, Any], values: Any, path: str, whence: Mapping[str, str], origins: dict[str, str]) -> None:
    """Set the keys that are missing in ``target``, and their origins."""
    for name, value in values.items() if isinstance(values, dict) else ():
        key = _join(path, name)
        if name not in target:
            target[name] = _plain(value)
            origins |= {leaf: whence[leaf] for leaf in flatten({key: value}) if leaf in whence}
        elif isinstance(target[name], dict) and isinstance(value, dict):
            _merge(target[name], value, key, whence, origins)


def _merge_by_device(
    target: dict[str, Any], schema: type, path: str, device: Callable[[], str], origins: dict[str, str]
) -> None:
    """Set the missing keys whose default on the run's device is not that of a CPU, and their origins."""
    values, defaults = dict(target), defaults_of(schema)
    for name, kind in field_types(schema).items():
        key, inner, mark = _join(path, name), dataclass_in(kind), on_accelerator(kind)
        if inner is not None:
            # A section that is null by default stays null.
            section = target.get(name, None if defaults.get(name) is None else {})
            if isinstance(section, dict):
                _merge_by_device(section, inner, key, device, origins)
                target |= {name: section} if section else {}
        if mark is None or name in target or not (mark.applies is None or mark.applies(values)):
            continue
        if device() != CPU.name:
            target[name] = _plain(mark.value)
            origins[key] = f"{BY_DEVICE}{device()}: {mark.reason}"


def _overlay(target: dict[str, Any], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(target.get(name), dict) and isinstance(value, dict) and value:
            _overlay(target[name], value)
        elif target.get(name) != MISSING:
            target[name] = value


# -- validation ---------------------------------------------------------------------------------


@cache
def _adapter(schema: type) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(schema)


def _own(schema: type, node: Any, closed: bool = False) -> Any:
    """Select the keys of a schema from a node, without the keys of other schemas and unset ones."""
    if not isinstance(node, Mapping):
        return node
    kinds = field_types(schema)
    own: dict[str, Any] = {}
    for name, value in node.items():
        if (name in kinds or closed) and value != MISSING:
            inner = dataclass_in(kinds.get(name))
            own[name] = _own(inner, value, closed) if inner else value
    return own


def validate_section(
    schema: type, node: Any, path: str, origins: Mapping[str, str], unset: Sequence[str] = (), closed: bool = False
) -> Any:
    """Build an instance of a schema from plain values; return None if a value listed in ``unset`` is missing.

    Raises:
        ConfigError: A value is invalid.
    """
    from pydantic import ValidationError

    own = _own(schema, {} if node is None else node, closed)
    try:
        instance = _adapter(schema).validate_python(own)
    except ValidationError as error:
        problems = [problem for problem in error.errors(include_url=False) if problem["type"] != "missing"]
        if not problems and unset:
            return None
        raise ConfigError(_refusal(schema, (problems or error.errors())[0], own, path, origins)) from error
    _refuse_bools(schema, own, path, origins)
    _refuse_urls(schema, own, path, origins)
    _refuse_not_finite(schema, instance, path, origins)
    return instance


def _refuse_not_finite(kind: Any, value: Any, key: str, origins: Mapping[str, str]) -> None:
    """Reject a number that is not finite; infinity is valid where its field says so, and in free options."""
    options = [_unwrap(option) for option in _options(_unwrap(kind)[0])] + [_unwrap(kind)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for name, inner in field_types(type(value)).items():
            _refuse_not_finite(inner, getattr(value, name), _join(key, name), origins)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            _refuse_not_finite(_items_of(kind), item, _join(key, str(name)), origins)
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            _refuse_not_finite(_items_of(kind), item, f"{key}[{place}]", origins)
    elif isinstance(value, float) and not math.isfinite(value):
        is_free = any(bare is Any or any(isinstance(mark, OrInfinity) for mark in marks) for bare, marks in options)
        if math.isnan(value) or not is_free:
            raise ConfigError(f"{_where(key, origins)}{key} must be a finite number, got {value}")


def _items_of(kind: Any) -> Any:
    """Return the type of the items of a list or of the values of a mapping."""
    arguments = next(
        (literals for option in _options(_unwrap(kind)[0]) if (literals := typing.get_args(_unwrap(option)[0]))), ()
    )
    return arguments[-1] if arguments else Any


def _refuse_urls(schema: type, own: Mapping[str, Any], path: str, origins: Mapping[str, str]) -> None:
    """Reject a URL where a local path is expected, because the file system would take it for a relative path."""
    for name, kind in field_types(schema).items():
        inner, value = dataclass_in(kind), own.get(name)
        if inner is not None and isinstance(value, Mapping):
            _refuse_urls(inner, value, _join(path, name), origins)
        key, items = _join(path, name), [("", kind, value)]
        if isinstance(value, list):
            items = [(f"[{place}]", _items_of(kind), item) for place, item in enumerate(value)]
        for place, item_kind, item in items:
            marks = [mark for option in _options(item_kind) for mark in _unwrap(option)[1]]
            is_local = any(isinstance(mark, OnThisMachine) for mark in marks)
            if is_local and isinstance(item, str) and is_url(item):
                raise ConfigError(f"{_where(key, origins)}{explain_local(key + place, item)}")


def _refuse_bools(schema: type, own: Mapping[str, Any], path: str, origins: Mapping[str, str]) -> None:
    """Reject true and false where a number is expected, because pydantic would convert them to 1 and 0."""
    for name, kind in field_types(schema).items():
        inner, value = dataclass_in(kind), own.get(name)
        if inner is not None and isinstance(value, Mapping):
            _refuse_bools(inner, value, _join(path, name), origins)
        types_of = {_unwrap(option)[0] for option in _options(_unwrap(kind)[0])}
        if isinstance(value, bool) and types_of & {int, float} and bool not in types_of:
            key = _join(path, name)
            raise ConfigError(f"{_where(key, origins)}{key} must be {describe(kind, value)}, got {_show(value)}")


def build_section(
    schema: type[S], node: Any, path: str = "", origins: Mapping[str, str] | None = None, *, closed: bool = False
) -> S:
    """Build a section of the config as a frozen instance of its schema.

    Args:
        schema: Dataclass decorated with :func:`rollcast.contracts.config.config`.
        node: The section, as nested mappings or a node of the composed config.
        path: Dotted path of the section, for messages.
        origins: Dotted key → file or override that set it, for messages.
        closed: True to reject keys that are not in the schema. By default they are ignored, as they may belong to
            other schemas.

    Raises:
        ConfigError: A value is invalid, or a mandatory value is not set; names the key and its origin.
    """
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(node, resolve=True, throw_on_missing=False) if OmegaConf.is_config(node) else node
    known = dict(walk(path, schema))
    if closed and isinstance(plain, Mapping):
        Sections((Section(path, schema),), {}).check_keys(nest(path, plain), origins or {})
    tree = _plain({} if plain is None else plain)
    if isinstance(tree, dict):
        _merge(tree, defaults_of(schema), path, {}, {})
    for key, value in flatten(tree, path).items():
        if value == MISSING and key in known:
            raise ConfigError(_unset(key, origins or {}))
    instance: S = validate_section(schema, tree, path, origins or {}, closed=closed)
    return instance


def nest(path: str, node: Any) -> dict[str, Any]:
    for step in reversed(path.split(".")) if path else ():
        node = {step: node}
    return typing.cast("dict[str, Any]", node)


# -- messages -----------------------------------------------------------------------------------


def nearest(word: str, options: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Return the option most similar to ``word``; None if no similarity reaches ``cutoff`` (from 0 to 1)."""
    matches = difflib.get_close_matches(word, list(options), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def origin_of(key: str, origins: Mapping[str, str]) -> str:
    """Return the file or override that set a key."""
    parts = key.split("[")[0].split(".")
    for depth in range(len(parts), 0, -1):
        if ".".join(parts[:depth]) in origins:
            return origins[".".join(parts[:depth])]
    below = [origin for name, origin in origins.items() if name.startswith(f"{key}.")]
    return below[-1] if below else "config"


def _where(key: str, origins: Mapping[str, str]) -> str:
    return f"{origin_of(key, origins)}: " if origins else ""


def _unset(key: str, origins: Mapping[str, str]) -> str:
    return f"{key} must be set; {origin_of(key, origins)} leaves it open: add {key}=... to the command"


def _suggest(key: str, known: Mapping[str, Any], siblings: Sequence[str]) -> str | None:
    """Return a similar sibling, else the same leaf in another section, else the most similar key."""
    section, _, leaf = key.rpartition(".")
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    for cutoff, elsewhere in ((0.7, same_leaf), (0.5, [] if siblings else list(known))):
        close = nearest(leaf, siblings, cutoff)
        if close:
            return _join(section, close)
        if elsewhere:
            return nearest(key, elsewhere) or (elsewhere[0] if elsewhere is same_leaf else None)
    return None


def unknown_key(key: str, known: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """Return the message for an unknown key, with its origin, the most similar valid key and its siblings."""
    section = key.rpartition(".")[0]
    siblings = sorted(name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == section)
    candidate = _suggest(key, known, siblings)
    sentences = [
        f"{_where(key, origins)}there is no key {key!r}" + (f"; did you mean {candidate!r}?" if candidate else ".")
    ]
    if siblings:
        sentences.append(f"Keys of {section or 'the top level'}: {', '.join(siblings)}.")
    elif known.get(section) is not None:
        sentences.append(f"{section!r} is a value, not a section.")
    if origins and "trainer" not in known:
        sentences.append("No trainer is chosen: most keys come with trainer=... or recipe=...")
    return " ".join(sentences)


def _refusal(schema: type, error: Mapping[str, Any], own: Any, path: str, origins: Mapping[str, str]) -> str:
    """Return the message for a pydantic error, with the key as written in a configuration."""
    kind, value, key = schema, own, path
    for step in error["loc"]:
        inner = dataclass_in(kind)
        if inner is None or step not in field_types(inner):
            break
        kind, key = field_types(inner)[step], _join(key, str(step))
        value = value.get(step) if isinstance(value, Mapping) else None
    where = _where(key, origins)
    if error["type"] == "value_error":
        return f"{where}{key}: {error['ctx']['error']}"
    return f"{where}{key} must be {describe(kind, value)}, got {_show(value)}"


def _show(value: Any) -> str:
    return "null" if value is None else repr(value)


def describe(kind: Any, value: Any = None) -> str:
    """Describe the valid values of a type; only its bounds if ``value`` already has the type."""
    bare, metadata = _unwrap(kind)
    if isinstance(bare, type) and dataclasses.is_dataclass(bare):
        return f"a section with the keys {', '.join(field_types(bare))}"
    arguments, origin = typing.get_args(bare), typing.get_origin(bare)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(describe(option, value) for option in arguments)
    if origin is typing.Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(str(argument) for argument in arguments)
    bounds = _describe_bounds(metadata)
    fits = isinstance(value, (int, float) if bare is float else bare) if bare in (int, float) else False
    if bounds and fits and not isinstance(value, bool):
        return bounds
    if bare in (type(None), Any):
        return "null" if bare is type(None) else "anything"
    if origin is list:
        count = next((f"{mark.min_length} " for mark in metadata if isinstance(mark, Len)), "")
        inner = _options(_unwrap(arguments[0])[0])
        words = describe(inner[0]).removeprefix("one of ") if typing.get_origin(inner[0]) is typing.Literal else ""
        return f"a list of {count}{words or _PLURALS.get(inner[0], 'values')}"
    return "a mapping" if _is_mapping(bare) else _TYPE_NAMES.get(bare, str(getattr(bare, "__name__", bare)))


def _describe_bounds(metadata: Iterable[Any]) -> str:
    marks = [annotation for mark in metadata for annotation in (getattr(mark, "metadata", None) or [mark])]
    bounds = {
        name: getattr(mark, name)
        for mark in marks
        for name in _BOUNDS
        if isinstance(mark, (Ge, Gt, Le, Lt)) and hasattr(mark, name)
    }
    if set(bounds) == {"ge", "le"}:
        return f"from {bounds['ge']:g} to {bounds['le']:g}"
    return " and ".join(f"{_BOUNDS[name]} {bound:g}" for name, bound in bounds.items())
