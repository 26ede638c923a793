"""A tokenizer of single characters, for small models that are trained on a CPU."""

from __future__ import annotations

import string

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

__all__ = ["IMAGE_TOKENS", "SPECIAL_TOKENS", "VOCABULARY", "build_image_tokenizer", "build_tokenizer"]

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
"""Special tokens, with the ids 0, 1 and 2."""

VOCABULARY = (*SPECIAL_TOKENS, *"0123456789+-*/=()<>#?.,: \n", *string.ascii_letters, *"'$")
"""All 83 tokens, by id."""

IMAGE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>")
"""Further special tokens of a model that sees images, with ids from 83."""

_TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def build_image_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer of :func:`build_tokenizer` with tokens of images and a chat template that writes them."""
    tokenizer = build_tokenizer(IMAGE_TOKENS)
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def build_tokenizer(further: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character; it drops unknown characters and adds no special tokens.

    Args:
        further: special tokens after the vocabulary.

    It is a byte-level BPE without merges, because transformers 5 builds such a BPE from the vocabulary in any folder
    with a Qwen2 model, whatever its tokenizer.json contains.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ids = {_byte_form(token, byte_level): index for index, token in enumerate((*VOCABULARY, *further))}
    tokenizer = Tokenizer(models.BPE(ids, merges=[]))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token="<pad>",  # noqa: S106
        bos_token="<bos>",  # noqa: S106
        eos_token="<eos>",  # noqa: S106
        # Never produced; without it the Qwen2 tokenizer would add an 84th token for it.
        unk_token="<pad>",  # noqa: S106
        additional_special_tokens=list(further),
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _byte_form(token: str, byte_level: pre_tokenizers.ByteLevel) -> str:
    # A byte-level vocabulary writes a space as "Ġ" and a line break as "Ċ".
    if token in SPECIAL_TOKENS or token in IMAGE_TOKENS:
        return token
    [(form, _)] = byte_level.pre_tokenize_str(token)
    return str(form)
