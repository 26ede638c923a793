"""Conversion of prompts to token ids, and of ids to jagged columns; shared by the datasets.

Axes: ``B`` rows.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rollcast.contracts.rollout import MULTI_MODAL_DATA
from rollcast.errors import ConfigError, DataError, RendererError
from rollcast.protocol import Jagged
from rollcast_data.chat_template import ChatTemplate
from rollcast_data.files import Row
from rollcast_data.images import MARK, expand_images, has_images, split_images
from rollcast_data.messages import ChatOptions, describe, read_chat_options, read_messages
from rollcast_data.schemas import DataConfig
from rollcast_data.tokenizer import encode_texts as encode_with_special_tokens

__all__ = [
    "Ids",
    "encode_prompts",
    "encode_texts",
    "fit_prompts",
    "image_columns",
    "join_ids",
    "raw_prompt",
    "read_images",
    "reply_endings",
]

_log = logging.getLogger("rollcast.data")

Ids = Sequence[int]
_CHUNK = 1024


class _Located(Protocol):
    """An object with a position in a file, for messages."""

    @property
    def location(self) -> str: ...


_LocatedT = TypeVar("_LocatedT", bound=_Located)


def raw_prompt(row: Row, config: DataConfig) -> str | list[dict[str, Any]]:
    """Return the prompt of a row: its string, or its messages as :func:`read_messages` returns them.

    An image is the mark ``<image>`` in the text of its message.

    Raises:
        DataError: there is no prompt column, or the prompt is neither a string nor a list of messages with a role
            and a content.
    """
    value = row.get(config.prompt_key, "data.prompt_key")
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{row.location}: {config.prompt_key}, the prompt, is a string or a list of messages, this is "
            f"{describe(value)}"
        )
    if has_images(row, config):
        messages, _ = split_images(row, config)
        texts = ["".join(part.get("text", MARK) for part in message["content"]) for message in messages]
        value = [{**message, "content": text} for message, text in zip(messages, texts, strict=True)]
    return read_messages(row, value, f"the {config.prompt_key}")


def encode_prompts(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> list[Ids]:
    """Return the token ids of each row's prompt, of any length.

    An image's placeholder is repeated once for each of its tokens, as the model expects it.

    A string is tokenized with the special tokens that the tokenizer adds to a text; a BOS that it begins with is not
    added again. Messages are rendered by the chat template with the row's tools and options, and with the opening of
    the assistant's turn at the end, unless the last one is the assistant's, which the response continues. Without a
    template their contents are joined by newlines, and a warning is logged once.

    Raises:
        DataError: a prompt is malformed, empty, or refused by the template; names file and row.
        ConfigError: ``apply_chat_template`` is ``always`` and the tokenizer has no template.
    """
    template = ChatTemplate(tokenizer) if tokenizer.chat_template is not None else None
    if config.apply_chat_template == "always" and template is None:
        raise ConfigError("data.apply_chat_template is 'always', but the tokenizer has no chat template")
    plain: dict[int, str] = {}
    templated: dict[int, str] = {}
    images: dict[int, tuple[bytes, ...]] = {}
    joined = 0
    for number, row in enumerate(rows):
        if has_images(row, config):
            messages, images[number] = split_images(row, config)
            templated[number] = _render(row, messages, template, read_chat_options(row, config))
            continue
        prompt = raw_prompt(row, config)
        if template is not None and _is_rendered(prompt, config):
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            templated[number] = _render(row, messages, template, read_chat_options(row, config))
        elif isinstance(prompt, str):
            plain[number] = prompt
        else:
            joined += 1
            plain[number] = "\n".join(message["content"] for message in prompt)
    if joined and config.apply_chat_template != "never":
        _log.warning("the tokenizer has no chat template: the messages of %d prompts are joined by newlines", joined)
    encoded = dict(zip(plain, encode_texts(list(plain.values()), tokenizer, special=True), strict=True))
    encoded |= zip(templated, encode_texts(list(templated.values()), tokenizer, special=False), strict=True)
    for number, row in enumerate(rows):
        if not encoded[number]:
            raise DataError(f"{row.location}: the prompt has no tokens: {describe(row.get(config.prompt_key))}")
    prompts = [encoded[number] for number in range(len(rows))]
    return expand_images(rows, prompts, images, tokenizer) if images else prompts


def _is_rendered(prompt: str | list[dict[str, Any]], config: DataConfig) -> bool:
    """Return True for a prompt that a chat template renders if the tokenizer has one."""
    return config.apply_chat_template == "always" or (
        config.apply_chat_template == "auto" and not isinstance(prompt, str)
    )


def reply_endings(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> list[str]:
    """Return the text with which the chat template ends the reply to each row's prompt, up to its stop token.

    The text is empty for a prompt that :func:`encode_prompts` does not render by the template, and for a template that
    writes no such token; the tokenizer's end token then ends the reply.

    Raises:
        DataError: the template refuses a question with a reply.
    """
    if tokenizer.chat_template is None:
        return [""] * len(rows)
    template = ChatTemplate(tokenizer)
    endings = []
    for row in rows:
        ending = ""
        if has_images(row, config) or _is_rendered(raw_prompt(row, config), config):
            try:
                ending = template.closing(read_chat_options(row, config).kwargs).ending
            except RendererError as error:
                raise DataError(f"{row.location}: the chat template refuses a reply: {error}") from error
        endings.append(ending)
    return endings


def _render(row: Row, messages: list[dict[str, Any]], template: ChatTemplate | None, options: ChatOptions) -> str:
    if template is None:
        raise DataError(f"{row.location}: a prompt with images needs a chat template, and the tokenizer has none")
    try:
        return template.prompt(messages, options.tools, options.kwargs)
    except RendererError as error:
        raise DataError(f"{row.location}: the chat template refuses this prompt: {error}") from error


def encode_texts(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, special: bool) -> list[Ids]:
    """Return the token ids of each text, with or without the special tokens that the tokenizer adds.

    A BOS that the text begins with is not added again.
    """
    encoded: list[Ids] = []
    for start in range(0, len(texts), _CHUNK):
        chunk = list(texts[start : start + _CHUNK])
        if special:
            ids = encode_with_special_tokens(tokenizer, chunk)
        else:
            ids = tokenizer(chunk, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        # Arrays take a quarter of the memory of lists, and all prompts stay in memory.
        encoded += [array("i", row) for row in ids]
    return encoded


def fit_prompts(rows: Sequence[_LocatedT], prompts: Sequence[Ids], config: DataConfig) -> list[tuple[_LocatedT, Ids]]:
    """Drop or truncate rows whose prompts exceed ``max_prompt_length`` tokens; return the rest.

    Raises:
        DataError: a prompt is too long and ``truncation`` is ``error``, or no row is left.
    """
    limit = config.max_prompt_length
    fitting: list[tuple[_LocatedT, Ids]] = []
    overlong = 0
    for row, ids in zip(rows, prompts, strict=True):
        if len(ids) > limit:
            overlong += 1
            if config.filter_overlong_prompts:
                continue
            if config.truncation == "error":
                raise DataError(
                    f"{row.location}: the prompt has {len(ids)} tokens, more than data.max_prompt_length={limit}; "
                    "raise it, set data.truncation to left or right, or set data.filter_overlong_prompts=true"
                )
            ids = ids[-limit:] if config.truncation == "left" else ids[:limit]  # noqa: PLW2901
        fitting.append((row, ids))
    if overlong:
        what = "left out" if config.filter_overlong_prompts else f"cut at the {config.truncation}"
        _log.info("%d of %d prompts have more than %d tokens and are %s", overlong, len(rows), limit, what)
    if not fitting:
        shortest = min(map(len, prompts), default=0)
        raise DataError(
            f"no row is left: all {len(rows)} prompts have more than data.max_prompt_length={limit} tokens "
            f"(the shortest has {shortest})"
        )
    return fitting


def read_images(row: Row, config: DataConfig) -> dict[str, tuple[bytes, ...]] | None:
    """Return ``multi_modal_data`` of a row: its images, as the bytes of image files; None if it has none."""
    return {"image": split_images(row, config)[1]} if has_images(row, config) else None


def image_columns(images: Sequence[dict[str, tuple[bytes, ...]] | None]) -> dict[str, list[Any]]:
    """Return the column ``multi_modal_data`` of a batch; no column if no row has images."""
    return {MULTI_MODAL_DATA: list(images)} if any(images) else {}


def join_ids(sequences: Sequence[Ids]) -> Jagged:
    """Return the ids of all sequences as one jagged column, int32."""
    lengths = torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int64)
    values = np.concatenate([np.empty(0, np.int32), *(np.asarray(sequence, np.int32) for sequence in sequences)])
    return Jagged.from_lengths(torch.from_numpy(values), lengths)
