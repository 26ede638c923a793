"""A folder of safetensors files that trainer and replicas share, by a path or an fsspec URL."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import available_protocols, known_implementations
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor

from rollcast.errors import WeightSyncError

__all__ = ["SharedFolder"]


class SharedFolder:
    """Files in one folder.

    Args:
        url: path, or URL of a file system that fsspec supports, such as ``s3://bucket/weights``.

    Raises:
        WeightSyncError: no file system for the URL is installed; the message names the package.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            self._files, self._path = url_to_fs(url)
        except (ImportError, OSError, TypeError, ValueError) as error:
            raise WeightSyncError(f"rollout.sync_folder={url} cannot be opened: {_explain(url, error)}") from error
        self._is_local = isinstance(self._files, LocalFileSystem)

    def make(self) -> None:
        """Create the folder and its parents."""
        self._files.makedirs(self._path, exist_ok=True)

    def remove(self) -> None:
        """Remove the folder with its files."""
        if self._files.exists(self._path):
            self._files.rm(self._path, recursive=True)

    def save(self, name: str, tensors: Mapping[str, Tensor]) -> int:
        """Write tensors to a file; return their size in bytes."""
        held = {key: tensor.detach().contiguous().cpu() for key, tensor in tensors.items()}
        if self._is_local:
            save_file(held, self._local(name))
        else:
            self._files.pipe_file(f"{self._path}/{name}", save(held))
        return sum(tensor.numel() * tensor.element_size() for tensor in held.values())

    def load(self, name: str) -> dict[str, Tensor]:
        """Return a file's tensors."""
        if self._is_local:
            return load_file(self._local(name))
        return load(self._files.cat_file(f"{self._path}/{name}"))

    def write_text(self, name: str, text: str) -> None:
        """Write a text file."""
        self._files.pipe_file(f"{self._path}/{name}", text.encode())

    def read_text(self, name: str) -> str:
        """Return the content of a text file."""
        content: Any = self._files.cat_file(f"{self._path}/{name}")
        return bytes(content).decode()

    def _local(self, name: str) -> Path:
        return Path(self._path) / name


def _explain(url: str, error: Exception) -> str:
    """Return why a URL cannot be opened, with the package to install if one is missing."""
    protocols = re.findall(r"([\w+.-]+)(?=::|://)", url)  # several if they are chained, as in simplecache::s3://
    unknown = [each for each in protocols if each not in available_protocols()]
    if unknown:
        return f"fsspec has no file system {unknown[0]!r}; it has {', '.join(sorted(available_protocols()))}"
    if not isinstance(error, (ImportError, OSError)):  # an argument that no URL carries
        return str(error)
    hints = [hint for each in protocols if (hint := known_implementations.get(each, {}).get("err"))]
    said = "; ".join(dict.fromkeys([str(error), *hints]))
    return f"{said} (in the environments of the trainer and of the replicas)" if hints else said
