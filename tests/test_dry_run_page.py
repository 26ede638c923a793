"""docs/dry-runs.md: its numbers of cells are those of the table."""

from __future__ import annotations

import re

from page_packages import DOCS

from rollcast_dryrun.cells import fsdp_cells, megatron_cells, sync_cells
from rollcast_dryrun.devices import cells_of_one_device


def test_numbers_of_cells() -> None:
    page = " ".join((DOCS / "dry-runs.md").read_text("utf-8").split())
    table = re.search(
        r"(\d+) of FSDP .*?, (\d+) of Megatron .*?, (\d+) of these with .*?, and (\d+) of weight syncs", page
    )
    device = re.search(r"one device can run, (\d+) of them \((\d+) need Transformer Engine\)", page)
    assert table is not None
    assert device is not None
    megatron, alone = megatron_cells(), cells_of_one_device()
    fused = [sum(cell.transformer_engine for cell in cells) for cells in (megatron, alone)]
    assert [int(text) for text in table.groups()] == [len(fsdp_cells()), len(megatron), fused[0], len(sync_cells())]
    assert [int(text) for text in device.groups()] == [len(alone), fused[1]]
