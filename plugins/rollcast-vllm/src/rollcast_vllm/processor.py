"""Limits of images for vLLM's scheduler, in place of vLLM's own processor; imported only in vLLM's processes.

vLLM's processor of a Qwen-VL model needs a tokenizer and torchvision, even for prompts that arrive as token ids.
Prompts arrive here with their images already processed (see :mod:`rollcast_vllm.images`), by the code that the trainer
uses too, so vLLM only has to know how many tokens an image may have and what a blank one looks like.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.parse import MultiModalDataParser
from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseMultiModalProcessor, BaseProcessingInfo

from rollcast.errors import ConfigError
from rollcast_data.vision.model_inputs import ImageInputs
from rollcast_vllm.images import build_items

__all__ = ["register_processor"]


@functools.lru_cache(maxsize=2)
def _inputs(path: str, trust_remote_code: bool) -> ImageInputs:
    return ImageInputs(path, trust_remote_code)


class _Info(BaseProcessingInfo):  # type: ignore[misc,unused-ignore]
    """Limits of a model's images."""

    @property
    def inputs(self) -> ImageInputs:
        model = self.ctx.model_config
        return _inputs(str(model.model), bool(model.trust_remote_code))

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {"image": self.inputs.largest(seq_len)} if "image" in mm_counts else {}

    def get_data_parser(self) -> Any:
        return MultiModalDataParser()


class _Dummies(BaseDummyInputsBuilder):  # type: ignore[misc,unused-ignore]
    """Unused: :class:`_Processor` makes its blank images itself."""

    def get_dummy_processor_inputs(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any = None) -> Any:
        """Return what ``_Processor.apply`` then gets; vLLM before 0.31 asks in this way for blank images."""
        return mm_counts

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        raise NotImplementedError("rollcast passes processed prompts only")

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> Any:
        raise NotImplementedError("rollcast passes processed prompts only")


class _Processor(BaseMultiModalProcessor):  # type: ignore[misc,unused-ignore]
    """A processor that only makes blank images, with which vLLM measures the memory of the vision tower."""

    requires_tokenizer = False

    def get_dummy_mm_inputs(
        self,
        mm_counts: Mapping[str, int],
        *,
        cache: Any = None,
        scheduler_config: Any = None,
    ) -> Any:
        model = self.info.ctx.model_config
        tokens = self.info.get_mm_max_tokens_per_item(model.max_model_len, mm_counts)
        pixel_values, grids = self.info.inputs.blank_of(tokens["image"])
        return {"mm_kwargs": build_items(pixel_values, grids, model.dtype)}

    def apply(self, inputs: Mapping[str, int], timing_ctx: Any = None) -> Any:
        """Return blank images for vLLM before 0.31; real ones arrive processed."""
        return {**self.get_dummy_mm_inputs(inputs), "prompt_token_ids": []}

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> Any:
        raise NotImplementedError("rollcast passes processed prompts only")

    def _get_prompt_updates(self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any) -> Any:
        raise NotImplementedError("rollcast passes processed prompts only")


def register_processor(architecture: str) -> None:
    """Make vLLM's class of an architecture use the limits above, in this process.

    Raises:
        ConfigError: vLLM has no such class, or the class takes no images.
    """
    from vllm import ModelRegistry

    known = ModelRegistry.models.get(architecture)
    model_class: Any = None if known is None else known.load_model_cls()
    if not hasattr(model_class, "_processor_factory"):
        raise ConfigError(f"model.path: vLLM has no vision model for the architecture {architecture}; use rollout=hf")
    # Without this vLLM warns that the class has a processor already.
    if "_processor_factory" in model_class.__dict__:
        del model_class._processor_factory
    MULTIMODAL_REGISTRY.register_processor(_Processor, info=_Info, dummy_inputs=_Dummies)(model_class)
