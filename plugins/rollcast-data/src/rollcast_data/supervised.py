"""The dataset ``supervised``: prompts with responses to imitate, in the layout of the engines."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rollcast.errors import ConfigError, DataError
from rollcast.protocol import DataProto
from rollcast_data.contract import BaseDataset
from rollcast_data.encoding import Ids, encode_prompts, encode_texts, fit_prompts, join_ids
from rollcast_data.files import Row, read_files
from rollcast_data.prompts import require_pad_id
from rollcast_data.schemas import DataConfig, build_data_config

__all__ = ["SupervisedDataset", "SupervisedRow"]

_log = logging.getLogger("rollcast.data")


@dataclass(frozen=True)
class SupervisedRow:
    """A prompt and its response as ids; the response ends with the end token unless it was truncated."""

    index: int
    prompt_ids: Ids
    response_ids: Ids


class SupervisedDataset(BaseDataset):
    """Prompts with responses, for a supervised loss on the response's tokens.

    The prompt is encoded as in :class:`~rollcast_data.prompts.PromptDataset`; the response's text
    is tokenized on its own, and the end token appended. A response of more than
    ``max_response_length`` tokens is an error with ``truncation: error``. Otherwise it is truncated at its end,
    including the end token; truncating the beginning would teach the model to omit it.

    Args:
        files: JSONL or Parquet files or globs, in order.
        tokenizer: tokenizer of the model, with a pad and an end token.
        config: section ``data`` of the config.

    Raises:
        DataError: a file or row is missing or malformed, or no prompt is short enough.
        ConfigError: a key of ``config`` is wrong, or the tokenizer lacks a token.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig | Mapping[str, Any],
    ) -> None:
        self.config = build_data_config(config)
        require_pad_id(tokenizer)
        eos_id = tokenizer.eos_token_id
        if not isinstance(eos_id, int):
            raise ConfigError("the tokenizer has no end token, so no response could end")
        rows = read_files(files)
        for row in rows:
            self._response(row)  # checked before tokenizing, which takes longer
        kept = fit_prompts(rows, encode_prompts(rows, tokenizer, self.config), self.config)
        texts = [self._response(row) for row, _ in kept]
        responses = encode_texts(texts, tokenizer, special=False)
        self._rows = self._join(kept, responses, eos_id)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> SupervisedRow:
        return self._rows[index]

    def collate(self, rows: list[SupervisedRow]) -> DataProto:
        """Return a batch of prompts and responses.

        Returns:
            Jagged ``prompts`` and ``responses`` int32 and ``response_mask`` bool; ``index`` int64 ``[B]``.
        """
        responses = join_ids([row.response_ids for row in rows])
        return DataProto.from_dict(
            tensors={
                "prompts": join_ids([row.prompt_ids for row in rows]).column(),
                "responses": responses.column(),
                "response_mask": responses.like(torch.ones(len(responses.values), dtype=torch.bool)),
                "index": torch.tensor([row.index for row in rows], dtype=torch.int64),
            }
        )

    def _response(self, row: Row) -> str:
        value = row.get(self.config.response_key, "data.response_key")
        if not isinstance(value, str):
            raise DataError(f"{row.location}: a response is a string, this is {type(value).__name__}")
        return value

    def _join(self, kept: list[tuple[Row, Ids]], responses: list[Ids], eos_id: int) -> list[SupervisedRow]:
        limit = self.config.max_response_length
        joined: list[SupervisedRow] = []
        overlong = 0
        for index, ((row, prompt), response) in enumerate(zip(kept, responses, strict=True)):
            ids = [*response, eos_id]
            if len(ids) > limit:
                overlong += 1
                if self.config.truncation == "error":
                    raise DataError(
                        f"{row.location}: the response has {len(ids)} tokens with its end token, more than "
                        f"data.max_response_length={limit}; raise it, or set data.truncation to right to cut it"
                    )
            joined.append(SupervisedRow(index, prompt, ids[:limit]))
        if overlong:
            _log.info("%d of %d responses have more than %d tokens and are cut", overlong, len(joined), limit)
        return joined
