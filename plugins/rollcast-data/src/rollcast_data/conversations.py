"""The dataset ``conversations``: chats of several turns, of which the assistant's messages are imitated."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rollcast.errors import ConfigError, DataError
from rollcast.protocol import DataProto
from rollcast_data.contract import BaseDataset
from rollcast_data.encoding import Ids, join_ids
from rollcast_data.files import Row, read_files
from rollcast_data.prompts import require_pad_id
from rollcast_data.schemas import DataConfig, build_data_config

__all__ = ["ConversationDataset", "ConversationRow"]

_log = logging.getLogger("rollcast.data")


@dataclass(frozen=True)
class ConversationRow:
    """A conversation as ids.

    Attributes:
        index: position in the dataset.
        prompt_ids: ids before the first trained reply.
        response_ids: ids from that reply on.
        trained: for each of ``response_ids``, 1 if the token is imitated, else 0.
    """

    index: int
    prompt_ids: Ids
    response_ids: Ids
    trained: Sequence[int]


class ConversationDataset(BaseDataset):
    """Conversations, for a supervised loss on the assistant's messages.

    A row has messages in OpenAI's chat format, with calls and results of tools if there are any, and perhaps
    ``tools``. An assistant's message with ``weight: 0`` is not trained, as in OpenAI's format for fine-tuning. The
    tokenizer's chat template renders the conversation message by message, and each piece is tokenized on its own, as
    if the model had sampled the replies; a reply is trained up to its end token. Messages after the last reply are
    left out.

    Args:
        files: JSONL or Parquet files or globs, in order.
        tokenizer: tokenizer of the model, with a chat template, a pad and an end token.
        config: section ``data`` of the config.

    Raises:
        DataError: a file or row is missing or malformed, has no reply, or is too long; or the template rewrites earlier
            messages, so that no sequence of tokens holds the whole conversation.
        ConfigError: the tokenizer lacks a template or a token.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig | Mapping[str, Any],
    ) -> None:
        self.config = build_data_config(config)
        require_pad_id(tokenizer)
        if tokenizer.chat_template is None:
            raise ConfigError("data.dataset=conversations needs a tokenizer with a chat template")
        if not isinstance(tokenizer.eos_token_id, int):
            raise ConfigError("the tokenizer has no end token, so no reply could end")
        self._tokenizer = tokenizer
        self._rows: list[ConversationRow] = []
        rows = read_files(files)
        for row in rows:
            encoded = self._encode(row, len(self._rows))
            if encoded is not None:
                self._rows.append(encoded)
        if not self._rows:
            raise DataError(
                f"no row is left: the prompts of all {len(rows)} rows have more than data.max_prompt_length="
                f"{self.config.max_prompt_length} tokens"
            )
        if len(self._rows) < len(rows):
            _log.info("%d of %d conversations have longer prompts and are left out", len(rows) - len(self), len(rows))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> ConversationRow:
        return self._rows[index]

    def collate(self, rows: list[ConversationRow]) -> DataProto:
        """Return a batch of conversations.

        Returns:
            Jagged ``prompts`` and ``responses`` int32 and ``response_mask`` bool, True where a token is trained;
            ``index`` int64 ``[B]``.
        """
        responses = join_ids([row.response_ids for row in rows])
        trained = join_ids([row.trained for row in rows])
        return DataProto.from_dict(
            tensors={
                "prompts": join_ids([row.prompt_ids for row in rows]).column(),
                "responses": responses.column(),
                "response_mask": responses.like(trained.values.bool()),
                "index": torch.tensor([row.index for row in rows], dtype=torch.int64),
            }
        )

    # ---- encoding ----

    def _encode(self, row: Row, index: int) -> ConversationRow | None:
        """Return a row as ids; None if its prompt is too long and such rows are left out."""
        messages, tools = self._messages(row), row.find(self.config.tools_key) or None
        replies = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        # Replies before the first trained one are part of the prompt.
        while replies and not messages[replies[0]].get("weight", 1):
            del replies[0]
        if not replies:
            raise DataError(f"{row.location}: no message of the role assistant has a weight, so nothing can be learned")
        text = self._text(row, messages[: replies[0]], tools, prompt=True)
        prompt = self._ids(text)
        if not self._fits(row, len(prompt)):
            return None
        ids, trained = array("i"), array("b")
        for number in replies:
            before = self._text(row, messages[:number], tools, prompt=True)
            given = self._ids(self._rest(row, before, text, number))
            text = self._text(row, messages[: number + 1], tools, prompt=False)
            reply = self._ids(self._rest(row, text, before, number))
            ids += array("i", [*given, *reply])
            weight = messages[number].get("weight", 1)
            trained += array("b", [0] * len(given) + self._mask(reply, bool(weight)))
        limit = self.config.max_response_length
        if len(ids) > limit and self.config.truncation == "error":
            raise DataError(
                f"{row.location}: the conversation has {len(ids)} tokens from its first trained reply on, more than "
                f"data.max_response_length={limit}; raise it, or set data.truncation to right to cut it"
            )
        return ConversationRow(index, prompt, ids[:limit], trained[:limit])

    def _messages(self, row: Row) -> list[dict[str, Any]]:
        value = row.get(self.config.messages_key, "data.messages_key")
        if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
            raise DataError(f"{row.location}: a conversation is a list of messages, this is a {type(value).__name__}")
        # A Parquet column has one set of keys for all messages; those that a message lacks are null.
        messages = [{key: item for key, item in message.items() if item is not None} for message in value]
        for number, message in enumerate(messages):
            if not isinstance(message.get("role"), str):
                raise DataError(f"{row.location}: message {number} has no 'role' that is a string")
            if message.get("weight", 1) not in (0, 1):
                raise DataError(f"{row.location}: message {number} has the weight {message['weight']!r}; it is 0 or 1")
            message.setdefault("content", "")
        return messages

    def _fits(self, row: Row, length: int) -> bool:
        limit = self.config.max_prompt_length
        if length <= limit:
            return True
        if self.config.filter_overlong_prompts:
            return False
        raise DataError(
            f"{row.location}: the messages before the first trained reply have {length} tokens, more than "
            f"data.max_prompt_length={limit}; raise it, or set data.filter_overlong_prompts=true"
        )

    def _text(self, row: Row, messages: list[dict[str, Any]], tools: Any, prompt: bool) -> str:
        plain = [{key: item for key, item in message.items() if key != "weight"} for message in messages]
        try:
            return str(
                self._tokenizer.apply_chat_template(plain, tools=tools, tokenize=False, add_generation_prompt=prompt)
            )
        except Exception as error:  # a template is a program and may raise anything
            raise DataError(
                f"{row.location}: the chat template refuses this conversation: {type(error).__name__}: {error}"
            ) from error

    def _rest(self, row: Row, longer: str, shorter: str, number: int) -> str:
        if not longer.startswith(shorter):
            raise DataError(
                f"{row.location}: with message {number} the chat template writes the messages before it otherwise than "
                "without it (some leave out earlier thinking), so the conversation is no one sequence; make a row "
                "of each reply, with weight 0 for the replies before it"
            )
        return longer[len(shorter) :]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _mask(self, reply: Sequence[int], is_trained: bool) -> list[int]:
        """Return 1 for the tokens that the model would have sampled: all up to the end token."""
        if not is_trained:
            return [0] * len(reply)
        ends = [place for place, token in enumerate(reply) if token == self._tokenizer.eos_token_id]
        sampled = ends[-1] + 1 if ends else len(reply)
        return [1] * sampled + [0] * (len(reply) - sampled)
