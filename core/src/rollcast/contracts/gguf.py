"""Models in GGUF files, the format of llama.cpp, which are converted to Hugging Face folders.

Engines and rollouts read the folder, so that all of them and the tokenizer see one model. torch and transformers are
imported by the conversion, not by this module.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from rollcast.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["GGUF_INSTALLATION", "convert_gguf", "digest_gguf", "find_gguf", "missing_packages"]

logger = logging.getLogger(__name__)
#: Weights that engines load as they are; a folder that has some is not converted.
_OTHER_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model*.bin.index.json")
#: Requirements of rollcast-engine's extra ``gguf``. Tokenizers made by transformers 5.0 and 5.1 begin every text with a
#: token that the model does not expect; 5.19 is the oldest that was tested and does not.
_PACKAGES = ("gguf>=0.17", "accelerate>=1.0", "transformers>=5.19")
#: Command that installs them.
GGUF_INSTALLATION = "pip install 'rollcast-engine[gguf]'"


def find_gguf(names: Iterable[str], path: str, key: str) -> str | None:
    """Return the name of the GGUF file of a model's folder; None if it has none, or weights in another format.

    Args:
        names: names of the folder's files.
        path: path of the folder, for messages.
        key: dotted key of the path, for messages.

    Raises:
        ConfigError: there are several.
    """
    names = list(names)
    files = sorted(name for name in names if name.lower().endswith(".gguf"))
    if not files or any(fnmatch(name, pattern) for name in names for pattern in _OTHER_WEIGHTS):
        return None
    if len(files) > 1:
        raise ConfigError(f"{key}={path} has several GGUF files; name one of them: {', '.join(files)}")
    return files[0]


def missing_packages() -> list[str]:
    """Return the requirements of a conversion that the installed packages do not meet."""
    return [line for line in _PACKAGES if not _is_met(Requirement(line))]


def _is_met(requirement: Requirement) -> bool:
    try:
        return requirement.specifier.contains(importlib.metadata.version(requirement.name), prereleases=True)
    except importlib.metadata.PackageNotFoundError:
        return False


def digest_gguf(file: Path) -> str:
    """Return a digest of the file's content."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def convert_gguf(file: Path, folder: Path, key: str) -> None:
    """Write the model in a GGUF file as a Hugging Face folder, with weights in float32.

    The folder gets the file's tokenizer and chat template, and a generation config.

    Args:
        file: the GGUF file.
        folder: folder to create.
        key: dotted key that names the file, for messages.

    Raises:
        ConfigError: a package is missing, or transformers cannot read the file.
    """
    missing = missing_packages()
    if missing:
        raise ConfigError(
            f"{key}={file} is a GGUF file, and converting it needs {' and '.join(missing)}, not installed here; "
            f"{GGUF_INSTALLATION}"
        )
    import torch
    import transformers

    from rollcast.contracts.command import show_progress

    # Typed so, because the library's types lack what from_pretrained returns here.
    auto: Any = transformers.AutoModelForCausalLM
    with show_progress(f"converting {file.name}"):
        try:
            read, info = auto.from_pretrained(
                file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True
            )
        except Exception as error:  # transformers passes on the exceptions of its parsers
            raise ConfigError(f"{key}: {file} cannot be read: {type(error).__name__}: {error}") from error
        lacking = sorted(info["missing_keys"])
        if lacking:
            # transformers would continue with random values in their place.
            raise ConfigError(f"{key}: {file} lacks {len(lacking)} weights of its model, such as {lacking[0]}")
        tokenizer = _read_tokenizer(file, key)
        # transformers refuses to save a model that it has read from such a file, so another one takes its weights.
        config = read.config
        del config.quantization_config
        with torch.device("meta"):
            model = auto.from_config(config, dtype=torch.float32)
        model.load_state_dict(read.state_dict(), assign=True)
        model.tie_weights()
        model.generation_config = read.generation_config
        model.save_pretrained(folder)
        tokenizer.save_pretrained(str(folder))
    logger.info("converted %s", file)


def _read_tokenizer(file: Path, key: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a GGUF file.

    Args:
        file: the GGUF file.
        key: dotted key that names the file, for messages.

    Raises:
        ConfigError: there is none that loads.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    except Exception as error:  # transformers passes on the exceptions of its parsers
        raise ConfigError(f"{key}: the tokenizer in {file} does not load: {type(error).__name__}: {error}") from error
    return tokenizer
