"""Prompts with images for vLLM, processed as the trainer processes them.

vLLM takes prompts that are processed already: token ids in which each placeholder stands once for each token of its
image, the pixels, and the place of each image. So neither side has to tokenize, and both see the same pixels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rollcast.contracts.rollout import RolloutRequest
from rollcast.errors import DataError, RequestError
from rollcast_data.vision.model_inputs import ImageInputs, Images, images_of

__all__ = ["ImagePrompts", "build_items"]


def build_items(pixel_values: Tensor, grids: Tensor, dtype: torch.dtype) -> Any:
    """Return vLLM's ``MultiModalKwargsItems`` of images.

    Args:
        pixel_values: patches of all images, ``[N, D]``.
        grids: frames, lines and columns of patches of each image, ``[K, 3]``.
        dtype: dtype of the engine's model.
    """
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1)),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    tensors = {"pixel_values": pixel_values.to(dtype), "image_grid_thw": grids}
    return MultiModalKwargsItems.from_hf_inputs(tensors, fields)


class ImagePrompts:
    """Converts prompts with images to vLLM's processed inputs.

    Args:
        path: value of ``model.path``.
        trust_remote_code: allow the folder's own Python code.

    Raises:
        ConfigError: the folder has no image processor, or its model takes images in another way.
    """

    def __init__(self, path: str, trust_remote_code: bool) -> None:
        self.inputs = ImageInputs(path, trust_remote_code)

    def render(self, request: RolloutRequest, prompt: list[int], dtype: torch.dtype) -> dict[str, Any]:
        """Return vLLM's input for a request's prompt; one without images needs no more than its ids.

        Raises:
            CapabilityError: the request has another modality.
            RequestError: its placeholders do not match its images, or an image cannot be read.
        """
        where = f"request {request.request_id!r}"
        images = images_of(request.multi_modal_data, where)
        try:
            spans = self.inputs.spans(prompt, images, where)
            pixels = self.inputs.pixels(images) if images else None
        except DataError as error:
            raise RequestError(str(error)) from error
        if pixels is None:
            return {"type": "token", "prompt_token_ids": prompt}
        return {
            "type": "multimodal",
            "prompt_token_ids": prompt,
            "mm_kwargs": build_items(*pixels, dtype),
            "mm_hashes": {"image": _hashes(images)},
            "mm_placeholders": {"image": _ranges(spans)},
        }


def _hashes(images: Images) -> list[str]:
    """Return the keys under which vLLM keeps the outputs of the vision tower and the prompts' keys and values."""
    return [hashlib.sha256(image).hexdigest() for image in images]


def _ranges(spans: Sequence[tuple[int, int]]) -> list[Any]:
    from vllm.multimodal.inputs import PlaceholderRange

    return [PlaceholderRange(offset=first, length=count) for first, count in spans]
