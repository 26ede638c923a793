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
    """A value model behind registered methods; the mesh is ``critic``."""

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
        """``values`` of the states in which the response tokens were chosen, jagged float32."""
        return self.critic.infer_batch(data, self.setup.infer)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("critic"))
    def update_critic(self, data: DataProto, plan: UpdatePlan) -> list[dict[str, float]]:
        """Optimizer steps over the plan's mini-batches; metrics, the same on every rank."""
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
        """The same, but what can be written meanwhile is; see :meth:`finish_checkpoint`."""
        self.critic.engine.start_checkpoint(Path(path) / "critic")

    @register(dispatch_mode="one_to_all")
    def finish_checkpoint(self, wait: bool) -> bool:
        """Whether all that :meth:`start_checkpoint` began is written.

        Raises:
            CheckpointError: it could not be written.
        """
        return self.critic.engine.finish_checkpoint(wait)

    @register(dispatch_mode="one_to_all")
    def load_checkpoint(self, path: str) -> None:
        """Take back what :meth:`save_checkpoint` wrote.

        Raises:
            CheckpointError: it is incomplete or of another model.
        """
        self.critic.engine.load_checkpoint(Path(path) / "critic")

    def record_state(self, folder: str) -> None:
        """A checkpoint, if there is a model already."""
        if self.is_built:
            self.save_checkpoint(folder)

    def replay_state(self, folder: str) -> None:
        """The model and its checkpoint, if the record has one."""
        if (Path(folder) / "critic").exists():
            self.init_model()
            self.load_checkpoint(folder)

    def close(self) -> None:
        """Leave the process group."""
        leave_process_group()
