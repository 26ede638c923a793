"""The plugin that vLLM loads at the start of each of its processes, so that it takes processed images."""

from __future__ import annotations

import importlib
import sys
import types

from rollcast_vllm.environment import image_architecture

__all__ = ["register_processor"]

_RESIZING = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
_RESIZING_WITH_PILLOW = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"


def register_processor() -> None:
    """Make vLLM take processed images, if this process is told to; vLLM calls this at the start of each process."""
    architecture = image_architecture()
    if architecture is not None:
        _supply_resizing()
        from rollcast_vllm import processor

        processor.register_processor(architecture)


def _supply_resizing() -> None:
    """Let vLLM's modules of Qwen-VL models be imported without torchvision.

    They import one function from a module of transformers 5 that needs torchvision, of which PyPI has no build for
    CPUs. The module that uses Pillow has the same function.
    """
    try:
        importlib.import_module(_RESIZING)
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        stand_in = types.ModuleType(_RESIZING)
        stand_in.smart_resize = importlib.import_module(_RESIZING_WITH_PILLOW).smart_resize  # type: ignore[attr-defined]
        sys.modules[_RESIZING] = stand_in
