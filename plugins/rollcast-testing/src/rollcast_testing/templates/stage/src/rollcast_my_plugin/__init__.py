"""The stage ``my_plugin``: the share of a prompt's samples that score nothing."""

import torch

from rollcast.contracts.stage import Stage, StageSpec
from rollcast.protocol import DataProto


class MyPlugin(Stage):
    """Writes ``my_plugin`` float32 ``[B]``: the share of the samples of a row's prompt that score nothing."""

    spec = StageSpec(reads=("uid", "token_level_scores"), writes=("my_plugin",))

    def __call__(self, batch: DataProto) -> DataProto:
        failed = (batch["token_level_scores"].sum(-1) <= 0).float()
        prompts, place = batch["uid"].unique(return_inverse=True)
        sums = torch.zeros(len(prompts)).index_add_(0, place, failed)
        share = (sums / place.bincount(minlength=len(prompts)).clamp(min=1))[place]
        self.run.record({"reward/my_plugin": float(share.mean()) if len(share) else 0.0})
        return batch.with_columns({"my_plugin": share})
