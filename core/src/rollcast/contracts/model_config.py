"""Changes of a model's ``config.json``: the key ``model.override_config``."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollcast.errors import ConfigError

__all__ = ["override_model_config"]

#: Keys that are decided elsewhere, and where.
_ELSEWHERE = {
    **dict.fromkeys(("attn_implementation", "_attn_implementation"), "set model.attn_implementation instead"),
    **dict.fromkeys(("dtype", "torch_dtype"), "set the dtype of actor.engine and of rollout instead"),
    **dict.fromkeys(("model_type", "architectures", "auto_map"), "it names another model; set model.path instead"),
}


def override_model_config(folder: Path, changes: Mapping[str, Any], key: str = "model.override_config") -> str:
    """Return the text of a model's ``config.json`` with changes; dictionaries are merged.

    Args:
        folder: model folder with a ``config.json``.
        changes: values by key of the file, or of the model type's config.
        key: dotted key of the changes, for messages.

    Raises:
        ConfigError: the config has no such key, another key decides, or the model type refuses a value.
    """
    from transformers import AutoConfig

    file = folder / "config.json"
    try:
        written = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {file} cannot be read: {error}") from error
    try:
        known = AutoConfig.for_model(**written).to_dict() | written
    except (KeyError, TypeError, ValueError):  # a type with its own code
        known = written
    _check_keys(changes, known, key, file)
    merged = _merge(written, changes)
    if known is not written:
        try:
            AutoConfig.for_model(**merged)
        except Exception as error:  # each model type checks its values in its own way
            raise ConfigError(f"{key}: model type {written['model_type']!r} refuses it: {error}") from error
    return json.dumps(merged, indent=2) + "\n"


def _check_keys(changes: Mapping[str, Any], known: Mapping[str, Any], path: str, file: Path) -> None:
    for name, value in changes.items():
        if name in _ELSEWHERE:
            raise ConfigError(f"{path}.{name}: {_ELSEWHERE[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known, 3)
            hint = f"; did you mean {' or '.join(near)}?" if near else f"; there are {', '.join(sorted(known))}"
            raise ConfigError(f"{path}.{name} is no key of {file}, nor of its model type{hint}")
        inner = known[name]
        if isinstance(inner, Mapping) and "model_type" in inner and isinstance(value, Mapping):
            _check_keys(value, inner, f"{path}.{name}", file)


def _merge(written: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(written)
    for name, value in changes.items():
        before = merged.get(name)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            merged[name] = _merge(before, value)
        else:
            merged[name] = value
    return merged
