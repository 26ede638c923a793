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
from rollcast_data.encoding import (
    Ids,
    encode_prompts,
    encode_texts,
    fit_prompts,
    image_columns,
    join_ids,
    read_images,
    reply_endings,
)
from rollcast_data.files import Row, read_files
from rollcast_data.messages import COMPLETION
from rollcast_data.prompts import require_pad_id
from rollcast_data.schemas import DataConfig, build_data_config

__all__ = ["SupervisedDataset", "SupervisedRow"]

#: Column of a text without a prompt.
TEXT = "text"

_log = logging.getLogger("rollcast.data")


@dataclass(frozen=True)
class SupervisedRow:
    """A prompt and its response as ids; the response ends with a stop token unless it was truncated."""

    index: int
    prompt_ids: Ids
    response_ids: Ids
    multi_modal_data: dict[str, tuple[bytes, ...]] | None = None


class SupervisedDataset(BaseDataset):
    """Prompts with responses, or texts, for a supervised loss on the response's or the text's tokens.

    The prompt is encoded as in :class:`~rollcast_data.prompts.PromptDataset`. A response to a prompt that the chat
    template renders ends as the template ends a reply, up to its stop token; any other response is tokenized on its own
    and ends with the tokenizer's end token. A response of more than
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
        # Checked before tokenizing, which takes longer.
        texts = [self._text(row) for row in rows]
        whole = [text.is_whole for text in texts]
        if any(whole) and not all(whole):
            odd = rows[whole.index(not whole[0])]
            raise DataError(
                f"{odd.location}: the row has the columns {', '.join(odd.values)}, unlike the first, which has "
                f"{', '.join(rows[0].values)}; all rows need a prompt with a response, or all need {TEXT!r} alone"
            )
        if all(whole):
            pairs = _split_texts(rows, encode_texts([text.text for text in texts], tokenizer, special=True), eos_id)
        else:
            prompts = encode_prompts(rows, tokenizer, self.config)
            endings = reply_endings(rows, tokenizer, self.config)
            replies = [text.text + ending for text, ending in zip(texts, endings, strict=True)]
            responses = encode_texts(replies, tokenizer, special=False)
            pairs = [
                (_Pair(row, response if ending else [*response, eos_id]), prompt)
                for row, prompt, response, ending in zip(rows, prompts, responses, endings, strict=True)
            ]
        fitting = fit_prompts([pair for pair, _ in pairs], [prompt for _, prompt in pairs], self.config)
        self._rows = self._join(fitting)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> SupervisedRow:
        return self._rows[index]

    def collate(self, rows: list[SupervisedRow]) -> DataProto:
        """Return a batch of prompts and responses.

        Returns:
            Jagged ``prompts`` and ``responses`` int32 and ``response_mask`` bool; ``index`` int64 ``[B]``; and the
            object column ``multi_modal_data`` if a row has images.
        """
        responses = join_ids([row.response_ids for row in rows])
        return DataProto.from_dict(
            tensors={
                "prompts": join_ids([row.prompt_ids for row in rows]).column(),
                "responses": responses.column(),
                "response_mask": responses.like(torch.ones(len(responses.values), dtype=torch.bool)),
                "index": torch.tensor([row.index for row in rows], dtype=torch.int64),
            },
            non_tensors=image_columns([row.multi_modal_data for row in rows]),
        )

    def _text(self, row: Row) -> _Text:
        """Return the text to imitate.

        Raises:
            DataError: the row has none, or it is no string.
        """
        key = self.config.response_key
        is_default = key == DataConfig.response_key
        has_prompt = row.find(self.config.prompt_key) is not None
        names = [key, *((COMPLETION if has_prompt else TEXT,) if is_default else ())]
        name = next((name for name in names if row.find(name) is not None), None)
        if name is None:
            more = f", and no {COMPLETION!r} or {TEXT!r} in its place" if is_default else ""
            hint = ""
            if row.find(self.config.messages_key) is not None:
                hint = "; data=conversations reads messages"
            elif row.find("chosen") is not None:
                hint = "; pairs of chosen and rejected replies are not trained on"
            raise DataError(
                f"{row.location}: the row has no column {key!r} (data.response_key){more}; its columns: "
                f"{', '.join(row.values) or 'none'}{hint}"
            )
        value = row.find(name)
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            raise DataError(
                f"{row.location}: {name} is a list of messages, which data=conversations reads; data=supervised reads "
                "strings"
            )
        if not isinstance(value, str):
            raise DataError(f"{row.location}: a response ({name}) is a string, this is {type(value).__name__}")
        is_whole = name == TEXT and is_default and not has_prompt
        if is_whole and not value:
            raise DataError(f"{row.location}: {TEXT} is empty")
        return _Text(value, is_whole)

    def _join(self, fitting: list[tuple[_Pair, Ids]]) -> list[SupervisedRow]:
        limit = self.config.max_response_length
        joined: list[SupervisedRow] = []
        overlong = 0
        for index, (pair, prompt) in enumerate(fitting):
            ids = pair.response
            if len(ids) > limit:
                overlong += 1
                if self.config.truncation == "error":
                    raise DataError(
                        f"{pair.location}: the response has {len(ids)} tokens with its end token, more than "
                        f"data.max_response_length={limit}; raise it, or set data.truncation to right to cut it"
                    )
            joined.append(SupervisedRow(index, prompt, ids[:limit], read_images(pair.row, self.config)))
        if overlong:
            _log.info("%d of %d responses have more than %d tokens and are cut", overlong, len(joined), limit)
        return joined


@dataclass(frozen=True)
class _Text:
    """The text of a row to imitate; ``is_whole`` if no prompt precedes it."""

    text: str
    is_whole: bool


@dataclass(frozen=True)
class _Pair:
    """A row and the ids of its response, with the tokens that end it."""

    row: Row
    response: Ids

    @property
    def location(self) -> str:
        return self.row.location


def _split_texts(rows: Sequence[Row], texts: Sequence[Ids], eos_id: int) -> list[tuple[_Pair, Ids]]:
    """Return each text as a prompt of its first token and the rest as a response.

    Nothing predicts the first token of a text, so this trains the same tokens as a text without a prompt.
    """
    bare = [ids[:-1] if len(ids) > 1 and ids[-1] == eos_id else ids for ids in texts]
    return [(_Pair(row, [*ids[1:], eos_id]), ids[:1]) for row, ids in zip(rows, bare, strict=True)]
