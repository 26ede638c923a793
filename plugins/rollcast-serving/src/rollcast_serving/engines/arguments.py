"""Building an engine's arguments from the ``rollout`` section."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollcast.contracts.device import CPU, current_device
from rollcast.contracts.rollout import RolloutSetup
from rollcast.errors import ConfigError
from rollcast_serving.requests import ModelLimits

__all__ = [
    "bind_threads",
    "check_device_arguments",
    "has_gpu",
    "join_arguments",
    "limit_positions",
    "starts_without_weights",
]

#: Keys of the model that engines have an argument for.
_MODEL_KEYS = {"trust_remote_code": "model.trust_remote_code"}
_WEIGHT_FILES = {".safetensors", ".bin", ".pt"}


def join_arguments(
    own: Mapping[str, Any], config: Any, known: Collection[str], of: str, names: Mapping[str, str]
) -> dict[str, Any]:
    """Return an engine's arguments, including those of ``rollout.engine_kwargs``.

    Args:
        own: arguments that rollcast sets.
        config: ``rollout`` section.
        known: all of the engine's arguments; empty if unknown.
        of: class or command that takes the arguments, for messages.
        names: rollcast's key for engine arguments that the section names differently.

    Raises:
        ConfigError: a key of ``rollout.engine_kwargs`` is set by rollcast, or is not an argument of the engine.
    """
    extra: dict[str, Any] = dict(config.engine_kwargs)
    check_device_arguments(config)
    for key in extra:
        if key in own:
            name = names.get(key, key)
            instead = f"rollout.{name}" if hasattr(config, name) else _MODEL_KEYS.get(key, "")
            raise ConfigError(f"rollout.engine_kwargs.{key}{_instead(instead)}")
        if known and key not in known:
            near = difflib.get_close_matches(key, known, 3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ConfigError(f"rollout.engine_kwargs.{key} is not an argument of {of}{hint}")
    return {**extra, **own}


def check_device_arguments(config: Any, section: str = "rollout") -> None:
    """Check that ``engine_kwargs`` leaves the engine's devices as the placement assigns them.

    Args:
        config: a ``rollout`` section; one without ``engine_kwargs`` passes.
        section: dotted key of the section.

    Raises:
        ConfigError: an argument changes their number or choice; the message names the key to set instead.
    """
    for key in getattr(config, "engine_kwargs", {}):
        if key in config.device_arguments:
            name = config.device_arguments[key]
            raise ConfigError(f"{section}.engine_kwargs.{key}{_instead(name and f'{section}.{name}')}")


def _instead(key: str) -> str:
    return f": set {key} instead" if key else " cannot be set: rollcast depends on its value"


def starts_without_weights(setup: RolloutSetup) -> bool:
    """Return True if the engine starts with meaningless weights, and an update must follow."""
    load_format = setup.config.load_format
    return load_format == "dummy" or (load_format == "auto" and not _has_weights(Path(setup.model_path)))


def _has_weights(folder: Path) -> bool:
    # A path that is not a folder is treated as a name on a model hub.
    return not folder.is_dir() or any(path.suffix in _WEIGHT_FILES for path in folder.iterdir())


def limit_positions(limits: ModelLimits, positions: int | None, key: str) -> ModelLimits:
    """Return the limits, lowered to ``positions`` if that is fewer; ``key`` names the limiting setting."""
    if positions is None or (limits.max_positions is not None and limits.max_positions <= positions):
        return limits
    return replace(limits, max_positions=positions, key=key)


def has_gpu() -> bool:
    """Return True if an engine of this process would run on an accelerator."""
    return current_device() is not CPU


def bind_threads(ranks: int) -> str | None:
    """Return one core of this process for each rank of a tensor-parallel engine on a CPU, as ``0|1``.

    Returns:
        None if there are fewer cores than ranks, or the system cannot list them.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return "|".join(str(core) for core in cores[:ranks]) if len(cores) >= ranks else None
