"""The dataset ``prompts``: prompts to generate from, and reference answers for the reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rollcast.errors import ConfigError
from rollcast.protocol import DataProto
from rollcast_data.contract import BaseDataset
from rollcast_data.encoding import Ids, encode_prompts, fit_prompts, join_ids, raw_prompt
from rollcast_data.files import Row, read_files
from rollcast_data.schemas import DataConfig, build_data_config

__all__ = ["PromptDataset", "PromptRow", "other_columns", "require_pad_id"]


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
            self._ground_truth(row)  # checked before tokenizing, which takes longer
        prompts = encode_prompts(rows, tokenizer, self.config)
        self._rows = fit_prompts(rows, prompts, self.config)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> PromptRow:
        row, ids = self._rows[index]
        return PromptRow(
            index=index % len(self._rows),
            input_ids=ids,
            raw_prompt=raw_prompt(row, self.config),
            ground_truth=self._ground_truth(row),
            data_source=str(row.find(self.config.data_source_key) or ""),
            extra_info=other_columns(row, self.config),
        )

    def collate(self, rows: list[PromptRow]) -> DataProto:
        """Return a batch of prompts.

        Returns:
            Jagged ``prompts`` int32 and ``index`` int64 ``[B]``; object columns ``raw_prompt``, ``ground_truth``,
            ``data_source`` and ``extra_info``.
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
            },
        )

    def _ground_truth(self, row: Row) -> Any:
        key = self.config.ground_truth_key
        return None if key is None else row.get(key, "data.ground_truth_key")


def other_columns(row: Row, config: DataConfig) -> dict[str, Any]:
    """Return a row's columns that no key of the config names, with the content of a column ``extra_info``."""
    used = {config.prompt_key, config.ground_truth_key, config.data_source_key, "extra_info"}
    others = {key: value for key, value in row.values.items() if key not in used}
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
