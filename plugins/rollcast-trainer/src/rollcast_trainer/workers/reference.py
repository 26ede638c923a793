"""The worker of a reference policy in its own pool."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from rollcast import Worker, register
from rollcast.protocol import DataProto
from rollcast_dispatch import make_nd_compute_dataproto_dispatch_fn
from rollcast_trainer.workers.training import TrainingWorker, WorkerSetup, leave_process_group

__all__ = ["RefWorker"]


class RefWorker(Worker):
    """Worker with a frozen copy of the initial model; its mesh is ``ref``."""

    trains: ClassVar[bool] = False
    mesh: ClassVar[str] = "ref"

    def __init__(self, setup: WorkerSetup) -> None:
        self.setup = setup
        plain = replace(setup, model=setup.model.without_adapter())
        self.ref = TrainingWorker(plain, frozen=True, offload=setup.offload_reference)

    @register(dispatch_mode="one_to_all")
    def init_model(self) -> None:
        """Build the model and register the mesh."""
        self.ref.init_model()
        engine = self.ref.engine
        self.register_mesh("ref", engine.get_data_parallel_rank(), engine.is_mp_src_rank_with_outputs())

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("ref"), rows="same")
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Return ``ref_log_prob`` under the reference policy, jagged float32."""
        settings = self.setup.infer
        plain = replace(settings, calculate_entropy=False, calculate_sum_pi_squared=False, record_routing=False)
        output = self.ref.infer_batch(data, plain)
        return output.rename({"log_probs": "ref_log_prob"})

    def replay_state(self, folder: str) -> None:
        """Build the model; it has no other state."""
        self.init_model()

    def close(self) -> None:
        """Leave the process group."""
        leave_process_group()
