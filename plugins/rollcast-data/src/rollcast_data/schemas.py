"""The config's ``data`` section; importable without torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rollcast.errors import ConfigError

__all__ = ["APPLY_CHAT_TEMPLATE", "TRUNCATION", "DataConfig", "build_data_config"]

TRUNCATION = ("error", "left", "right")
"""Values of ``data.truncation``."""

APPLY_CHAT_TEMPLATE = ("auto", "always", "never")
"""Values of ``data.apply_chat_template``."""


@dataclass
class DataConfig:
    """Which rows are trained on, and how they become tokens.

    Attributes:
        dataset: name of the dataset in the group ``rollcast.datasets``.
        train_files, val_files: JSONL or Parquet files; globs are expanded in sorted order.
        prompt_key: column of the prompt, a string or a list of chat messages. Like the other
            keys it may be dotted to reach into a nested column (``reward_model.ground_truth``).
        ground_truth_key: column of the reference answer; null if the task has none.
        response_key: column of the response, read by the dataset ``supervised``.
        data_source_key: column of the row's source name; rows without it have the source "".
        max_prompt_length: most tokens a prompt may have.
        max_response_length: most tokens a response may have, end token included.
        train_batch_size: prompts a training step.
        val_batch_size: prompts a validation batch; null for all at once.
        shuffle: draw training rows in an order that depends on seed and epoch.
        filter_overlong_prompts: leave out rows whose prompt is longer than ``max_prompt_length``.
        truncation: what to do with longer ones that were not left out: ``error``, or cut at the
            ``left`` or at the ``right``.
        val_max_samples: validate on the first so many rows; -1 for all.
        num_workers: processes that tokenise and collate ahead; 0 does it in the trainer's.
        apply_chat_template: ``auto`` applies the tokenizer's template to prompts that are lists
            of messages, ``always`` wraps a string as one user message first, ``never`` joins the
            messages' contents with newlines.
        preprocess: name in the group ``rollcast.preprocessors``, run before training if
            ``preprocess_dir`` lacks the files; null to run none.
        preprocess_dir: folder that it writes into.
        preprocess_source: folder that it reads; null if it generates its data.
    """

    dataset: str = "prompts"
    train_files: list[str] = field(default_factory=list)
    val_files: list[str] = field(default_factory=list)
    prompt_key: str = "prompt"
    ground_truth_key: str | None = "ground_truth"
    response_key: str = "response"
    data_source_key: str = "data_source"
    max_prompt_length: int = 512
    max_response_length: int = 512
    train_batch_size: int = 64
    val_batch_size: int | None = None
    shuffle: bool = True
    filter_overlong_prompts: bool = True
    truncation: str = "error"
    val_max_samples: int = -1
    num_workers: int = 0
    apply_chat_template: str = "auto"
    preprocess: str | None = None
    preprocess_dir: str | None = None
    preprocess_source: str | None = None


def build_data_config(config: DataConfig | Mapping[str, Any]) -> DataConfig:
    """A checked :class:`DataConfig` from one, or from a mapping of (some of) its keys.

    Raises:
        ConfigError: an unknown key, with the nearest valid one, or a value that no key takes.
    """
    if isinstance(config, Mapping):
        valid = [each.name for each in fields(DataConfig)]
        for key in config:
            if key not in valid:
                near = difflib.get_close_matches(str(key), valid, n=1)
                hint = f"did you mean data.{near[0]}?" if near else f"valid keys: {', '.join(valid)}"
                raise ConfigError(f"unknown key data.{key}: {hint}")
        values = dict(config)
        for key in ("train_files", "val_files"):
            if values.get(key) is not None:
                values[key] = [values[key]] if isinstance(values[key], str) else list(values[key])
        config = DataConfig(**values)
    _check(config)
    return config


def _check(config: DataConfig) -> None:
    for key, valid in (("truncation", TRUNCATION), ("apply_chat_template", APPLY_CHAT_TEMPLATE)):
        if getattr(config, key) not in valid:
            raise ConfigError(f"data.{key} is {getattr(config, key)!r}; it is one of {', '.join(valid)}")
    for key in ("max_prompt_length", "max_response_length", "train_batch_size", "val_batch_size"):
        value = getattr(config, key)
        if value is not None and value < 1:
            raise ConfigError(f"data.{key} is {value}; it must be at least 1")
    if config.num_workers < 0:
        raise ConfigError(f"data.num_workers is {config.num_workers}; it must be at least 0")
    if config.val_max_samples == 0 or config.val_max_samples < -1:
        raise ConfigError(f"data.val_max_samples is {config.val_max_samples}; it is -1 for all rows, or at least 1")
