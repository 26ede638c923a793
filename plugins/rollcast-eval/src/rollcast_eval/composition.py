"""Composition of the configuration of ``rollcast generate`` and ``rollcast eval``, also from a training recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcast import compose

if TYPE_CHECKING:
    from rollcast import Composed

__all__ = ["compose_samples"]

#: Config groups whose choice means that the overrides are those of a training run.
_RUNS = ("recipe", "trainer")
#: Keys that sampling sets itself, because its replicas read the model from its folder.
_OWN = ("rollout.mode", "rollout.weight_sync")


def compose_samples(overrides: Sequence[str] = (), config_dir: Path | None = None) -> Composed:
    """Return the configuration of ``trainer=sample``.

    With ``recipe=...`` or ``trainer=...`` the overrides are composed as for training, and the sections that sampling
    has too are the run's: model, data, rollout, reward, agent, runtime and placement.

    Raises:
        RollcastError: see :func:`rollcast.compose`.
    """
    if not any(_key(override) in _RUNS for override in overrides):
        return compose(["trainer=sample", *overrides], config_dir)
    from omegaconf import OmegaConf

    own = [override for override in overrides if _key(override).partition(".")[0] == "sample"]
    run = compose([override for override in overrides if override not in own], config_dir)
    # The model of the run is set below.
    sample = compose(["trainer=sample", "model.path=unused", *own], config_dir)
    tree, run_tree = sample.plain(), run.plain()
    sample_only = {key: OmegaConf.select(sample.config, key) for key in _OWN}
    config: Any = OmegaConf.create(tree | {name: run_tree[name] for name in tree if name in run_tree})
    for key, value in sample_only.items():
        OmegaConf.update(config, key, value)
    OmegaConf.set_readonly(config, True)
    return replace(sample, config=config, origins={**sample.origins, **run.origins})


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0].strip()
