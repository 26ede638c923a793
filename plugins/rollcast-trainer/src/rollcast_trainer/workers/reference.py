"""The worker of a reference policy in its own pool."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from rollcast import register
from rollcast.protocol import DataProto
from rollcast_dispatch import make_token_balanced_dispatch_fn
from rollcast_trainer.workers.training import ModelWorker, TrainingWorker, WorkerSetup

__all__ = ["RefWorker"]


class RefWorker(ModelWorker):
    """Worker with a frozen copy of the initial model; its mesh is ``ref``."""

    trains: ClassVar[bool] = False
    mesh: ClassVar[str] = "ref"

    def __init__(self, setup: WorkerSetup) -> None:
        super().__init__(setup)
        plain = replace(setup, model=setup.model.without_adapter())
        self.ref = TrainingWorker(plain, frozen=True, offload=setup.offload_reference)

    @register(dispatch_mode="one_to_all")
    def init_model(self) -> None:
        """Build the model and register the mesh."""
        self.ref.init_model()
        self.register_engine("ref", self.ref.engine)

    @register(dispatch_mode=make_token_balanced_dispatch_fn("ref"), rows="same")
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Return ``ref_log_prob`` under the reference policy, jagged float32."""
        settings = self.setup.infer
        plain = replace(settings, calculate_entropy=False, calculate_sum_pi_squared=False, record_routing=False)
        output = self.ref.infer_batch(data, plain)
        return output.rename({"log_probs": "ref_log_prob"})
