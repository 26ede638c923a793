"""Schema of the config's ``data`` section; importable without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from rollcast import build_section
from rollcast.contracts.config import LocalPath, NonNegative, Positive, PositiveOrOff, config

__all__ = ["DataConfig", "build_data_config"]


@config
class DataConfig:
    """Data files and their conversion to tokens."""

    dataset: str = "prompts"
    """Registry name of the dataset."""
    train_files: list[str] = field(default_factory=list)
    """Training rows: JSONL, JSON or Parquet files; globs are expanded in sorted order."""
    val_files: list[str] = field(default_factory=list)
    """Validation rows, as `train_files`."""
    prompt_key: str = "prompt"
    """Column of the prompt, a string or a list of chat messages. This and the keys below may be dotted to reach into
    a nested column, such as `reward_model.ground_truth`."""
    image_key: str = "images"
    """Column of the prompt's images, a list; may be missing. Each image takes the place of one `<image>` in the text of
    the messages, or of a part of type `image` without one of its own. Needs a vision-language model."""
    ground_truth_key: str | None = "ground_truth"
    """Column of the reference answer; null if the task has none. With the default, a row without such a column has the
    answer of `reward_model.ground_truth`, as in verl's files."""
    response_key: str = "response"
    """Column of the response, read by the dataset `supervised`. With the default, a row without such a column may have
    its response in `completion`, or be a `text` alone, which is trained as a whole."""
    messages_key: str = "messages"
    """Column of the conversation, a list of chat messages, read by the dataset `conversations`."""
    tools_key: str = "tools"
    """Column of the tools that the chat template shows, a list of JSON schemas or its JSON text; may be missing. Agent
    loops offer them besides their own."""
    data_source_key: str = "data_source"
    """Column of the row's source name; a row without it has the source `""`."""
    max_prompt_length: Positive = 512
    """Longest prompt in tokens."""
    max_response_length: Positive = 512
    """Longest response in tokens, the end token included."""
    train_batch_size: Positive = 64
    """Prompts per training step."""
    val_batch_size: Positive | None = None
    """Prompts per validation batch; null for all at once."""
    shuffle: bool = True
    """Draw training rows in an order that depends on seed and epoch."""
    filter_overlong_prompts: bool = True
    """Leave out rows whose prompt is longer than `max_prompt_length`."""
    truncation: Literal["error", "left", "right"] = "error"
    """Treatment of longer prompts that are not left out: `error`, or truncation at the `left` or the `right`."""
    val_max_samples: PositiveOrOff = -1
    """Number of rows, from the first, for validation and `rollcast eval`; -1 for all."""
    num_workers: NonNegative = 0
    """Number of processes that tokenize and collate ahead; 0 to do both in the trainer's process."""
    apply_chat_template: Literal["auto", "always", "never"] = "auto"
    """`auto` applies the tokenizer's template to prompts that are lists of messages, `always` wraps a string as one
    user message first, `never` joins the messages' contents with newlines."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the chat template, such as `enable_thinking`; a column `chat_template_kwargs` overrides them
    in its row."""
    preprocess: str | None = None
    """Registry name of a preprocessor, run before training if `preprocess_dir` lacks the files; null for none."""
    preprocess_dir: LocalPath | None = None
    """Folder that the preprocessor writes into."""
    preprocess_source: LocalPath | None = None
    """Folder that the preprocessor reads; null if it generates its data."""


def build_data_config(config: DataConfig | Mapping[str, Any]) -> DataConfig:
    """Return the schema's instance for a mapping of some of its keys; return an instance unchanged.

    Raises:
        ConfigError: An unknown key, with the nearest valid one, or a value that the schema refuses.
    """
    if isinstance(config, DataConfig):
        return config
    values = dict(config)
    for key in ("train_files", "val_files"):
        if isinstance(values.get(key), str):
            values[key] = [values[key]]
    return build_section(DataConfig, values, "data", closed=True)
