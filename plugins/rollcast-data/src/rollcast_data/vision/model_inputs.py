"""Inputs of a vision-language model for the images of prompts."""

from __future__ import annotations

import importlib.util
import math
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollcast.errors import CapabilityError, ConfigError, DataError
from rollcast_data.vision.images import decode_image
from rollcast_data.vision.positions import Grid, mrope_positions

__all__ = ["ImageInputs", "Images", "auto_class_name", "images_of", "is_vision_model"]

#: Images of a row, as the bytes of image files.
Images = Sequence[bytes]
_CACHE_BYTES = 256 << 20


def is_vision_model(config: Any) -> bool:
    """Return True if a transformers config has a vision tower and a placeholder token for images."""
    return getattr(config, "vision_config", None) is not None and getattr(config, "image_token_id", None) is not None


def auto_class_name(config: Any) -> str:
    """Return the name of transformers' class that loads the generating model of a config."""
    return "AutoModelForImageTextToText" if is_vision_model(config) else "AutoModelForCausalLM"


def images_of(data: Mapping[str, Any] | None, what: str = "the row") -> tuple[bytes, ...]:
    """Return the images in ``multi_modal_data``; empty for None.

    Raises:
        CapabilityError: there is another modality.
    """
    if not data:
        return ()
    others = sorted(name for name, values in data.items() if name != "image" and len(values))
    if others:
        raise CapabilityError(f"{what} carries multi_modal_data ({', '.join(others)}); only image is supported")
    return tuple(data.get("image", ()))


def _with_pillow() -> dict[str, Any]:
    """Return the argument that makes transformers resize images with Pillow.

    By default it uses torchvision where that is installed, whose pixels differ: a trainer and a replica in another
    environment would see different images.
    """
    is_named = importlib.util.find_spec("transformers.image_processing_backends") is not None  # transformers 5
    return {"backend": "pil"} if is_named else {"use_fast": False}


@dataclass(frozen=True)
class _Processed:
    """Patches of one image, float32 ``[N, D]``, and its grid, int64 ``[3]``."""

    pixel_values: Tensor
    grid: Tensor


