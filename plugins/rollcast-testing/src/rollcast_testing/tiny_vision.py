"""Tiny vision-language models of the Qwen-VL kind and images for tests, and their log-probs by transformers alone.

Nothing is downloaded. The module needs transformers, tokenizers, Pillow and rollcast-data.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rollcast_testing.tiny import CHARACTERS, SPECIAL, build_tokenizer

__all__ = [
    "IMAGE_ID",
    "IMAGE_TOKENS",
    "VIDEO_ID",
    "VisionKind",
    "image_log_probs",
    "load_vision_model",
    "noise_image",
    "tiny_vision_folder",
    "vision_prompt",
]

VisionKind = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]

IMAGE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>")
"""Special tokens of the models, with the ids after the characters."""

_START, IMAGE_ID, VIDEO_ID, _END = range(len(SPECIAL) + len(CHARACTERS), len(SPECIAL) + len(CHARACTERS) + 4)
_PATCH, _MERGE = 4, 2
_ARCHITECTURES = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}


def tiny_vision_folder(path: Path, kind: VisionKind = "qwen2_5_vl", seed: int = 0, tied: bool = True) -> Path:
    """Write a vision-language model with large random weights, its tokenizer and its image processor.

    Attention heads have 32 dimensions, which vLLM's CPU kernels need. Patches have 4 by 4 pixels, of which 2 by 2
    become one token, so an image of 24 by 16 pixels has 6 tokens.

    Args:
        path: folder to create.
        kind: the model's type.
        seed: seed of the weights; the caller's random state is not changed.
        tied: True to share the embedding with the vocabulary head.

    Returns:
        ``path``.
    """
    from transformers import AutoModelForImageTextToText, Qwen2VLImageProcessor

    auto_class: Any = AutoModelForImageTextToText
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(IMAGE_TOKENS)})
    tokenizer.save_pretrained(path)
    processor: Any = Qwen2VLImageProcessor(
        patch_size=_PATCH, merge_size=_MERGE, size={"shortest_edge": (_PATCH * _MERGE) ** 2, "longest_edge": 4096}
    )
    processor.save_pretrained(path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_class.from_config(_config(kind, tokenizer, tied), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                # Freshly initialized weights only repeat the last token, and the image would not matter.
                parameter.add_(torch.randn(parameter.shape), alpha=0.15)
    model.save_pretrained(path)
    return path


def _config(kind: VisionKind, tokenizer: Any, tied: bool) -> Any:
    from transformers import AutoConfig

    hidden, heads = 64, 2
    # 16 frequencies of a head by time, height and width.
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
    text: dict[str, Any] = {
        "vocab_size": len(SPECIAL) + len(CHARACTERS) + len(IMAGE_TOKENS),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 512,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "rope_parameters": {**rope, "mrope_interleaved": True} if kind == "qwen3_vl" else rope,
        **({"head_dim": hidden // heads} if kind == "qwen3_vl" else {}),
    }
    vision: dict[str, Any] = {"depth": 3, "num_heads": 2, "patch_size": _PATCH, "spatial_merge_size": _MERGE}
    if kind == "qwen2_vl":
        vision |= {"embed_dim": hidden, "hidden_size": hidden, "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": hidden, "intermediate_size": 2 * hidden, "out_hidden_size": hidden}
    if kind == "qwen2_5_vl":
        # Windows of 2 by 2 tokens in the first two layers.
        vision |= {"fullatt_block_indexes": [2], "window_size": 2 * _PATCH * _MERGE}
    if kind == "qwen3_vl":
        vision |= {"num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1]}
    return AutoConfig.for_model(
        kind,
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE_ID,
        video_token_id=VIDEO_ID,
        vision_start_token_id=_START,
        vision_end_token_id=_END,
        tie_word_embeddings=tied,
        architectures=[_ARCHITECTURES[kind]],
    )


def noise_image(seed: int, width: int = 24, height: int = 16) -> bytes:
    """Return a PNG of random coloured blocks of 4 by 4 pixels."""
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (height // 4, width // 4, 3), generator=generator, dtype=torch.uint8)
    pixels = blocks.repeat_interleave(4, 0).repeat_interleave(4, 1)
    buffer = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(buffer, format="PNG")
    return buffer.getvalue()


def vision_prompt(folder: Path, *parts: Sequence[int] | bytes) -> tuple[list[int], tuple[bytes, ...]]:
    """Return the ids of a prompt of texts (ids) and images (PNG files), and its images."""
    from rollcast_data.vision.model_inputs import ImageInputs

    images = tuple(part for part in parts if isinstance(part, bytes))
    ids = [
        token
        for part in parts
        for token in ([_START, IMAGE_ID, _END] if isinstance(part, bytes) else [int(i) for i in part])
    ]
    return ImageInputs(folder).expand(ids, images, "the prompt").tolist(), images


def load_vision_model(folder: Path) -> Any:
    """Load the folder's model with transformers in float32."""
    from transformers import AutoModelForImageTextToText

    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def image_log_probs(
    model: Any,
    folder: Path,
    prompt: Sequence[int],
    images: Sequence[bytes],
    tokens: Sequence[int],
    bias: Mapping[int, float] | None = None,
) -> list[float]:
    """Return the log-probs of ``tokens`` after a prompt with images, from one forward pass of transformers.

    Positions are transformers' own. Placeholders among ``tokens`` are read as the end of an image, as rollcast does.

    Args:
        model: model of :func:`load_vision_model`.
        folder: folder of the image processor.
        prompt, images: a prompt of :func:`vision_prompt`.
        tokens: sampled ids.
        bias: numbers added to logits, by token id.
    """
    from transformers import AutoImageProcessor

    from rollcast_data.vision.images import decode_image

    read = [_END if token_id in {IMAGE_ID, VIDEO_ID} else token_id for token_id in tokens]
    ids = torch.tensor([[*prompt, *read]])
    inputs: dict[str, Any] = {}
    if images:
        auto_class: Any = AutoImageProcessor
        inputs = dict(
            auto_class.from_pretrained(folder)([decode_image(image) for image in images], return_tensors="pt")
        )
        inputs["mm_token_type_ids"] = (ids == IMAGE_ID).int()
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, **inputs).logits[0, len(prompt) - 1 : -1].float()
    for token, number in (bias or {}).items():
        logits[:, token] += number
    chosen: list[float] = logits.log_softmax(-1).gather(-1, torch.tensor(list(tokens))[:, None])[:, 0].tolist()
    return chosen
