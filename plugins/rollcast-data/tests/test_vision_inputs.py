"""Images on their way from a file to a model's inputs."""

from __future__ import annotations

import base64
import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from rollcast.errors import CapabilityError, DataError
from rollcast_data.vision.images import decode_image, read_image
from rollcast_data.vision.model_inputs import ImageInputs, images_of
from rollcast_data.vision.positions import mrope_positions
from rollcast_testing.tiny_vision import noise_image, tiny_vision_folder, vision_prompt

IMAGE = 5


def png(size: tuple[int, int] = (4, 3), colour: tuple[int, int, int] = (1, 2, 3)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, format="PNG")
    return buffer.getvalue()


def test_all_forms_are_the_same_image(tmp_path: Path) -> None:
    data = png()
    (tmp_path / "a.png").write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    array = np.broadcast_to(np.array([1, 2, 3], np.uint8), (3, 4, 3)).copy()
    given: list[Any] = [data, bytearray(data), "a.png", str(tmp_path / "a.png"), url, {"bytes": data, "path": None}]
    given += [{"bytes": None, "path": "a.png"}, Image.new("RGB", (4, 3), (1, 2, 3)), array]
    for value in given:
        image = decode_image(read_image(value, "rows.jsonl:1", tmp_path))
        assert image.size == (4, 3)
        assert image.getpixel((0, 0)) == (1, 2, 3)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("none.png", r"rows\.jsonl:1: the image .*none\.png cannot be read"),
        ("https://a/b.png", "images are not downloaded during a run"),
        ("data:image/png,abc", "has to be base64"),
        ("data:image/png;base64,?", "is not base64"),
        (3, "this is int"),
    ],
)
def test_other_values_are_refused_by_place(value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read_image(value, "rows.jsonl:1", tmp_path)


def test_bytes_that_are_no_image_are_refused() -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:1: 3 bytes are no image"):
        decode_image(b"abc", "rows.jsonl:1")


def test_other_modalities_are_refused() -> None:
    assert images_of(None) == ()
    assert images_of({"image": [b"a"], "video": []}) == (b"a",)
    with pytest.raises(CapabilityError, match=r"carries multi_modal_data \(video\)"):
        images_of({"video": [b"a"]})


def reference(ids: torch.Tensor, mask: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
    """Positions of transformers."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = {
        "vocab_size": 16,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = Qwen2_5_VLConfig(
        text_config={**text, "num_key_value_heads": 2, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=IMAGE,
    )
    model: Any = Qwen2_5_VLForConditionalGeneration(config)
    types = (ids == IMAGE).int()
    found: torch.Tensor = model.model.get_rope_index(ids, types, image_grid_thw=patches, attention_mask=mask)[0]
    return found


def test_positions_are_those_of_transformers() -> None:
    rows = [[0, 0, 7, *[IMAGE] * 6, 8, *[IMAGE] * 2, 9, 10, 0], [0, 6, *[IMAGE] * 8, 8, 9, 10, 11, 0]]
    rows = [row + [0] * (16 - len(row)) for row in rows]
    ids = torch.tensor(rows)
    mask = torch.zeros_like(ids)
    mask[0, 2:14] = 1
    mask[1, 1:14] = 1
    grids = [[(1, 2, 3), (1, 1, 2)], [(2, 2, 2)]]
    patches = torch.tensor([[1, 4, 6], [1, 2, 4], [2, 4, 4]])
    expected = reference(ids, mask, patches)
    assert torch.equal(mrope_positions(ids, mask, IMAGE, grids), expected)
    # Not merely those of text.
    assert not torch.equal(expected[0], expected[1])


def test_a_cut_prompt_is_refused() -> None:
    with pytest.raises(DataError, match=r"a row has 3 image placeholders .* its 1 images have 4 tokens"):
        mrope_positions(torch.tensor([[IMAGE] * 3]), torch.ones(1, 3), IMAGE, [[(1, 2, 2)]])


def test_images_may_be_processed_in_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for two images, so that threads evict what others use."""
    monkeypatch.setattr("rollcast_data.vision.model_inputs._CACHE_BYTES", 2 * 24 * 96 * 4)
    inputs = ImageInputs(tiny_vision_folder(tmp_path / "model"))
    images = [noise_image(seed) for seed in range(5)] * 20
    expected = {image: inputs.pixels([image])[0] for image in images[:5]}
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda image: inputs.pixels([image])[0], images))
    assert all(torch.equal(expected[image], pixels) for image, pixels in zip(images, found, strict=True))
    assert inputs._cached_bytes == sum(each.pixel_values.nbytes for each in inputs._cache.values()) <= 2 * 24 * 96 * 4


def test_the_places_of_images_are_found_in_the_expanded_prompt(tmp_path: Path) -> None:
    folder = tiny_vision_folder(tmp_path / "model")
    first, second = noise_image(1), noise_image(2, 40, 32)
    ids, images = vision_prompt(folder, [5, 6], first, second, [7])
    inputs = ImageInputs(folder)
    assert inputs.spans(ids, images, "row 1") == [(3, 6), (11, 20)]
    assert inputs.spans([5, 6], (), "row 1") == []
    with pytest.raises(DataError, match=r"row 1: the prompt has 26 image placeholders .* its 1 images have 6 tokens"):
        inputs.spans(ids, images[:1], "row 1")
    with pytest.raises(DataError, match="the 20 placeholders of image 1 do not follow one another"):
        inputs.spans([*ids[:12], 5, *ids[12:]], images, "row 1")
    assert inputs.largest(1000) == 64
    assert inputs.largest(10) == 10
