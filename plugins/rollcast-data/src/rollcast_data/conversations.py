"""The dataset ``conversations``: multi-turn conversations with replies to imitate, in the layout of the engines.

A row of a file::

    {"messages": [{"role": "user", "content": "6 * 7?"},
                  {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {...}}]},
                  {"role": "tool", "content": "42"},
                  {"role": "assistant", "content": "It is 42.", "weight": 1}],
     "tools": [{"type": "function", "function": {...}}]}

or a prompt and the messages that follow, of which the replies are trained and those of the prompt are not::

    {"prompt": [{"role": "user", "content": "6 * 7?"}], "completion": [{"role": "assistant", "content": "42"}]}
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rollcast.errors import ConfigError, DataError, RendererError
from rollcast.protocol import DataProto
from rollcast_data.chat_template import ChatTemplate, join_replies
from rollcast_data.contract import BaseDataset
from rollcast_data.encoding import Ids, encode_texts, fit_prompts, join_ids
from rollcast_data.files import Row, read_files
from rollcast_data.messages import COMPLETION, ChatOptions, read_chat_options, read_messages
from rollcast_data.prompts import require_pad_id
from rollcast_data.schemas import DataConfig, build_data_config

__all__ = ["ConversationDataset", "ConversationRow"]

_log = logging.getLogger("rollcast.data")

_Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ConversationRow:
    """The ids of a first prompt and of the rest of the conversation, and a mask of the trained ids."""

    index: int
    prompt_ids: Ids
    response_ids: Ids
    trained: Sequence[bool]


@dataclass(frozen=True)
class _Piece:
    """A text that is tokenized separately: a trained reply with its stop token, or the text between two replies."""

    text: str
    trained: bool


@dataclass(frozen=True)
class _Chain:
    """A prompt and the texts that extend it, each a prefix of the next; a conversation has one or several chains.

    ``adds_end`` is True if the end token follows each reply, because the template writes no token that ends one.
    """

    location: str
    prompt: str
    pieces: list[_Piece]
    adds_end: bool


class ConversationDataset(BaseDataset):
    """Conversations of several turns, for a supervised loss on the assistant's replies.

    The tokenizer's chat template renders the conversation without and with each trained reply. The tokens of the reply
    and its stop token are trained; text of the template, users and tools is not. A message with ``weight: 0`` is not
    trained. Replies are tokenized separately, as in agent loops, in which they are sampled.

    If the template changes earlier text, for example by dropping earlier thinking, the conversation becomes several
    rows, so that each reply is trained after the text that a model would see.

    Args:
        files: JSONL or Parquet files or globs, in order.
        tokenizer: tokenizer of the model, with a chat template, a pad and an end token.
        config: section ``data`` of the config.

    Raises:
        DataError: a file or row is missing or malformed, or no first prompt is short enough.
        ConfigError: a key of ``config`` is wrong, or the tokenizer lacks a token or the template.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig | Mapping[str, Any],
    ) -> None:
        self.config = build_data_config(config)
        require_pad_id(tokenizer)
        if self.config.apply_chat_template == "never":
            raise ConfigError(
                "data.apply_chat_template is 'never', but data.dataset=conversations renders by the template; "
                "leave it at auto"
            )
        template = _Template(tokenizer)
        rows = read_files(files)
        chains = [chain for row in rows for chain in self._chains(row, template)]
        prompts = encode_texts([chain.prompt for chain in chains], tokenizer, special=False)
        self._rows = self._join(fit_prompts(chains, prompts, self.config), tokenizer, template)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> ConversationRow:
        return self._rows[index]

    def collate(self, rows: list[ConversationRow]) -> DataProto:
        """Return a batch of first prompts and the rest of the conversations.

        Returns:
            Jagged ``prompts`` and ``responses`` int32 and ``response_mask`` bool, which has gaps; ``index`` int64
            ``[B]``.
        """
        responses = join_ids([row.response_ids for row in rows])
        trained = torch.tensor([is_trained for row in rows for is_trained in row.trained], dtype=torch.bool)
        return DataProto.from_dict(
            tensors={
                "prompts": join_ids([row.prompt_ids for row in rows]).column(),
                "responses": responses.column(),
                "response_mask": responses.like(trained),
                "index": torch.tensor([row.index for row in rows], dtype=torch.int64),
            }
        )

    def _chains(self, row: Row, template: _Template) -> list[_Chain]:
        messages, first, prefill = self._messages(row)
        options = read_chat_options(row, self.config)
        ending = template.ending(row, options)
        chains: list[_Chain] = []
        so_far = ""
        for number, message in enumerate(messages):
            if not _is_trained(row, number, message) or number < first:
                continue
            opened = [*messages[:number], *(prefill if number == first else ())]
            before = template.prompt(row, opened, options, continues=bool(prefill) and number == first)
            unclosed = template.unclosed(row, messages[: number + 1], options, before)
            reply = _reply(row, number, before, unclosed)
            _require_calls(row, number, message, reply)
            if chains and before.startswith(so_far):
                chains[-1].pieces.append(_Piece(before[len(so_far) :], trained=False))
            else:
                chains.append(_Chain(row.location, before, [], ending == ""))
            chains[-1].pieces.append(_Piece(reply + ending, trained=True))
            so_far = unclosed + ending
        if not chains:
            raise DataError(f"{row.location}: no message of the conversation is a reply to train")
        return chains

    def _messages(self, row: Row) -> tuple[list[dict[str, Any]], int, list[dict[str, Any]]]:
        """Return the conversation of a row, the number of its first message that may be trained, and its prefill.

        A prompt that ends with a message of the assistant is a prefill, of which the completion's first reply is the
        rest: the two are one message of the conversation.

        Raises:
            DataError: the row has neither messages nor a prompt with a completion, or one of them is malformed.
        """
        key, prompt_key = self.config.messages_key, self.config.prompt_key
        if row.find(key) is not None:
            return read_messages(row, row.find(key), key), 0, []
        prompt, completion = row.find(prompt_key), row.find(COMPLETION)
        if prompt is None or completion is None:
            raise DataError(
                f"{row.location}: the row has no column {key!r} (data.messages_key) with a conversation, and no "
                f"{prompt_key!r} with {COMPLETION!r}; its columns: {', '.join(row.values) or 'none'}"
            )
        if isinstance(prompt, str) and isinstance(completion, str):
            raise DataError(
                f"{row.location}: {prompt_key} and {COMPLETION} are texts, which data=supervised reads; "
                "data=conversations reads lists of messages"
            )
        messages, more = read_messages(row, prompt, prompt_key), read_messages(row, completion, COMPLETION)
        if messages[-1]["role"] != "assistant" or more[0]["role"] != "assistant":
            return [*messages, *more], len(messages), []
        (whole,) = join_replies([messages[-1], more[0]])
        return [*messages[:-1], dict(whole), *more[1:]], len(messages) - 1, messages[-1:]

    def _join(
        self, fitting: list[tuple[_Chain, Ids]], tokenizer: PreTrainedTokenizerBase, template: _Template
    ) -> list[ConversationRow]:
        texts = [piece.text for chain, _ in fitting for piece in chain.pieces]
        encoded = iter(encode_texts(texts, tokenizer, special=False))
        joined: list[ConversationRow] = []
        overlong = 0
        for chain, prompt in fitting:
            ids, trained = _joined_pieces(chain, encoded, template.end_ids if chain.adds_end else [])
            if len(ids) > self.config.max_response_length:
                overlong += 1
                ids, trained = self._cut(chain, ids, trained)
            joined.append(ConversationRow(len(joined), prompt, ids, trained))
        if overlong:
            limit = self.config.max_response_length
            _log.info("%d of %d conversations have more than %d tokens and are cut", overlong, len(fitting), limit)
        return joined

    def _cut(self, chain: _Chain, ids: list[int], trained: list[bool]) -> tuple[list[int], list[bool]]:
        limit = self.config.max_response_length
        if self.config.truncation == "error":
            raise DataError(
                f"{chain.location}: the conversation has {len(ids)} tokens behind its first prompt, more than "
                f"data.max_response_length={limit}; raise it, or set data.truncation to right to cut it"
            )
        return ids[:limit], trained[:limit]


