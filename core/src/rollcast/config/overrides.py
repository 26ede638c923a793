"""A person's overrides, told apart and checked before Hydra sees them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollcast.config.sources import flatten
from rollcast.config.validation import check_key, is_mapping_key, nearest, open_mapping
from rollcast.errors import ConfigError
from rollcast.plugins.discovery import find_known

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from rollcast.config.schemas import ConfigSchema

__all__ = ["Override", "check_option", "explain_option", "format_override", "parse_override", "prepare_override"]

#: Config group → the registry group whose parts its options name.
_PART_GROUPS = {
    "engine": "rollcast.engines",
    "rollout": "rollcast.rollouts",
    "trainer": "rollcast.trainers",
    "profiler": "rollcast.profilers",
    "runtime": "rollcast.runtimes",
    "algorithm": "rollcast.advantages",
    "reward": "rollcast.rewards",
    "data": "rollcast.datasets",
}


@dataclass(frozen=True)
class Override:
    """One override as it was parsed.

    Attributes:
        text: as it was written.
        key: dotted key, or config group.
        value: the parsed value; None where a key is deleted.
        deletes: written ``~key``.
        packaged: written ``group@package=option``, which only groups can be.
    """

    text: str
    key: str
    value: Any
    deletes: bool
    packaged: bool

    @property
    def origin(self) -> str:
        """How messages and origins name it."""
        return f"override {self.text!r}"


def format_override(key: str, value: str) -> str:
    """An override that sets ``key`` to this very text, whatever characters it holds."""
    # Hydra reads a backslash as itself, except before a quote.
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value)
    return f"{key}='{escaped}'"


def parse_override(text: str) -> Override:
    """Read one override.

    Raises:
        ConfigError: it is not an override, or it holds several values, as for a sweep.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.plugins import Plugins  # noqa: F401  # the parser needs the plugin system loaded
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(text)
    except HydraException as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        key, equals, value = text.partition("=")
        how = f"quote a value that holds special characters: {key}='\"{value}\"'" if equals else "write key=value"
        raise ConfigError(f"override {text!r} cannot be read: {reason}; {how}") from error
    key = parsed.key_or_group
    if parsed.is_sweep_override():
        raise ConfigError(f"override {text!r} holds several values, but a run takes one; a list is written {key}=[a,b]")
    return Override(text, key, parsed.value(), parsed.is_delete(), parsed.package is not None)


def check_option(override: Override, options: Sequence[str], broken: Sequence[str]) -> None:
    """Refuse a choice of a config group that is not one of its options.

    Raises:
        ConfigError: with the options and the nearest one.
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
    """The message for an option that no source has."""
    message = f"{where}{group}={option}: no installed plugin provides it; installed: {', '.join(options) or 'none'}"
    close = nearest(option, options)
    if close:
        message += f"; did you mean {group}={close}?"
    provider = find_known(_PART_GROUPS[group]).get(option) if group in _PART_GROUPS else None
    if provider:
        message += f"; to add it: pip install {provider}"
    return "\n".join([message, *broken])


def prepare_override(override: Override, base: DictConfig, schemas: Sequence[ConfigSchema]) -> str:
    """The override as Hydra gets it: known keys only, set whether or not a file sets them too.

    Raises:
        ConfigError: unknown key, or the removal of a key that a schema has.
    """
    key, value = override.key, override.value
    if override.packaged:
        raise ConfigError(f"{override.origin}: {key!r} is not a config group that something chosen has")
    inside = open_mapping(key, schemas)
    if override.deletes:
        if inside:
            return override.text
        check_key(key, base, schemas, override.origin)
        raise ConfigError(f"{override.origin}: {key!r} cannot be removed; set it to another value")
    if not inside and not (isinstance(value, dict) and is_mapping_key(key, schemas)):
        for leaf in flatten({key: value}):
            if not open_mapping(leaf, schemas):
                check_key(leaf, base, schemas, override.origin)
    # "+" and "++" are habits from elsewhere: what may be set is known, so there is nothing to force.
    return f"++{override.text.lstrip('+')}"
