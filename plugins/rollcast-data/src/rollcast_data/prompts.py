"""The dataset ``prompts``: prompts to generate from, and reference answers for the reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rollcast.errors import ConfigError, DataError
from rollcast.protocol import DataProto
from rollcast_data.contract import BaseDataset
from rollcast_data.encoding import Ids, encode_prompts, fit_prompts, image_columns, join_ids, raw_prompt, read_images
from rollcast_data.files import Row, read_files
from rollcast_data.messages import COMPLETION, read_messages, read_tools
from rollcast_data.schemas import DataConfig, build_data_config

__all__ = [
    "PromptDataset",
    "PromptRow",
    "TaskDataset",
    "find_ground_truth",
    "ground_truth",
    "other_columns",
    "require_pad_id",
]

_GROUND_TRUTH = "ground_truth"
#: Place of the answer in verl's files.
_VERL_GROUND_TRUTH = "reward_model.ground_truth"


@dataclass(frozen=True)
class PromptRow:
    """One prompt as ids, and the other columns of its row.

    ``index`` is the row's position in the dataset; ``extra_info`` holds the row's other columns,
    merged with the content of a column ``extra_info``.
    """

    index: int
    input_ids: Ids
    raw_prompt: str | list[dict[str, Any]]
    ground_truth: Any
    data_source: str
    extra_info: Mapping[str, Any]
    multi_modal_data: dict[str, tuple[bytes, ...]] | None = None


class PromptDataset(BaseDataset):
    """Prompts with reference answers.

    All prompts are tokenized when the dataset is built, so a bad row is reported before training
    starts.

    Args:
        files: JSONL or Parquet files or globs, in order.
        tokenizer: tokenizer of the model, with a pad token.
        config: section ``data`` of the config.

    Raises:
        DataError: a file or row is missing or malformed, or no prompt is short enough.
        ConfigError: a key of ``config`` is wrong, or the tokenizer has no pad token.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig | Mapping[str, Any],
    ) -> None:
        self.config = build_data_config(config)
        require_pad_id(tokenizer)
        rows = read_files(files)
        for row in rows:
            # Checked before tokenizing, which takes longer.
            self.answer(row)
            read_tools(row, self.config.tools_key)
        prompts = self.encode(rows, tokenizer)
        self._rows = fit_prompts(rows, prompts, self.config)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> PromptRow:
        row, ids = self._rows[index]
        return PromptRow(
            index=index % len(self._rows),
            input_ids=ids,
            raw_prompt=self.prompt(row),
            ground_truth=self.answer(row),
            data_source=str(row.find(self.config.data_source_key) or ""),
            extra_info=other_columns(row, self.config),
            multi_modal_data=read_images(row, self.config),
        )

    def answer(self, row: Row) -> Any:
        """Return the reference answer of a row.

        Raises:
            DataError: the row has none.
        """
        return ground_truth(row, self.config)

    def prompt(self, row: Row) -> str | list[dict[str, Any]]:
        """Return the prompt of a row.

        Raises:
            DataError: the row has none, or it is malformed.
        """
        return raw_prompt(row, self.config)

    def encode(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[Ids]:
        """Return the token ids of each row's prompt."""
        return encode_prompts(rows, tokenizer, self.config)

    def collate(self, rows: list[PromptRow]) -> DataProto:
        """Return a batch of prompts.

        Returns:
            Jagged ``prompts`` int32 and ``index`` int64 ``[B]``; object columns ``raw_prompt``, ``ground_truth``,
            ``data_source`` and ``extra_info``; and ``multi_modal_data`` if a row has images.
        """
        return DataProto.from_dict(
            tensors={
                "prompts": join_ids([row.input_ids for row in rows]).column(),
                "index": torch.tensor([row.index for row in rows], dtype=torch.int64),
            },
            non_tensors={
                "raw_prompt": [row.raw_prompt for row in rows],
                "ground_truth": [row.ground_truth for row in rows],
                "data_source": [row.data_source for row in rows],
                "extra_info": [dict(row.extra_info) for row in rows],
                **image_columns([row.multi_modal_data for row in rows]),
            },
        )


class TaskDataset(PromptDataset):
    """Rows for environments, which write the first message and score: answer and prompt may be missing or empty."""

    def answer(self, row: Row) -> Any:
        return find_ground_truth(row, self.config)

    def prompt(self, row: Row) -> str | list[dict[str, Any]]:
        return super().prompt(row) if row.find(self.config.prompt_key) else []

    def encode(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[Ids]:
        """Return the token ids of each row's prompt; the pad token for a row without one."""
        with_prompt = [number for number, row in enumerate(rows) if self.prompt(row)]
        encoded = super().encode([rows[number] for number in with_prompt], tokenizer)
        ids_by_row = dict(zip(with_prompt, encoded, strict=True))
        empty = [require_pad_id(tokenizer)]
        return [ids_by_row.get(number, empty) for number in range(len(rows))]


def find_ground_truth(row: Row, config: DataConfig) -> Any:
    """Return the reference answer of a row; None if it has none."""
    key = config.ground_truth_key
    if key is None:
        return None
    if key == _GROUND_TRUTH and key not in row.values:
        return row.find(_VERL_GROUND_TRUTH)
    if key == DataConfig.response_key and key not in row.values:
        return _completion(row)
    return row.find(key)


def _completion(row: Row) -> Any:
    """Return the text of a row's completion, the first reply if it is a list of messages; None if it has none."""
    value = row.find(COMPLETION)
    if not isinstance(value, list):
        return value
    replies = [message for message in read_messages(row, value, COMPLETION) if message["role"] == "assistant"]
    return replies[0]["content"] if replies else None


def ground_truth(row: Row, config: DataConfig) -> Any:
    """Return the reference answer of a row; None if the config names no column.

    Raises:
        DataError: the row has no answer, or it is null.
    """
    key = config.ground_truth_key
    truth = find_ground_truth(row, config)
    if key is None or truth is not None:
        return truth
    try:
        return row.get(key, "data.ground_truth_key")
    except DataError as error:
        raise DataError(f"{error}; set the key to the answer's column, or to null if there is none") from None


def other_columns(row: Row, config: DataConfig) -> dict[str, Any]:
    """Return a row's columns besides prompt, source and ``ground_truth``, with the content of ``extra_info``.

    An answer in a column of another name stays there too, for rewards that read it by its name. Tools are parsed.
    """
    used = {config.prompt_key, config.data_source_key, config.image_key, "extra_info"}
    used |= {_GROUND_TRUTH} if config.ground_truth_key == _GROUND_TRUTH else set()
    others = {key: value for key, value in row.values.items() if key not in used}
    if config.tools_key in others:
        others |= {config.tools_key: read_tools(row, config.tools_key)}
    nested = row.values.get("extra_info")
    return others | dict(nested) if isinstance(nested, Mapping) else others


def require_pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the tokenizer's pad id.

    Raises:
        ConfigError: the tokenizer has no pad token.
    """
    pad_id = tokenizer.pad_token_id
    if not isinstance(pad_id, int):
        raise ConfigError("the tokenizer has no pad token; load it with rollcast_data.tokenizer.load_tokenizer")
    return pad_id