class _Template:
    """A tokenizer's chat template, whose errors name the row."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if tokenizer.chat_template is None:
            raise ConfigError("data.dataset=conversations: the tokenizer has no chat template; choose a model with one")
        if not isinstance(tokenizer.eos_token_id, int):
            raise ConfigError("the tokenizer has no end token, so no reply could end")
        self._template = ChatTemplate(tokenizer, "data.dataset=conversations")
        self.end_ids = [tokenizer.eos_token_id]

    def prompt(self, row: Row, messages: _Messages, options: ChatOptions, continues: bool) -> str:
        """Return the text before a reply: with the assistant's turn opened, or with its prefill to continue."""
        render = self._template.prompt if continues else self._template.opened
        with _named(row, len(messages)):
            return render(_plain(messages), options.tools, options.kwargs)

    def unclosed(self, row: Row, messages: _Messages, options: ChatOptions, before: str) -> str:
        """Return the text up to the end of the last message, a reply after the text ``before``.

        Raises:
            DataError: the template closes the reply otherwise than others.
        """
        with _named(row, len(messages)):
            text = self._template.unclosed(_plain(messages), options.tools, options.kwargs)
            if text is not None:
                return text
            closing = self._template.closing(options.kwargs).text
            whole = self._template.text(_plain(messages), options.tools, options.kwargs)
        raise DataError(
            f"{row.location}: message {len(messages) - 1} cannot be trained: the chat template ends it with "
            f"{whole.removeprefix(before)[-40:]!r} and not with {closing!r}, as other replies"
        )

    def ending(self, row: Row, options: ChatOptions) -> str:
        """Return the text with which a reply ends, up to its stop token; empty if the template writes no such token."""
        with _named(row, 2):
            return self._template.closing(options.kwargs).ending


