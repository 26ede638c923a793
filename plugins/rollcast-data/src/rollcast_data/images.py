"""Images in the prompts of data files: as parts of messages, or as a column with marks in the text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollcast.errors import DataError
from rollcast_data.files import Row
from rollcast_data.schemas import DataConfig
from rollcast_data.tokenizer import TRUSTS_CODE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


__all__ = ["MARK", "expand_images", "has_images", "split_images"]

#: Mark of an image in the text of a message, as in verl's files.
MARK = "<image>"
_IMAGE = "image"


def has_images(row: Row, config: DataConfig) -> bool:
    """Return True if a row's prompt has an image, in a part of a message or in the column ``data.image_key``."""
    if _column(row, config):
        return True
    messages = row.find(config.prompt_key)
    return isinstance(messages, list) and any(
        isinstance(part, Mapping) and part.get("type") == _IMAGE
        for message in messages
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        for part in message["content"]
    )


def split_images(row: Row, config: DataConfig) -> tuple[list[dict[str, Any]], tuple[bytes, ...]]:
    """Return the messages of a prompt with parts ``{"type": "image"}``, and the images in their order, encoded.

    Raises:
        DataError: the prompt is no list of messages, an image cannot be read, or the column has another number of
            images than the messages have marks or parts without an image.
    """
    from rollcast_data.vision.images import read_image

    messages = row.find(config.prompt_key)
    where = f"{row.location}: {config.prompt_key}"
    if isinstance(messages, str) and config.apply_chat_template == "always":
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list):
        raise DataError(
            f"{where}: a prompt with images is a list of messages, or a string with data.apply_chat_template=always"
        )
    column = _column(row, config)
    waiting = iter(column)
    images: list[bytes] = []
    converted: list[dict[str, Any]] = []
    for message in messages:
        parts: list[dict[str, str]] = []
        for part in _parts(message, bool(column), where):
            if part.get("type") != _IMAGE:
                parts.append({"type": "text", "text": part["text"]})
                continue
            image = part.get(_IMAGE)
            image = next(waiting, None) if image is None else image
            if image is None:
                raise DataError(
                    f"{where} has more images than the {len(column)} of {config.image_key} (data.image_key)"
                )
            images.append(read_image(image, where, row.path.parent))
            parts.append({"type": _IMAGE})
        given_keys = {key: value for key, value in message.items() if value is not None}
        converted.append({**given_keys, "content": parts})
    left = sum(1 for _ in waiting)
    if left:
        raise DataError(
            f"{where} has no place for {left} of the {len(column)} images in {config.image_key} (data.image_key); "
            f"write {MARK} in the text of a message for each"
        )
    return converted, tuple(images)


def expand_images(
    rows: Sequence[Row],
    prompts: Sequence[Sequence[int]],
    images: Mapping[int, tuple[bytes, ...]],
    tokenizer: PreTrainedTokenizerBase,
) -> list[Sequence[int]]:
    """Return the ids of all prompts, with each image's placeholder once per token of the image.

    Args:
        rows, prompts: rows, and ids of their prompts with one placeholder per image.
        images: images by the number of their row.
        tokenizer: tokenizer whose folder has the image processor.

    Raises:
        DataError: a prompt has another number of placeholders than images.
        ConfigError: the model takes no images.
    """
    from rollcast_data.vision.model_inputs import ImageInputs

    # The tokenizer's folder is that of the image processor, and the user trusts its code or not.
    inputs = ImageInputs(tokenizer.name_or_path, getattr(tokenizer, TRUSTS_CODE, False))
    return [
        inputs.expand(ids, images[number], rows[number].location) if number in images else ids
        for number, ids in enumerate(prompts)
    ]


def _column(row: Row, config: DataConfig) -> list[Any]:
    value = row.find(config.image_key)
    return value if isinstance(value, list) else []


def _parts(message: Any, has_column: bool, where: str) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a message's content; marks in its texts become parts without an image."""
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise DataError(f"{where}: a message has no content that is a string or a list of parts")
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == _IMAGE:
            yield part
        elif kind != "text" or not isinstance(part.get("text"), str):
            raise DataError(f"{where}: a part of type {kind!r} cannot be read; valid: text, image")
        elif not has_column:
            yield part
        else:
            for place, text in enumerate(part["text"].split(MARK)):
                if place:
                    yield {"type": _IMAGE}
                if text:
                    yield {"type": "text", "text": text}
