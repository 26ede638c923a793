"""A tokenizer of characters, words and tool-call markers, for small models that are trained on a CPU."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

__all__ = ["CALL_END", "CALL_START", "CHAT_TEMPLATE", "VOCABULARY", "build_tokenizer"]

_SPECIAL = ("<pad>", "<bos>", "<eos>")
_CHARACTERS = tuple("0123456789+-*. \n")
_MARKERS = ("<tool_call>", '{"name": "calculator", "arguments": {"expression": "', '"}}', "</tool_call>")
_RESULT = ("<tool_response>", "</tool_response>")
_WORDS = ("rows of", "cards", "bags with", "nuts", "in each", "times", "and", "more", "plus", "minus", "but", "eaten")

CALL_START, CALL_END = "".join(_MARKERS[:2]), "".join(_MARKERS[2:])
"""Text before and after the expression in a call of the calculator, in the format ``hermes``."""

VOCABULARY = (*_SPECIAL, *_CHARACTERS, *_MARKERS, *_RESULT, *_WORDS)
"""All tokens, by id."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}"
    "{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] -%}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{%- endfor -%}"
    "<eos>"
    "{%- elif message.role == 'tool' -%}"
    "<tool_response>{{ message.content }}</tool_response>{{ '\\n' }}"
    "{%- else -%}"
    "{{ message.content }}{{ '\\n' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
)
"""Chat template that writes each question and result on a separate line and ends replies with ``<eos>``."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character, word and marker; it drops all other text.

    Words and markers are added tokens of a byte-level BPE without merges, because transformers 5 builds such a BPE from
    the vocabulary in any folder with a Qwen2 model, whatever its tokenizer.json contains.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ids = {token: index for index, token in enumerate(_SPECIAL)}
    for character in _CHARACTERS:
        [(form, _)] = byte_level.pre_tokenize_str(character)  # a space is written as "Ġ", a line break as "Ċ"
        ids[form] = len(ids)
    tokenizer = Tokenizer(models.BPE(ids, merges=[]))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token="<pad>",  # noqa: S106
        bos_token="<bos>",  # noqa: S106
        eos_token="<eos>",  # noqa: S106
        # Never produced; without it the Qwen2 tokenizer would add a token for it.
        unk_token="<pad>",  # noqa: S106
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    fast.add_tokens([AddedToken(token, normalized=False) for token in (*_MARKERS, *_RESULT, *_WORDS)])
    return fast