def _plain(messages: _Messages) -> list[dict[str, Any]]:
    return [{key: item for key, item in message.items() if key != "weight"} for message in messages]


@contextmanager
def _named(row: Row, count: int) -> Iterator[None]:
    try:
        yield
    except RendererError as error:
        raise DataError(f"{row.location}: the chat template refuses the first {count} messages: {error}") from error


def _reply(row: Row, number: int, before: str, unclosed: str) -> str:
    """Return the text of message ``number``, which the template wrote after ``before``."""
    if not unclosed.startswith(before):
        raise DataError(
            f"{row.location}: message {number} cannot be trained: the chat template renders the conversation with "
            "the reply otherwise than before it, so the reply's tokens are unknown; set its weight to 0, or use "
            "another template"
        )
    return unclosed[len(before) :]


def _require_calls(row: Row, number: int, message: Mapping[str, Any], reply: str) -> None:
    """Raise if the template leaves tool calls out, as one for a model without tools does: an empty reply is trained."""
    names = [str(call["function"]["name"]) for call in message.get("tool_calls", ())]
    if missing := [name for name in names if name not in reply]:
        raise DataError(
            f"{row.location}: message {number} cannot be trained: the chat template does not write its tool call of "
            f"{missing[0]!r}; set its weight to 0, or use a model whose template writes tool calls"
        )


def _joined_pieces(chain: _Chain, encoded: Iterator[Ids], end_ids: list[int]) -> tuple[list[int], list[bool]]:
    ids: list[int] = []
    trained: list[bool] = []
    for piece in chain.pieces:
        own = [*next(encoded), *(end_ids if piece.trained else ())]
        ids += own
        trained += [piece.trained] * len(own)
    return ids, trained


def _is_trained(row: Row, number: int, message: Mapping[str, Any]) -> bool:
    weight = message.get("weight", 1)
    if type(weight) not in (int, float) or weight not in (0, 1):
        raise DataError(f"{row.location}: message {number} has the weight {weight!r}; valid: 0, 1")
    return weight == 1 and str(message["role"]) == "assistant"
