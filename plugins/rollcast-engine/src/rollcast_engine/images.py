"""Images of a batch's rows on their way into the model's inputs.

Axes: ``b`` rows of a micro-batch, ``s`` prompt and response positions, ``t`` response positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from rollcast.contracts.rollout import MULTI_MODAL_DATA
from rollcast.protocol import DataProto
from rollcast_data.vision.model_inputs import ImageInputs, images_of

if TYPE_CHECKING:
    from rollcast_engine._rows import MicroBatch

__all__ = ["IMAGE_INPUTS", "MicroImages", "read_images"]

#: Model inputs whose rows are patches or images and not the rows of the micro-batch.
IMAGE_INPUTS = ("pixel_values", "image_grid_thw")


def read_images(data: DataProto) -> list[tuple[bytes, ...]]:
    """Return the images of each row, encoded; empty if no row has any.

    Raises:
        CapabilityError: a row has another modality.
    """
    if MULTI_MODAL_DATA not in data:
        return []
    images = [images_of(row) for row in data[MULTI_MODAL_DATA]]
    return images if any(images) else []


class MicroImages:
    """Adds ``pixel_values``, ``image_grid_thw`` and three-axis ``position_ids`` to the inputs of micro-batches.

    Args:
        inputs: image processor of the model.
        fills: True to run the vision tower for every micro-batch, because ranks that shard it gather its weights
            together.
    """

    def __init__(self, inputs: ImageInputs, fills: bool) -> None:
        self._inputs = inputs
        self._fills = fills

    def attach(self, micro: MicroBatch, images: Sequence[tuple[bytes, ...]]) -> MicroBatch:
        """Return a micro-batch with its images.

        Without any image, a row with a blank one is appended to the model's inputs if the tower has to run: the model
        then returns ``b + 1`` rows, of which the last does not count.

        Args:
            micro: micro-batch in host memory.
            images: images of each of its rows; empty for none.
        """
        ids, mask = micro.model_inputs["input_ids"], micro.model_inputs["attention_mask"]
        width = micro.responses.size(1)
        # A placeholder that the policy sampled has no image, whether or not other rows have some.
        ids = torch.cat([ids[:, :-width], self._inputs.neutralize(ids[:, -width:])], 1)
        if not any(images):
            plain = replace(micro, model_inputs={**micro.model_inputs, "input_ids": ids})
            return self._with_blank(micro, ids) if self._fills else plain
        pixels, grids = self._inputs.pixels(image for row in images for image in row)
        positions = self._inputs.positions(ids, mask, images)
        inputs = {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": positions,
            "pixel_values": pixels,
            "image_grid_thw": grids,
        }
        return replace(micro, model_inputs=inputs)

    def _with_blank(self, micro: MicroBatch, ids: torch.Tensor) -> MicroBatch:
        row = torch.full((1, ids.size(1)), self._inputs.neutral_id)
        row[0, 0] = self._inputs.image_token_id
        pixels, grids = self._inputs.blank()
        mask, positions = micro.model_inputs["attention_mask"], micro.model_inputs["position_ids"]
        inputs = {
            "input_ids": torch.cat([ids, row]),
            "attention_mask": torch.cat([mask, torch.ones_like(row)]),
            "position_ids": torch.cat([positions, torch.arange(ids.size(1)).unsqueeze(0)]),
            "pixel_values": pixels,
            "image_grid_thw": grids,
        }
        return replace(micro, model_inputs=inputs)
