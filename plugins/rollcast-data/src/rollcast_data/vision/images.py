"""Encoded images: reading from the forms in data files, and decoding."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcast.errors import ConfigError, DataError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["decode_image", "read_image"]

_DATA_URL = "data:"


def read_image(value: Any, where: str, folder: Path) -> bytes:
    """Return an image as the bytes of an image file, such as PNG or JPEG.

    Args:
        value: bytes of an image file; a path, absolute or relative to ``folder``; a ``data:`` URL; a mapping with
            ``bytes`` or ``path``, as in Parquet files of the Hugging Face Hub; a PIL image; or an array uint8
            ``[H, W, 3]``.
        where: file, row and column of the value, for messages.
        folder: folder of the data file.

    Raises:
        DataError: the value has another form, or a file cannot be read.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Mapping):
        inner = value.get("bytes") if value.get("bytes") is not None else value.get("path")
        if inner is not None:
            return read_image(inner, where, folder)
    if isinstance(value, str):
        return _read_text(value, where, folder)
    if hasattr(value, "save"):
        return _as_png(value)
    if getattr(value, "dtype", None) is not None and str(value.dtype) == "uint8" and value.ndim == 3:
        return _as_png(_pillow().fromarray(value))
    raise DataError(
        f"{where}: an image is the bytes of an image file, a path, a data: URL, a mapping with bytes or path, a PIL "
        f"image or a uint8 array [H, W, 3]; this is {type(value).__name__}"
    )


def decode_image(data: bytes, where: str = "an image") -> Image:
    """Return an image in RGB.

    Raises:
        DataError: the bytes are no image.
        ConfigError: Pillow is not installed.
    """
    try:
        image: Image = _pillow().open(io.BytesIO(data)).convert("RGB")
    except OSError as error:
        raise DataError(f"{where}: {len(data)} bytes are no image that Pillow can read: {error}") from error
    return image


def _read_text(value: str, where: str, folder: Path) -> bytes:
    if value.startswith(_DATA_URL):
        head, _, body = value.partition(",")
        if not head.endswith(";base64"):
            raise DataError(f"{where}: a data: URL of an image has to be base64, this begins with {head[:40]!r}")
        try:
            return base64.b64decode(body, validate=True)
        except binascii.Error as error:
            raise DataError(f"{where}: the data: URL is not base64: {error}") from error
    if value.startswith(("http://", "https://")):
        raise DataError(f"{where}: images are not downloaded during a run; save {value[:80]} and name its path")
    path = folder / Path(value.removeprefix("file://")).expanduser()
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{where}: the image {path} cannot be read: {error}") from error


def _as_png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def _pillow() -> Any:
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise ConfigError('images need Pillow; install it with: pip install "rollcast-data[images]"') from error
    return Image
