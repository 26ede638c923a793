"""Safe reading of a torch checkpoint's index: ``.metadata`` is a pickle, and no code that it names is run."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcast.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

__all__ = ["read_metadata"]

#: Module of the classes and enums in an index.
_MODULE = "torch.distributed.checkpoint.metadata"
#: Further names that torch and megatron-core use in an index; none of them has side effects.
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
    """Unpickler that resolves only dtypes and the classes of an index."""

    def find_class(self, module: str, name: str) -> Any:
        import torch

        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout)
        if (module, name) in _NAMES or is_dtype:
            return super().find_class(module, name)
        if module == _MODULE and "." not in name:
            cls = super().find_class(module, name)
            if isinstance(cls, type) and cls.__module__ == _MODULE:
                return cls
        raise pickle.UnpicklingError(f"it names {module}.{name}, which does not belong in an index")


def read_metadata(file: Path) -> Metadata:
    """Return the index of a checkpoint without running any code that it names.

    Raises:
        CheckpointError: the file cannot be read, is damaged, or names code.
    """
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    try:
        content = _PlainUnpickler(io.BytesIO(file.read_bytes())).load()
    except Exception as error:  # an unpickler can raise any exception on damaged bytes
        raise CheckpointError(f"{file} is not an index of a checkpoint: {type(error).__name__}: {error}") from error
    if not isinstance(content, Metadata) or not isinstance(content.state_dict_metadata, dict):
        raise CheckpointError(f"{file} is not an index of a checkpoint: it contains a {type(content).__name__}")
    if getattr(content, "storage_meta", None) is None:
        content.storage_meta = StorageMeta()
    return content