class ImageInputs:
    """The image processor of a Hugging Face folder, and the layout of images in its model's tokens.

    For models of the Qwen-VL kind: patches in ``pixel_values``, their grid in ``image_grid_thw``, and positions on
    three axes.

    Args:
        path: value of ``model.path``.
        trust_remote_code: allow the folder's own Python code.

    Raises:
        ConfigError: the folder has no image processor, or its model takes images in another way.
    """

    def __init__(self, path: str | Path, trust_remote_code: bool = False) -> None:
        from transformers import AutoConfig, AutoImageProcessor

        config: Any = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        if not is_vision_model(config):
            raise ConfigError(f"model.path: the data has images, but {path} ({config.model_type}) is a model of text")
        text = config.get_text_config()
        rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
        if "mrope_section" not in rope or not hasattr(config.vision_config, "spatial_merge_size"):
            raise ConfigError(
                f"model.path: {path} ({config.model_type}) has no three-axis positions (mrope_section); images are "
                "supported for models of the Qwen2-VL, Qwen2.5-VL and Qwen3-VL kind"
            )
        try:
            # Any: some of transformers' methods are typed, others are not.
            auto: Any = AutoImageProcessor
            self._processor: Any = auto.from_pretrained(path, trust_remote_code=trust_remote_code, **_with_pillow())
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(f"model.path: the image processor of {path} does not load: {error}") from error
        self.image_token_id = int(config.image_token_id)
        video = getattr(config, "video_token_id", None)
        #: Ids that stand for images or videos in a prompt and mean nothing in a response.
        self.placeholder_ids = (self.image_token_id, *(() if video is None else (int(video),)))
        #: Id that a model reads in place of a placeholder in a response.
        self.neutral_id = int(getattr(config, "vision_end_token_id", None) or 0)
        vision = config.vision_config
        self._merge = int(vision.spatial_merge_size)
        channels = int(getattr(vision, "in_channels", None) or 3)
        self._patch_size = channels * int(vision.temporal_patch_size) * int(vision.patch_size) ** 2
        self._cache: OrderedDict[bytes, _Processed] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()  # rollouts process images in several threads

    def expand(self, ids: Sequence[int], images: Images, where: str) -> array[int]:
        """Return a prompt's ids with each placeholder repeated once for each token of its image.

        Args:
            ids: ids with one placeholder per image, in the order of the images.
            images: images of the prompt.
            where: file and row, for messages.

        Raises:
            DataError: the prompt has another number of placeholders than images, or an image cannot be read.
        """
        count = sum(1 for token_id in ids if token_id == self.image_token_id)
        if count != len(images):
            raise DataError(
                f"{where}: the prompt has {count} image placeholders after the chat template, and the row has "
                f"{len(images)} images; write each image as a part of type image, or as <image> in the text"
            )
        remaining = iter(images)
        expanded: array[int] = array("i")
        for token in ids:
            repeats = self._count(next(remaining), where) if token == self.image_token_id else 1
            expanded.extend([token] * repeats)
        return expanded

    def _count(self, image: bytes, where: str) -> int:
        picture = decode_image(image, where)
        patches = self._processor.get_number_of_image_patches(picture.height, picture.width, {})
        return int(patches) // self._merge**2

    def pixels(self, images: Iterable[bytes]) -> tuple[Tensor, Tensor]:
        """Return ``pixel_values`` float32 ``[N, D]`` and ``image_grid_thw`` int64 ``[K, 3]`` of ``K`` images."""
        processed = [self._process(image) for image in images]
        return torch.cat([image.pixel_values for image in processed]), torch.stack([image.grid for image in processed])

    def grids(self, images: Images, where: str = "an image") -> list[Grid]:
        """Return frames, lines and columns of tokens of each image; ``where`` is for messages."""
        grids = [self._process(image, where).grid.tolist() for image in images]
        return [(frames, lines // self._merge, columns // self._merge) for frames, lines, columns in grids]

    def positions(self, input_ids: Tensor, attention_mask: Tensor, images: Sequence[Images]) -> Tensor:
        """Return the positions of rows with images, int64 ``[3, b, s]``; see :func:`mrope_positions`."""
        return mrope_positions(input_ids, attention_mask, self.image_token_id, [self.grids(row) for row in images])

    def spans(self, ids: Sequence[int], images: Images, where: str) -> list[tuple[int, int]]:
        """Return the first place and the number of the tokens of each image in a prompt of :meth:`expand`.

        Raises:
            DataError: the prompt has another number of placeholders than its images have tokens, other tokens stand
                between those of one image, or an image cannot be read.
        """
        counts = [frames * lines * columns for frames, lines, columns in self.grids(images, where)]
        places = [place for place, token in enumerate(ids) if token == self.image_token_id]
        if len(places) != sum(counts):
            raise DataError(
                f"{where}: the prompt has {len(places)} image placeholders (token id {self.image_token_id}), but its "
                f"{len(images)} images have {sum(counts)} tokens; a prompt with images must not be cut"
            )
        spans, start = [], 0
        for number, count in enumerate(counts):
            first, last = places[start], places[start + count - 1]
            if last - first != count - 1:
                raise DataError(f"{where}: the {count} placeholders of image {number} do not follow one another")
            spans.append((first, count))
            start += count
        return spans

    def largest(self, tokens: int) -> int:
        """Return the number of tokens of the largest image that the processor makes, at most ``tokens``."""
        size = self._processor.size
        pixels = size["longest_edge"] if "longest_edge" in size else getattr(self._processor, "max_pixels", None)
        edge = int(self._processor.patch_size) * self._merge
        return tokens if pixels is None else max(min(tokens, int(pixels) // edge**2), 1)

    def blank_of(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Return ``pixel_values`` and ``image_grid_thw`` of a blank square image of at most this many tokens."""
        side = math.isqrt(tokens) * self._merge
        return torch.zeros(side**2, self._patch_size), torch.tensor([[1, side, side]])

    def blank(self) -> tuple[Tensor, Tensor]:
        """Return ``pixel_values`` and ``image_grid_thw`` of the smallest image, which has one token."""
        return self.blank_of(1)

    def neutralize(self, ids: Tensor) -> Tensor:
        """Return sampled ids with :attr:`neutral_id` in place of placeholders, for which there is no image."""
        wrong = torch.isin(ids, ids.new_tensor(self.placeholder_ids))
        return torch.where(wrong, self.neutral_id, ids)

    def _process(self, image: bytes, where: str = "an image") -> _Processed:
        with self._lock:
            known = self._cache.get(image)
            if known is not None:
                self._cache.move_to_end(image)
                return known
        inputs = self._processor(images=[decode_image(image, where)], return_tensors="pt")
        done = _Processed(inputs["pixel_values"].float(), inputs["image_grid_thw"][0].long())
        with self._lock:
            if image not in self._cache:
                self._cache[image] = done
                self._cached_bytes += done.pixel_values.nbytes
            while self._cached_bytes > _CACHE_BYTES and len(self._cache) > 1:
                self._cached_bytes -= self._cache.popitem(last=False)[1].pixel_values.nbytes
        return done
