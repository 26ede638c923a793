"""The tokenizer of a model's folder: the only module that chooses its class, so that all parts of a run see one.

transformers is imported by the first call, not by this module.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rollcast.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["HUB_NAME", "TRUSTS_CODE", "encode_texts", "load_tokenizer", "read_stop_token_ids", "read_tokenizer"]

_log = logging.getLogger("rollcast.data")
#: Attribute of a tokenizer from :func:`read_tokenizer`: the user's ``trust_remote_code``, which holds for its folder.
TRUSTS_CODE = "rollcast_trusts_code"

#: A name of the Hugging Face Hub, which is also a relative path.
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")

# Any one of these is enough for transformers to build a tokenizer from.
_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model")

# Class names that transformers 4 and 5 write for a tokenizer that is defined completely by its tokenizer.json.
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")


def read_tokenizer(path: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer in the folder ``path``, as the folder defines it.

    Args:
        path: value of ``model.path``.
        trust_remote_code: allow the folder's own Python code.

    Raises:
        ConfigError: there is no such folder, or no tokenizer in it that loads.
    """
    from transformers import PreTrainedTokenizerBase

    folder = Path(path).expanduser()
    if not folder.is_dir():
        what = "is a file" if folder.is_file() else "does not exist"
        hint = ""
        if HUB_NAME.fullmatch(str(path)) and not folder.parent.is_dir():
            hint = (
                f"; for a model of the Hugging Face Hub, run hf download {path} --local-dir {folder.name}, and set "
                f"model.path={folder.name}"
            )
        raise ConfigError(f"model.path: {folder.absolute()} {what}; it has to be a folder with a tokenizer{hint}")
    present = sorted(file.name for file in folder.iterdir())
    if not any(name in present for name in _FILES):
        raise ConfigError(
            f"model.path: {folder.absolute()} has no tokenizer (none of {', '.join(_FILES)}); "
            f"it holds: {', '.join(present[:20]) or 'nothing'}"
        )
    try:
        tokenizer = _find_class(folder).from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # transformers passes on the exceptions of its parsers
        raise ConfigError(
            f"model.path: the tokenizer in {folder.absolute()} does not load: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(f"model.path: {folder.absolute()} gives a {type(tokenizer).__name__}, not a tokenizer")
    setattr(tokenizer, TRUSTS_CODE, trust_remote_code)
    return tokenizer


def _find_class(folder: Path) -> Any:
    """Return ``AutoTokenizer``, or the class that uses tokenizer.json unchanged if the folder names that class.

    For some model types, Qwen2 among them, ``AutoTokenizer`` of transformers 5 builds the usual tokenizer of
    the type from the vocabulary alone: a tokenizer of another kind would lose its spaces without a warning.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    settings = folder / "tokenizer_config.json"
    if (folder / "tokenizer.json").is_file() and settings.is_file():
        declared = json.loads(settings.read_text(encoding="utf-8"))
        if declared.get("tokenizer_class") in _GENERIC and "auto_map" not in declared:
            return PreTrainedTokenizerFast
    return AutoTokenizer


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of texts with the special tokens that the tokenizer adds.

    A text may begin with the BOS token, as one that a chat template rendered; its ids have one BOS all the same.
    """
    if not texts:
        return []
    bos = tokenizer.bos_token_id
    encoded = tokenizer(list(texts), return_attention_mask=False, verbose=False)["input_ids"]
    return [ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids for ids in encoded]


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
    value: Any = None
    if file.is_file():
        try:
            value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError, RecursionError) as error:
            raise ConfigError(f"model.path: {file.absolute()} is not a JSON object ({error}); repair it") from error
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ConfigError(
            f"model.path: eos_token_id in {file.absolute()} is {value!r}; it has to be a token id or a list of them"
        )
    return tuple(dict.fromkeys([cast("int", tokenizer.eos_token_id), *ids]))
