"""The dispatch mode ``my_plugin``: rows are dealt to the ranks in turn."""

from collections.abc import Sequence
from typing import Any

import torch

from rollcast.contracts.dispatch import Calls, DispatchMode
from rollcast.protocol import DataProto


class MyPlugin(DispatchMode):
    """Rank ``r`` of ``n`` gets rows ``r``, ``r + n``, ``r + 2n`` and so on."""

    name = "my_plugin"

    def dispatch(self, worker_group: Any, data: DataProto) -> Calls:
        rows, size = torch.arange(len(data)), worker_group.world_size
        stripes = [rows[rank::size] for rank in range(size)]
        return Calls.each([data.select_idxs(stripe) for stripe in stripes], state=torch.cat(stripes))

    def collect(self, worker_group: Any, outputs: Sequence[Any]) -> DataProto:
        return DataProto.concat(list(outputs)).reordered(outputs.state.argsort())
