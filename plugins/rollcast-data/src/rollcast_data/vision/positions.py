"""Three-axis rotary positions (mROPE) of rows with images.

Axes: ``b`` rows, ``s`` positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rollcast.errors import DataError

__all__ = ["mrope_positions"]

Grid = tuple[int, int, int]


def mrope_positions(
    input_ids: Tensor, attention_mask: Tensor, image_token_id: int, grids: Sequence[Sequence[Grid]]
) -> Tensor:
    """Return the positions of each token by time, height and width, int64 ``[3, b, s]``; 0 under a zero mask.

    A text token has three equal positions, one after the greatest position before it. The tokens of an image start
    there too, and count frames, lines and columns.

    Args:
        input_ids, attention_mask: int64 ``[b, s]``.
        image_token_id: id of the placeholder, which stands once for each token of an image.
        grids: frames, lines and columns of tokens of each image, per row in the order of the placeholders.

    Raises:
        DataError: a row has another number of placeholders than its images have tokens.
    """
    present = attention_mask > 0
    positions = (present.cumsum(1) - 1).clamp(min=0).expand(3, *input_ids.shape).clone()
    for row, images in enumerate(grids):
        places = ((input_ids[row] == image_token_id) & present[row]).nonzero().flatten()
        needed = sum(frames * lines * columns for frames, lines, columns in images)
        if len(places) != needed:
            raise DataError(
                f"a row has {len(places)} image placeholders (token id {image_token_id}), but its {len(images)} images "
                f"have {needed} tokens; a prompt with images must not be cut"
            )
        start = 0
        for frames, lines, columns in images:
            count = frames * lines * columns
            own = places[start : start + count]
            first = int(positions[0, row, own[0]])
            axes = (torch.arange(frames), torch.arange(lines), torch.arange(columns))
            offsets = torch.stack(torch.meshgrid(*axes, indexing="ij")).reshape(3, -1)
            positions[:, row, own] = first + offsets
            positions[:, row, int(own[-1]) + 1 :] += max(lines, columns) - count
            start += count
    return positions * present
