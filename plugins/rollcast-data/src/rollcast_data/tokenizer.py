"""Loading of the tokenizer of a Hugging Face folder, with checks for training, and of the ids that end a response."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from rollcast.contracts.tokenizer import read_tokenizer
from rollcast.errors import ConfigError

__all__ = ["load_tokenizer", "read_stop_token_ids"]

_log = logging.getLogger("rollcast.data")


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer in the folder ``path``, padding on the left.

    A tokenizer without a pad token pads with its end token.

    Args:
        path: value of ``model.path``.
        trust_remote_code: allow the folder's own Python code.

    Raises:
        ConfigError: there is no such folder, or no tokenizer in it that loads and has an end token.
    """
    tokenizer = read_tokenizer(path, trust_remote_code)
    tokenizer.padding_side = "left"
    folder = Path(path).expanduser()
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"model.path: the tokenizer in {folder.absolute()} has no eos_token, so no response could end; "
            "set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        _log.info("the tokenizer in %s has no pad token; padding with its end token %r", folder, tokenizer.eos_token)
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def read_stop_token_ids(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the distinct ids that end a response: the tokenizer's EOS, then those of generation_config.json.

    Nothing else of the file is read: its sampling defaults must not change what a run samples from.

    Args:
        path: value of ``model.path``. A folder without the file adds no ids.
        tokenizer: tokenizer of the same folder.

    Raises:
        ConfigError: the file is not JSON, or its ``eos_token_id`` is neither an id nor a list of ids.
    """
    file = Path(path).expanduser() / "generation_config.json"
    found: Any = None
    if file.is_file():
        try:
            found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError, RecursionError) as error:
            raise ConfigError(f"model.path: {file.absolute()} is not a JSON object ({error}); repair it") from error
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(each) is int and each >= 0 for each in ids):
        raise ConfigError(
            f"model.path: eos_token_id in {file.absolute()} is {found!r}; it has to be a token id or a list of them"
        )
    return tuple(dict.fromkeys([cast("int", tokenizer.eos_token_id), *ids]))
