"""The settings of runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollcast.contracts.config import flatten
from rollcast.errors import DataError

__all__ = ["differing_keys", "read_settings"]


def read_settings(path: Path) -> dict[str, Any]:
    """Return the configuration of a run by dotted key; its own folder is written as ``${run_dir}``.

    Raises:
        DataError: ``config.yaml`` is missing or no mapping.
    """
    import yaml

    file = path / "config.yaml"
    try:
        tree = yaml.safe_load(file.read_text("utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise DataError(f"{file} cannot be read: {error}") from error
    if not isinstance(tree, dict):
        raise DataError(f"{file} holds no mapping")
    own = str(tree.get("run_dir") or "")
    values = flatten(tree)
    values.pop("run_dir", None)
    return {key: _relative(value, own) for key, value in values.items()}


def _relative(value: Any, own: str) -> Any:
    if isinstance(value, list):
        return [_relative(item, own) for item in value]
    inside = isinstance(value, str) and own and (value == own or value.startswith(f"{own}/"))
    return "${run_dir}" + value[len(own) :] if inside else value


def differing_keys(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values are not the same in all settings, sorted."""
    keys = {key for setting in settings for key in setting}
    return sorted(key for key in keys if any(setting.get(key) != settings[0].get(key) for setting in settings[1:]))
