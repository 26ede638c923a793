"""The task with images of the quick start, to count squares: an image and "=" → "4"."""

from __future__ import annotations

import base64
import io
import itertools
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import Qwen2_5_VLConfig

from rollcast.errors import DataError
from rollcast_data.contract import BasePreprocessor, PreprocessReport
from rollcast_data.files import write_jsonl
from rollcast_quickstart.tokenizer import IMAGE_TOKENS, VOCABULARY, build_image_tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["MOST", "SPLITS", "CountSquares", "build_image_processor", "build_vision_config", "draw_squares"]

SPLITS: Mapping[str, int] = {"test": 500, "sft": 2000, "sft_stop": 300, "train": 4000}
"""Number of rows in each file."""

MOST = 6
"""Largest number of squares in an image; the smallest is 1."""

_SIZE, _CELL, _SIDE, _PATCH = 24, 6, 4, 4


class CountSquares(BasePreprocessor):
    """Images of one to six squares to count, generated from the seed, with the config of a tiny vision-language model.

    Writes sft.jsonl (2000 rows for the supervised warm-up), sft_stop.jsonl (300 rows that decide when the warm-up
    stops), train.jsonl (4000 prompts), test.jsonl (500 prompts for evaluation) and the folder model: config, tokenizer
    and image processor, no weights (set model.random_init=true). Images are data: URLs in the files.
    """

    def run(self, source: Path | None, output: Path, seed: int = 0) -> PreprocessReport:
        """Write the files to ``output``; the same seed writes the same files.

        Raises:
            DataError: a source was given, but the task is generated.
        """
        if source is not None:
            raise DataError(f"count_squares generates its data and reads no source, got {source}")
        # Write the model first, because a trainer that finds its data files assumes that everything is there.
        folder = str(output / "model")
        build_image_tokenizer().save_pretrained(folder)
        build_image_processor().save_pretrained(folder)
        build_vision_config().save_pretrained(folder)
        drawn = _draw(seed)
        rows: dict[str, int] = {}
        for split, count in SPLITS.items():
            written = [_row(image, squares, split) for image, squares in itertools.islice(drawn, count)]
            rows[f"{split}.jsonl"] = write_jsonl(output / f"{split}.jsonl", written)
        return PreprocessReport(rows, ["model/ has no weights: set model.random_init=true"])


def build_vision_config() -> Qwen2_5_VLConfig:
    """Return the config of the model, which has 0.3 million parameters."""
    ids = {token: len(VOCABULARY) + place for place, token in enumerate(IMAGE_TOKENS)}
    text: dict[str, Any] = {
        "vocab_size": len(VOCABULARY) + len(IMAGE_TOKENS),
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        # vLLM's CPU kernels support heads of 32 dimensions and more.
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "pad_token_id": VOCABULARY.index("<pad>"),
        "bos_token_id": VOCABULARY.index("<bos>"),
        "eos_token_id": VOCABULARY.index("<eos>"),
    }
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": _PATCH,
        # Windows would cost a call of attention each, and an image has only nine tokens.
        "out_hidden_size": text["hidden_size"],
        "fullatt_block_indexes": [0, 1],
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
        architectures=["Qwen2_5_VLForConditionalGeneration"],
    )


def build_image_processor() -> Any:
    """Return the image processor, with patches of 4 pixels, of which 2 by 2 become one token."""
    # Here, because the class needs Pillow.
    from transformers import Qwen2VLImageProcessor

    return Qwen2VLImageProcessor(
        patch_size=_PATCH,
        size={"shortest_edge": (2 * _PATCH) ** 2, "longest_edge": 4096},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )


def draw_squares(squares: int, generator: random.Random) -> Image:
    """Return an image of 24 by 24 pixels with this number of squares, which do not touch."""
    from PIL import Image, ImageDraw

    red, green, blue = (generator.randrange(80) for _ in range(3))
    image = Image.new("RGB", (_SIZE, _SIZE), (red, green, blue))
    pencil = ImageDraw.Draw(image)
    cells = list(itertools.product(range(_SIZE // _CELL), repeat=2))
    for cell in generator.sample(cells, squares):
        left, top = (place * _CELL + generator.randrange(_CELL - _SIDE) for place in cell)
        red, green, blue = (generator.randrange(150, 256) for _ in range(3))
        pencil.rectangle((left, top, left + _SIDE - 1, top + _SIDE - 1), fill=(red, green, blue))
    return image


def _draw(seed: int) -> Iterator[tuple[Image, int]]:
    generator = random.Random(f"count_squares:{seed}")  # noqa: S311  # no secret
    while True:
        squares = generator.randint(1, MOST)
        yield draw_squares(squares, generator), squares


def _row(image: Image, squares: int, split: str) -> dict[str, Any]:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    content = [{"type": "image", "image": url}, {"type": "text", "text": "="}]
    columns = {"sft": ("response",), "sft_stop": ("response", "ground_truth")}.get(split, ("ground_truth",))
    return {"prompt": [{"role": "user", "content": content}], **dict.fromkeys(columns, str(squares))}
