"""The critic's worker."""

from __future__ import annotations

from typing import ClassVar

from rollcast import register
from rollcast.contracts.engine import BaseEngine
from rollcast.errors import CapabilityError
from rollcast.protocol import DataProto
from rollcast_dispatch import make_nd_compute_dataproto_dispatch_fn, make_token_balanced_dispatch_fn
from rollcast_trainer.batch.mini_batches import UpdatePlan
from rollcast_trainer.workers.training import ModelWorker, TrainingWorker, WorkerSetup

__all__ = ["CriticWorker"]


class CriticWorker(ModelWorker):
    """Worker with a value model; its mesh is ``critic``."""

    trains: ClassVar[bool] = True
    mesh: ClassVar[str] = "critic"

    def __init__(self, setup: WorkerSetup) -> None:
        super().__init__(setup)
        self.critic = TrainingWorker(setup, model_type="value_model", prefix="critic")

    def trained(self) -> dict[str, BaseEngine]:
        return {"critic": self.critic.engine}

    @register(dispatch_mode="one_to_all")
    def init_model(self) -> None:
        """Build the value model and register the mesh."""
        self.critic.init_model()
        self.register_engine("critic", self.critic.engine)

    @register(dispatch_mode=make_token_balanced_dispatch_fn("critic"), rows="same")
    def compute_values(self, data: DataProto) -> DataProto:
        """Return ``values``, jagged float32: the value of the state before each response token."""
        return self.critic.infer_batch(data, self.setup.infer)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("critic"))
    def update_critic(self, data: DataProto, plan: UpdatePlan) -> list[dict[str, float]]:
        """Take optimizer steps over the plan's mini-batches, and return metrics, which are the same on every rank."""
        if self.setup.loss_function is None:
            raise CapabilityError("this worker was built without a loss function and cannot train")
        return self.critic.train_mini_batches(data, plan, self.setup.loss_function, self.setup.forward)
