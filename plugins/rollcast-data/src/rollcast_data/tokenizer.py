"""A Hugging Face tokenizer from a folder, checked for what training needs of it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rollcast.errors import ConfigError

__all__ = ["load_tokenizer"]

_log = logging.getLogger("rollcast.data")

# Any one of these is enough for transformers to build a tokenizer from.
_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model")

# What transformers 4 and 5 write for a tokenizer that is all in its tokenizer.json.
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer in the folder ``path``, padding on the left.

    Without a pad token of its own it pads with its end token.

    Args:
        path: the config's ``model.path``.
        trust_remote_code: allow the folder's own Python code.

    Raises:
        ConfigError: no such folder, no tokenizer in it, it does not load, or it has no end token.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        what = "is a file" if folder.is_file() else "does not exist"
        raise ConfigError(f"model.path: {folder.absolute()} {what}; it has to be a folder with a tokenizer")
    present = sorted(each.name for each in folder.iterdir())
    if not any(name in present for name in _FILES):
        raise ConfigError(
            f"model.path: {folder.absolute()} has no tokenizer (none of {', '.join(_FILES)}); "
            f"it holds: {', '.join(present[:20]) or 'nothing'}"
        )
    try:
        tokenizer = _find_class(folder).from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, local_files_only=True, padding_side="left"
        )
    except Exception as error:  # transformers raises whatever its parsers raise
        raise ConfigError(
            f"model.path: the tokenizer in {folder.absolute()} does not load: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(f"model.path: {folder.absolute()} gives a {type(tokenizer).__name__}, not a tokenizer")
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"model.path: the tokenizer in {folder.absolute()} has no eos_token, so no response could end; "
            "set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        _log.info("the tokenizer in %s has no pad token; padding with its end token %r", folder, tokenizer.eos_token)
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _find_class(folder: Path) -> Any:
    """``AutoTokenizer``, or the class that takes tokenizer.json as it stands if the folder names it.

    For some model types, Qwen2 among them, transformers 5 lets ``AutoTokenizer`` build the type's
    usual tokenizer from the vocabulary alone: a tokenizer of another make would lose its spaces,
    without a word.
    """
    settings = folder / "tokenizer_config.json"
    if (folder / "tokenizer.json").is_file() and settings.is_file():
        declared = json.loads(settings.read_text(encoding="utf-8"))
        if declared.get("tokenizer_class") in _GENERIC and "auto_map" not in declared:
            return PreTrainedTokenizerFast
    return AutoTokenizer
