"""The dispatch mode ``my_plugin``: rows are dealt to the ranks in turn."""

import torch

from rollcast.contracts.dispatch import Calls, DispatchMode, DispatchTarget, RankOutputs
from rollcast.protocol import DataProto


class MyPlugin(DispatchMode):
    """Rank ``r`` of ``n`` gets rows ``r``, ``r + n``, ``r + 2n`` and so on."""

    name = "my_plugin"

    def dispatch(self, worker_group: DispatchTarget, data: DataProto) -> Calls:
        rows, size = torch.arange(len(data)), worker_group.world_size
        stripes = [rows[rank::size] for rank in range(size)]
        return Calls.each([data.select_idxs(stripe) for stripe in stripes], state=torch.cat(stripes))

    def collect(self, worker_group: DispatchTarget, outputs: RankOutputs) -> DataProto:
        joined: DataProto = DataProto.concat(list(outputs))
        return joined.reordered(outputs.state.argsort())
