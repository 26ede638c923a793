"""Overrides of the command line, which are parsed, classified and checked before they are passed to Hydra."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from rollcast.config.sections import nearest
from rollcast.errors import ConfigError
from rollcast.plugins.discovery import find_known, find_plugins

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override as HydraOverride

__all__ = [
    "REMOVED",
    "Combination",
    "Override",
    "check_option",
    "expand_sweeps",
    "explain_option",
    "format_override",
    "parse_override",
    "with_mappings",
]

#: Placeholder value of a key that ``~key`` resets to its default; removed after Hydra has merged everything.
REMOVED = "__rollcast_removed__"
#: Key of the override that names a mapping file.
_MAPPING = "mapping"
#: Number of characters after which the name of a combination's folder is cut; file systems allow 255 bytes.
_LONGEST_NAME = 200
#: Config group → the registry group whose plugins its options name, and the key of that name.
_PLUGIN_GROUPS = {
    "engine": ("rollcast.engines", "actor.engine.name"),
    "rollout": ("rollcast.rollouts", "rollout.name"),
    "trainer": ("rollcast.trainers", "trainer.name"),
    "profiler": ("rollcast.profilers", "profiler.name"),
    "runtime": ("rollcast.runtimes", "runtime.name"),
    "algorithm": ("rollcast.advantages", "algorithm.adv_estimator"),
    "reward": ("rollcast.rewards", "reward.name"),
    "data": ("rollcast.datasets", "data.dataset"),
}


@dataclass(frozen=True)
class Override:
    """A parsed override.

    Attributes:
        text: The override as written.
        key: Dotted key, or config group.
        value: The parsed value; None if the override removes a key.
        deletes: True for ``~key``.
        packaged: True for ``group@package=option``, which is valid only for groups.
        file: Path of the mapping file that contains the override; empty for the command line.
    """

    text: str
    key: str
    value: Any
    deletes: bool
    packaged: bool
    file: str = ""

    @property
    def origin(self) -> str:
        """Name of the override in messages and origins."""
        return f"override {self.text!r}{f' of {self.file}' if self.file else ''}"

    @property
    def hydra_text(self) -> str:
        """The override in Hydra's syntax, in the form that sets a key whether or not a file sets it.

        Users may write "+" and "++" as in other Hydra applications, but they have no effect: the schemas define the
        keys that exist.
        """
        return f"++{self.key}={REMOVED}" if self.deletes else f"++{self.text.lstrip('+')}"


def format_override(key: str, value: str) -> str:
    """Return an override that sets ``key`` to exactly this text, whatever characters it contains."""
    # Hydra reads a backslash literally, except before a quote.
    escaped = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), value)
    return f"{key}='{escaped}'"


def parse_override(text: str) -> Override:
    """Parse one override.

    Raises:
        ConfigError: The text is not an override, or contains several values, as for a sweep.
    """
    parsed = _parse(text)
    key = parsed.key_or_group
    if parsed.is_sweep_override():
        raise ConfigError(
            f"override {text!r} holds several values, but a run takes one; a list is written {key}=[a,b], and rollcast "
            "train --multirun trains a run for each value"
        )
    return Override(text, key, parsed.value(), parsed.is_delete(), parsed.package is not None)


def _parse(text: str) -> HydraOverride:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.plugins import Plugins  # noqa: F401  # the parser needs the plugin system loaded
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        key, equals, value = text.partition("=")
        how = f"quote a value that holds special characters: {key}='\"{value}\"'" if equals else "write key=value"
        raise ConfigError(f"override {text!r} cannot be read: {reason}; {how}") from error


@dataclass(frozen=True)
class Combination:
    """One combination of the values of a sweep.

    Attributes:
        overrides: All overrides, each with one value.
        swept: Those of them that had several values.
    """

    overrides: tuple[str, ...]
    swept: tuple[str, ...]

    @property
    def folder(self) -> str:
        """Name of a folder for the combination, which no other one has; empty if only ``run_dir`` is swept, or nothing.

        It is the same each time, so the same sweep finds its runs again.
        """
        named = ",".join(text.lstrip("+") for text in self.swept if _parse(text).key_or_group != "run_dir")
        name = quote(named, safe="=,+@~ '\"()[]{}")
        digest = hashlib.sha256(named.encode()).hexdigest()[:12]
        return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}-{digest}"


def expand_sweeps(overrides: Sequence[str]) -> list[Combination]:
    """Return each combination of the values of overrides in Hydra's syntax for sweeps: ``key=1,2`` or ``range(1,4)``.

    The last override varies fastest.

    Raises:
        ConfigError: An override cannot be read, or its values cannot be enumerated: an interval, or a glob.
    """
    return [
        Combination(tuple(text for text, _ in values), tuple(text for text, is_swept in values if is_swept))
        for values in itertools.product(*map(_values, overrides))
    ]


def _values(text: str) -> list[tuple[str, bool]]:
    """Return an override for each value, and whether it is one of several."""
    from hydra.core.override_parser.types import ValueType

    parsed = _parse(text)
    if not parsed.is_sweep_override():
        return [(text, False)]
    key = parsed.get_key_element()
    if parsed.value_type not in (ValueType.CHOICE_SWEEP, ValueType.SIMPLE_CHOICE_SWEEP, ValueType.RANGE_SWEEP):
        raise ConfigError(
            f"override {text!r} does not list its values; write {key}=a,b, or {key}=range(1,4) for numbers"
        )
    return [(f"{key}={value}", True) for value in parsed.sweep_string_iterator()]


def with_mappings(overrides: Sequence[Override]) -> list[Override]:
    """Replace ``mapping=FILE`` by the overrides in the file, before all other overrides.

    The file is YAML with the key ``overrides``, a list of strings such as ``placement.nnodes=2``; ``rollcast map
    --write`` writes such a file. Overrides of the command line take precedence.

    Raises:
        ConfigError: A file cannot be read, or is not a mapping file.
    """
    files = [override for override in overrides if override.key == _MAPPING and not override.deletes]
    overrides_of_files = [
        replace(parse_override(text), file=str(mapping_file.value))
        for mapping_file in files
        for text in _read_mapping(mapping_file)
    ]
    return [*overrides_of_files, *(override for override in overrides if override.key != _MAPPING)]


def _read_mapping(override: Override) -> list[str]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    path = Path(str(override.value))
    try:
        plain: Any = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{override.origin}: the file cannot be read: {error}") from error
    texts = plain.get("overrides") if isinstance(plain, dict) else None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(
            f"{override.origin}: {path} is no mapping: it needs a list of texts under 'overrides', such as "
            "placement.nnodes=2; rollcast map --write makes one"
        )
    return texts


def check_option(override: Override, options: Sequence[str], broken: Sequence[str]) -> None:
    """Check that the choice of a config group is one of its options.

    Raises:
        ConfigError: The choice is invalid; lists the options and the most similar one.
    """
    group, option = override.key, override.value
    if override.deletes:
        return
    if not isinstance(option, str):
        raise ConfigError(
            f"{override.origin}: choose one of {', '.join(options)}, or leave {group!r} out with ~{group}"
        )
    if option not in options:
        raise ConfigError(explain_option(group, option, options, broken))


def explain_option(group: str, option: str, options: Sequence[str], broken: Iterable[str], where: str = "") -> str:
    """Return the message for an option that no source provides."""
    registry, key = _PLUGIN_GROUPS.get(group, ("", ""))
    plugin = next((candidate for candidate in find_plugins(registry) if candidate.name == option), None)
    if plugin is not None:
        message = (
            f"{where}{group}={option}: {plugin.owner} provides the plugin {option!r}, but no installed package has a "
            f"file {group}/{option}.yaml, which makes it an option; set {key}={option}, or have its package ship the "
            f"file; options: {', '.join(options) or 'none'}"
        )
        return "\n".join([message, *broken])
    message = f"{where}{group}={option}: no installed plugin provides it; installed: {', '.join(options) or 'none'}"
    provider = find_known(registry).get(option)
    if provider:
        message += f"; to add it: pip install {provider}"
    elif close := nearest(option, options):
        message += f"; did you mean {group}={close}?"
    return "\n".join([message, *broken])
