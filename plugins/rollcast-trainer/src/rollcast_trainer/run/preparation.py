"""Checks and preparations of a run before its workers start."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rollcast import compose, format_override
from rollcast.contracts.command import show_progress
from rollcast.contracts.storage import is_url
from rollcast.contracts.trainer import trainers
from rollcast.errors import ConfigError
from rollcast_data.contract import preprocessors
from rollcast_data.schemas import DataConfig
from rollcast_trainer.run.run_dir import check_same_run

__all__ = ["check_positions", "preprocess_data", "train_warm_start"]

logger = logging.getLogger(__name__)


def preprocess_data(data: DataConfig, seed: int) -> bool:
    """Run ``data.preprocess`` unless all data files exist; return True if it ran.

    Raises:
        ConfigError: ``data.preprocess_dir`` is not set.
        DataError: the source is missing or malformed.
    """
    if data.preprocess is None:
        return False
    if data.preprocess_dir is None:
        raise ConfigError(f"data.preprocess={data.preprocess} needs data.preprocess_dir, the folder to write into")
    preprocessor = preprocessors.get(data.preprocess, requested_by="data.preprocess")()
    files = [*data.train_files, *data.val_files]
    if files and all(is_url(file) or Path(file).exists() for file in files):
        return False
    source = None if data.preprocess_source is None else Path(data.preprocess_source)
    with show_progress(f"preprocessing {data.preprocess}"):
        report = preprocessor.run(source, Path(data.preprocess_dir), seed)
    written = ", ".join(f"{rows} rows of {name}" for name, rows in report.rows.items())
    logger.info("%s wrote %s", data.preprocess, written)
    return True


def check_positions(model_path: str, data: DataConfig) -> None:
    """Raise if rows can be longer than the model has positions; a model that does not state its number passes.

    Raises:
        ConfigError: rows are too long for the model, or its ``config.json`` cannot be read.
    """
    file = Path(model_path).expanduser() / "config.json"
    if not file.is_file():
        return  # loading the tokenizer comes next and reports what is missing
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        text = content.get("text_config") or content
        most = text.get("max_position_embeddings")
        scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
        # Scaled rotary positions: some families leave max_position_embeddings at the value before scaling.
        if type(most) is int and most == scaling.get("original_max_position_embeddings"):
            most = int(most * float(scaling.get("factor") or 1.0))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"model.path: {file} cannot be read: {type(error).__name__}: {error}") from error
    longest = data.max_prompt_length + data.max_response_length
    if type(most) is int and longest > most:
        raise ConfigError(
            f"a row may have {longest} tokens (data.max_prompt_length={data.max_prompt_length} + "
            f"data.max_response_length={data.max_response_length}), but the model in {model_path} has {most} positions "
            f"(max_position_embeddings); lower the keys by {longest - most} together"
        )


def train_warm_start(recipe: str, run_dir: Path, seed: int, sections: Mapping[str, Any]) -> Path:
    """Train ``recipe`` in ``run_dir/warm_start``, unless its exported model exists.

    Args:
        recipe: name of the recipe.
        run_dir: run directory of the run that starts from the warm start.
        seed: seed of that run.
        sections: config sections that both share, such as ``runtime``.

    Returns:
        The folder of the exported model.

    Raises:
        ConfigError: the folder holds a warm start with other settings.
    """
    folder = run_dir / "warm_start"
    exported = folder / "export"
    composed = compose(
        [
            f"recipe={recipe}",
            f"runtime={sections['runtime']['name']}",
            format_override("run_dir", str(folder)),
            f"trainer.seed={seed}",
            "trainer.export=true",
        ]
    )
    config: DictConfig = OmegaConf.create({**composed.plain(), **sections})
    if exported.is_dir():
        check_same_run(folder, OmegaConf.to_container(config))  # type: ignore[arg-type]
        logger.info("warm start: using the existing model in %s", exported)
        return exported
    logger.info("warm start: training recipe %s in %s", recipe, folder)
    trainers.get(config.trainer.name).launch(config)
    return exported
