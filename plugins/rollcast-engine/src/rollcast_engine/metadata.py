"""The index of a torch checkpoint, ``.metadata``: a pickle, read here without running code that it names."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

from rollcast.errors import CheckpointError

__all__ = ["check_metadata"]

#: Module whose classes and enums an index is made of.
_MODULE = "torch.distributed.checkpoint.metadata"
#: What else torch and megatron-core name in an index; none of it has effects.
_NAMES = {
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # its name from Python 3.13 on
}


class _PlainUnpickler(pickle.Unpickler):
    """Finds the classes of an index, dtypes, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        import torch

        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout)
        if (module, name) in _NAMES or is_dtype:
            return super().find_class(module, name)
        if module == _MODULE and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == _MODULE:
                return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of an index")


def check_metadata(file: Path) -> None:
    """Read the index of a checkpoint, so that torch, which unpickles anything, meets only what is plain data.

    Raises:
        CheckpointError: the file cannot be read, is damaged, or names code.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        content = _PlainUnpickler(io.BytesIO(file.read_bytes())).load()
    except Exception as error:  # damaged bytes lead an unpickler anywhere
        raise CheckpointError(f"{file} is no index of a checkpoint: {type(error).__name__}: {error}") from error
    if not isinstance(content, Metadata) or not isinstance(content.state_dict_metadata, dict):
        raise CheckpointError(f"{file} is no index of a checkpoint: it holds a {type(content).__name__}")
