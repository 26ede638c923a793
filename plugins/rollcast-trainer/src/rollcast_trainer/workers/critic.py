"""The critic's worker."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from rollcast import Worker, register
from rollcast.errors import CapabilityError
from rollcast.protocol import DataProto
from rollcast_dispatch import make_nd_compute_dataproto_dispatch_fn
from rollcast_trainer.batch.mini_batches import UpdatePlan
from rollcast_trainer.workers.training import TrainingWorker, WorkerSetup, leave_process_group

__all__ = ["CriticWorker"]


class CriticWorker(Worker):
    """Worker with a value model; its mesh is ``critic``."""

    trains: ClassVar[bool] = True
    mesh: ClassVar[str] = "critic"

    def __init__(self, setup: WorkerSetup) -> None:
        self.setup = setup
        self.critic = TrainingWorker(setup, model_type="value_model", prefix="critic")
        self.is_built = False

    @register(dispatch_mode="one_to_all")
    def init_model(self) -> None:
        """Build the value model and register the mesh."""
        self.critic.init_model()
        engine = self.critic.engine
        self.register_mesh("critic", engine.get_data_parallel_rank(), engine.is_mp_src_rank_with_outputs())
        self.is_built = True

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("critic"), rows="same")
    def compute_values(self, data: DataProto) -> DataProto:
        """Return ``values``, jagged float32: the value of the state before each response token."""
        return self.critic.infer_batch(data, self.setup.infer)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("critic"))
    def update_critic(self, data: DataProto, plan: UpdatePlan) -> list[dict[str, float]]:
        """Take optimizer steps over the plan's mini-batches, and return metrics, which are the same on every rank."""
        if self.setup.loss_function is None:
            raise CapabilityError("this worker was built without a loss function and cannot train")
        return self.critic.train_mini_batches(data, plan, self.setup.loss_function, self.setup.forward)

    @register(dispatch_mode="one_to_all")
    def save_checkpoint(self, path: str) -> None:
        """Write the critic's state under ``path``.

        Raises:
            CheckpointError: something could not be written.
        """
        self.critic.engine.save_checkpoint(Path(path) / "critic")

    @register(dispatch_mode="one_to_all")
    def start_checkpoint(self, path: str) -> None:
        """Start writing a checkpoint in the background; complete it with :meth:`finish_checkpoint`."""
        self.critic.engine.start_checkpoint(Path(path) / "critic")

    @register(dispatch_mode="one_to_all")
    def finish_checkpoint(self, wait: bool) -> bool:
        """Return True if everything that :meth:`start_checkpoint` began is written.

        Raises:
            CheckpointError: it could not be written.
        """
        return self.critic.engine.finish_checkpoint(wait)

    @register(dispatch_mode="one_to_all")
    def load_checkpoint(self, path: str) -> None:
        """Restore the state that :meth:`save_checkpoint` wrote.

        Raises:
            CheckpointError: the state is incomplete or belongs to another model.
        """
        self.critic.engine.load_checkpoint(Path(path) / "critic")

    def record_state(self, folder: str) -> None:
        """Save a checkpoint for a record of calls, if the model is built."""
        if self.is_built:
            self.save_checkpoint(folder)

    def replay_state(self, folder: str) -> None:
        """Build the model and load its checkpoint, if the record has one."""
        if (Path(folder) / "critic").exists():
            self.init_model()
            self.load_checkpoint(folder)

    def close(self) -> None:
        """Leave the process group."""
        leave_process_group()
