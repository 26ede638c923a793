"""Translation of a configuration of verl into overrides of rollcast."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rollcast import compose, format_override
from rollcast.errors import ConfigError
from rollcast_verl.keys import Rule, find_rule
from rollcast_verl.need import need_verl

__all__ = ["Line", "Translation", "load", "translate"]

State = Literal["same", "translated", "not set", "no counterpart", "unknown"]
#: Options that a run of verl always means; a key of the file may choose another.
_BASE = {"trainer": "ppo", "data": "prompts", "data.ground_truth_key": "reward_model.ground_truth"}
#: Groups whose options have to come before keys, in this order.
_GROUPS = ("trainer", "engine", "rollout", "data", "algorithm", "reward")
#: Strings that need no quotes in an override.
_PLAIN = re.compile(r"[A-Za-z_/.][\w/.-]*")
_DEFAULTS = "trainer/config/_generated_ppo_trainer.yaml"


@dataclass(frozen=True)
class Line:
    """Result of the translation of a key of verl.

    Attributes:
        key, value: verl's key and its value.
        state: outcome.
        overrides: keys and values of rollcast that the key sets.
        note: the difference, or the reason why there is no counterpart.
    """

    key: str
    value: Any
    state: State
    overrides: Mapping[str, Any]
    note: str = ""


@dataclass
class Translation:
    """A translated configuration.

    Attributes:
        lines: one for each key of verl's configuration, in its order.
        settings: key of rollcast → value, group options first.
    """

    lines: list[Line] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def overrides(self) -> list[str]:
        """Arguments of ``rollcast train``."""
        return [f"{key}={_text(value)}" for key, value in self.settings.items()]

    def check(self) -> None:
        """Compose the overrides with rollcast's schemas.

        Raises:
            ConfigError: a value does not fit, or a plugin that the configuration names is not installed.
        """
        compose(self.overrides, allow_missing=True)


def load(path: Path | None, overrides: Sequence[str] = (), complete: bool = False) -> DictConfig:
    """Read a configuration of verl and apply overrides as verl's command line does.

    Args:
        path: YAML file; None for none.
        overrides: ``key=value``, ``+key=value`` or ``++key=value``; ``~key`` deletes.
        complete: True to put the file over verl's own defaults, which need verl.

    Raises:
        ConfigError: the file or an override cannot be read.
        CapabilityError: verl is not installed.
    """
    config: DictConfig | ListConfig = OmegaConf.create({})
    try:
        if complete:
            folder = Path(str(need_verl("verl", "the defaults of verl").__file__)).parent
            config = OmegaConf.load(folder / _DEFAULTS)
        if path is not None:
            config = OmegaConf.merge(config, OmegaConf.load(path))
        for text in overrides:
            key, equals, _ = text.lstrip("+~").partition("=")
            if text.startswith("~"):
                OmegaConf.update(config, key, None)
            elif not equals:
                raise ConfigError(f"override {text!r} is not key=value")
            else:
                config = OmegaConf.merge(config, OmegaConf.from_dotlist([text.lstrip("+")]))
    except (OmegaConfBaseException, OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the configuration of verl cannot be read: {error}") from error
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{path} is no mapping of keys, as a configuration of verl is")
    return config


def translate(config: DictConfig) -> Translation:
    """Translate a configuration of verl; every key of it gets a line."""
    keys = dict(_leaves(config, ""))
    translation = Translation()
    settings: dict[str, Any] = {}
    for key, value in keys.items():
        line = _line(key, value, keys)
        translation.lines.append(line)
        settings.update(line.overrides)
    if "reward" not in settings and "reward.name" not in settings:
        settings["reward.name"] = "verl"
    settings = {**_BASE, **settings}
    first = {group: settings[group] for group in _GROUPS if group in settings}
    translation.settings = {**first, **{key: value for key, value in settings.items() if key not in first}}
    return translation


def _leaves(node: DictConfig, prefix: str) -> Iterator[tuple[str, Any]]:
    for name in node:
        key = f"{prefix}{name!s}"
        try:
            value: Any = node[name]
        except OmegaConfBaseException:
            # An interpolation of a key that is not in this file.
            value = OmegaConf.to_container(node, resolve=False)[name]  # type: ignore[index]
            yield key, value
            continue
        if isinstance(value, DictConfig) and value:
            yield from _leaves(value, f"{key}.")
        elif not str(name).startswith("_target_"):
            yield key, OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _line(key: str, value: Any, keys: Mapping[str, Any]) -> Line:
    rule = find_rule(key)
    if rule is None:
        return Line(key, value, "unknown", {}, "not a key of verl 0.9.1 that this table knows")
    if rule.outcome == "none":
        return Line(key, value, "no counterpart", {}, rule.note)
    if value == "???" or (isinstance(value, str) and "${" in value):
        return Line(key, value, "not set", {}, "set elsewhere in verl's configuration")
    if any(value is left or (value == left and type(value) is type(left)) for left in rule.leaves_out):
        return Line(key, value, "not set", {}, rule.note)
    overrides = dict(_overrides(rule, key, value, keys))
    state: State = "same" if rule.outcome == "same" else "translated"
    return Line(key, value, state if overrides else "not set", overrides, rule.note)


def _overrides(rule: Rule, key: str, value: Any, keys: Mapping[str, Any]) -> Mapping[str, Any]:
    if rule.translate is not None:
        return rule.translate(value, keys)
    ours = rule.ours
    if ours.endswith(".*"):
        ours = ours[:-1] + key.removeprefix(rule.theirs[:-1])
    return {ours: value}


def _text(value: Any) -> str:
    """Write a value in the grammar of an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_text, value)) + "]"
    if isinstance(value, str) and not _PLAIN.fullmatch(value):
        return format_override("", value)[1:]
    return str(value)
