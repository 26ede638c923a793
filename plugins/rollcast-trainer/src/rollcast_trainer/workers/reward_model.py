"""The reward model: a value model that is not trained, read at each response's last token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torch

from rollcast import Worker, register
from rollcast.errors import ConfigError
from rollcast.protocol import DataProto
from rollcast_dispatch import make_nd_compute_dataproto_dispatch_fn
from rollcast_trainer.workers.training import TrainingWorker, WorkerSetup, leave_process_group

__all__ = ["RewardModelWorker", "check_reward_model", "with_end_state"]

_SCORED = ("input_ids", "attention_mask", "responses", "response_mask")


def check_reward_model(path: str | None) -> str:
    """The folder of a reward model, if it is one: a transformer's body and a head ``score`` with one output.

    Raises:
        ConfigError: there is no such folder, or no head in it.
    """
    from safetensors import safe_open

    if not path:
        raise ConfigError("reward_model.enable is true, but reward_model.model.path is empty; give a model's folder")
    if not Path(path).is_dir():
        raise ConfigError(f"reward_model.model.path is {path!r}, which is not a folder")
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            if "score.weight" in tensors.keys():  # noqa: SIM118  # it is no mapping
                shape = list(tensors.get_slice("score.weight").get_shape())
                if shape[0] != 1:
                    raise ConfigError(f"reward_model.model.path {path}: its head gives {shape[0]} numbers, not one")
                return path
    raise ConfigError(
        f"reward_model.model.path {path} has no head `score.weight` in its *.safetensors; give a model of the class "
        "...ForSequenceClassification or ...ForTokenClassification with one label"
    )


def with_end_state(batch: Mapping[str, torch.Tensor], pad_token_id: int) -> dict[str, torch.Tensor]:
    """The batch with one more position, so that each row's last token has one after it.

    The state in which that next token would be chosen is the one after the last token. Nothing before
    it sees the token that stands there.

    Args:
        batch: ``input_ids`` ``[B, P + T]``, ``attention_mask`` ``[B, P + T]``, ``responses`` and
            ``response_mask`` ``[B, T]``.
        pad_token_id: stands at the new position.

    Returns:
        The same columns with ``T + 1`` positions, and ``position_ids``; ``response_mask`` is 1 at the
        position after the last token, and nowhere else.
    """
    lengths = batch["response_mask"].sum(-1, keepdim=True)
    positions = torch.arange(batch["response_mask"].shape[1] + 1)
    prompts = batch["attention_mask"].shape[1] - batch["response_mask"].shape[1]
    attention = torch.cat([batch["attention_mask"][:, :prompts], (positions <= lengths).long()], 1)
    return {
        "input_ids": torch.nn.functional.pad(batch["input_ids"], (0, 1), value=pad_token_id),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
        "responses": torch.nn.functional.pad(batch["responses"], (0, 1), value=pad_token_id),
        "response_mask": (positions == lengths).long(),
    }


class RewardModelWorker(Worker):
    """A frozen value model; the mesh is ``reward_model``."""

    trains: ClassVar[bool] = False
    mesh: ClassVar[str] = "reward_model"

    def __init__(self, setup: WorkerSetup) -> None:
        self.setup = setup
        self.model = TrainingWorker(setup, frozen=True, model_type="value_model")

    @register(dispatch_mode="one_to_all")
    def init_model(self) -> None:
        """Build the model and register the mesh."""
        self.model.init_model()
        engine = self.model.engine
        self.register_mesh("reward_model", engine.get_data_parallel_rank(), engine.is_mp_src_rank_with_outputs())

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("reward_model"))
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """``rm_scores`` float32 ``[B]``: the model's value after each response's last token."""
        columns = with_end_state({name: data[name] for name in _SCORED}, self.setup.pad_token_id)
        values = self.model.infer_batch(DataProto.from_dict(columns), self.setup.infer)["values"]
        return DataProto.from_dict({"rm_scores": values.sum(-1)}, length=len(data))

    def replay_state(self, folder: str) -> None:
        """The model; it has no state beside."""
        self.init_model()

    def close(self) -> None:
        """Leave the process group."""
        leave_process_group()
