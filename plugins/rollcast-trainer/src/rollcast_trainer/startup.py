"""What a run checks and prepares before its workers start."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rollcast.contracts.dataset import preprocessors
from rollcast.contracts.engine import BaseEngine
from rollcast.contracts.rollout import BaseRollout
from rollcast.contracts.trainer import trainers
from rollcast.contracts.weight_sync import weight_syncs
from rollcast.errors import CapabilityError, ConfigError
from rollcast_data.schemas import DataConfig
from rollcast_trainer.run_dir import check_same_run

__all__ = ["check_capabilities", "preprocess_data", "train_warm_start"]

logger = logging.getLogger(__name__)


def check_capabilities(
    engine_class: type[BaseEngine], engine: Any, rollout_class: type[BaseRollout], rollout: Any
) -> None:
    """Refuse an engine, a rollout and a weight sync that cannot work together.

    Args:
        engine_class, rollout_class: the parts.
        engine, rollout: their configs.

    Raises:
        CapabilityError: says which of them lacks what.
    """
    sync = weight_syncs.get(rollout.weight_sync)
    chosen = (
        f"actor.engine.name={engine.name}, rollout.name={rollout.name}, rollout.mode={rollout.mode}, "
        f"rollout.weight_sync={rollout.weight_sync}"
    )
    modes = {mode.value for mode in rollout_class.capabilities.modes}
    if rollout.mode not in modes:
        raise CapabilityError(f"{chosen}: this rollout has the modes {', '.join(sorted(modes)) or 'none'}")
    served = {mode.value for mode in sync.capabilities.modes}
    if rollout.mode not in served:
        raise CapabilityError(f"{chosen}: this weight sync serves the modes {', '.join(sorted(served)) or 'none'}")
    if not sync.capabilities.same_process:
        return
    for part, able in (
        ("rollout", rollout_class.capabilities.in_process),
        ("engine", engine_class.capabilities.in_process_module),
    ):
        if not able:
            raise CapabilityError(f"{chosen}: this weight sync shares the engine's module, which the {part} cannot do")


def preprocess_data(data: DataConfig, seed: int) -> None:
    """Run ``data.preprocess`` unless the data files are there.

    Raises:
        ConfigError: there is no folder to write into.
        DataError: the source is missing or malformed.
    """
    if data.preprocess is None:
        return
    if data.preprocess_dir is None:
        raise ConfigError(f"data.preprocess={data.preprocess} needs data.preprocess_dir, the folder to write into")
    preprocessor = preprocessors.get(data.preprocess, requested_by="data.preprocess")()
    files = [*data.train_files, *data.val_files]
    if files and all(Path(file).exists() for file in files):
        return
    source = None if data.preprocess_source is None else Path(data.preprocess_source)
    report = preprocessor.run(source, Path(data.preprocess_dir), seed)
    written = ", ".join(f"{rows} rows of {name}" for name, rows in report.rows.items())
    logger.info("%s wrote %s", data.preprocess, written)


def train_warm_start(recipe: str, run_dir: Path, seed: int, sections: Mapping[str, Any]) -> Path:
    """Train ``recipe`` in ``run_dir/warm_start``, unless its exported model is there already.

    Args:
        recipe: name of the recipe.
        run_dir: of the run that it is for.
        seed: that run's.
        sections: parts of the config that both share, such as ``runtime``.

    Returns:
        The folder of the exported model.

    Raises:
        ConfigError: the folder holds a warm start with other settings.
    """
    from rollcast.config import compose
    from rollcast.config.overrides import format_override

    folder = run_dir / "warm_start"
    exported = folder / "export"
    config: DictConfig = compose(
        [
            f"recipe={recipe}",
            format_override("run_dir", str(folder)),
            f"trainer.seed={seed}",
            "trainer.export=true",
        ]
    ).config
    for name, section in sections.items():
        config[name] = section
    if exported.is_dir():
        check_same_run(folder, OmegaConf.to_container(config))  # type: ignore[arg-type]
        logger.info("warm start: the model in %s is there already", exported)
        return exported
    logger.info("warm start: training recipe %s in %s", recipe, folder)
    trainers.get(config.trainer.name).launch(config)
    return exported
