"""The worker of the reward model: a frozen value model, read at each response's last token."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch

from rollcast import register
from rollcast.errors import ConfigError
from rollcast.protocol import DataProto, Jagged
from rollcast_dispatch import make_token_balanced_dispatch_fn
from rollcast_trainer.workers.training import ModelWorker, TrainingWorker, WorkerSetup

__all__ = ["RewardModelWorker", "check_reward_model", "with_end_state"]


def check_reward_model(path: str | None) -> str:
    """Return the folder of a reward model after checking that it has a head ``score`` with one output.

    Raises:
        ConfigError: the folder does not exist or has no such head.
    """
    from safetensors import safe_open

    if not path:
        raise ConfigError("reward_model.enable is true, but reward_model.model.path is empty; set it to its folder")
    if not Path(path).is_dir():
        raise ConfigError(f"reward_model.model.path is {path!r}, which is not a folder")
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            if "score.weight" in tensors.keys():  # noqa: SIM118  # it is no mapping
                shape = list(tensors.get_slice("score.weight").get_shape())
                if shape[0] != 1:
                    raise ConfigError(f"reward_model.model.path {path}: its head has {shape[0]} outputs, not one")
                return path
    raise ConfigError(
        f"reward_model.model.path {path} has no head `score.weight` in its *.safetensors; use a model of the class "
        "...ForSequenceClassification or ...ForTokenClassification with one label"
    )


def with_end_state(batch: DataProto, pad_token_id: int) -> DataProto:
    """Return the batch with one token appended to each row.

    The value of the state before the appended token is the value after the last real token. No real token attends to
    it.

    Args:
        batch: ``prompts``, ``responses`` and ``response_mask``.
        pad_token_id: id of the appended token.

    Returns:
        The same columns; ``response_mask`` is True only at the appended token.
    """
    responses = Jagged.of(batch["responses"], "responses")
    lengths = responses.lengths + 1
    ends = lengths.cumsum(0)
    ids = responses.values.new_full((int(lengths.sum()),), pad_token_id)
    is_new = torch.zeros(len(ids), dtype=torch.bool).index_fill_(0, ends - 1, True)
    ids[~is_new] = responses.values
    longer = Jagged.from_lengths(ids, lengths)
    return batch.select(["prompts"]).with_columns({"responses": longer, "response_mask": longer.with_values(is_new)})


class RewardModelWorker(ModelWorker):
    """Worker with a frozen value model; its mesh is ``reward_model``."""

    trains: ClassVar[bool] = False
    mesh: ClassVar[str] = "reward_model"

    def __init__(self, setup: WorkerSetup) -> None:
        super().__init__(setup)
        self.model = TrainingWorker(setup, frozen=True, model_type="value_model")

    @register(dispatch_mode="one_to_all")
    def init_model(self) -> None:
        """Build the model and register the mesh."""
        self.model.init_model()
        self.register_engine("reward_model", self.model.engine)

    @register(dispatch_mode=make_token_balanced_dispatch_fn("reward_model"), rows="same")
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Return ``rm_scores``, float32 ``[B]``: the model's value after each response's last token."""
        rows = with_end_state(data, self.setup.pad_token_id)
        values = self.model.infer_batch(rows, self.setup.infer)["values"]
        return DataProto.from_dict({"rm_scores": Jagged.of(values).sums()}, length=len(data))
