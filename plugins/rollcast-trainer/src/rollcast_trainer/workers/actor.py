"""The actor's worker: policy, rollout and, if needed, the reference policy in one process."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from rollcast import register
from rollcast.contracts.device import empty_cache
from rollcast.contracts.engine import BaseEngine
from rollcast.contracts.rendezvous import set_timeouts
from rollcast.contracts.rollout import BaseRollout, RolloutSetup, SamplingParams, rollouts
from rollcast.contracts.weights import WeightReport
from rollcast.errors import CapabilityError, CheckpointError, RolloutError, WeightSyncError
from rollcast.protocol import DataProto, Jagged
from rollcast_dispatch import make_nd_compute_dataproto_dispatch_fn, make_token_balanced_dispatch_fn
from rollcast_serving.casting import WeightCast
from rollcast_serving.client import ReplicaReceiver
from rollcast_serving.contracts.weight_sync import BaseWeightSync, SyncOutcome, SyncSettings, weight_syncs
from rollcast_serving.generation import generate_sequences
from rollcast_serving.launcher import ReplicaAddress, served_by
from rollcast_trainer.batch.columns import POLICY_GAP
from rollcast_trainer.batch.mini_batches import UpdatePlan
from rollcast_trainer.workers.heap import freeze_heap, unfreeze_heap
from rollcast_trainer.workers.training import ModelWorker, TrainingWorker, WorkerSetup

__all__ = ["ActorRolloutRefWorker"]

#: Seconds that collectives may take in a run whose weights go to replicas; at least so much above the sync's timeout.
_COLLECTIVE_S, _MARGIN_S = 1800.0, 600.0


def _seed_process(seed: int) -> None:
    """Seed the process's global random streams, which dropout and the like use."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _compare(data: DataProto, output: DataProto) -> dict[str, torch.Tensor]:
    """Return the columns ``POLICY_GAP`` of a pass."""
    mask = Jagged.of(data["response_mask"])
    outside = ~mask.values.bool()
    old, rollout = Jagged.of(output["old_log_probs"]).values, Jagged.of(data["rollout_log_probs"]).values
    gap = (old - rollout).abs().masked_fill(outside, 0.0)
    entropy = Jagged.of(output["entropy"]).values.masked_fill(outside, 0.0)
    sums = [mask.with_values(values).sums() for values in (entropy, gap)]
    largest = torch.zeros(len(data)).scatter_reduce_(0, mask.rows, gap, "amax")
    return dict(zip(POLICY_GAP, (*sums, largest), strict=True))


class ActorRolloutRefWorker(ModelWorker):
    """Worker with actor, rollout and, if needed, the reference policy in one process; its mesh is ``actor``."""

    #: Generation and training run in one thread, so that they share one team of OpenMP threads.
    concurrent_async: ClassVar[bool] = False
    trains: ClassVar[bool] = True
    mesh: ClassVar[str] = "actor"

    def __init__(self, setup: WorkerSetup) -> None:
        super().__init__(setup)
        self.actor = TrainingWorker(setup)
        needs_copy = setup.has_reference and not setup.model.trains_adapter
        self.ref = TrainingWorker(setup, frozen=True, offload=setup.offload_reference) if needs_copy else None
        self.rollout: BaseRollout | None = None
        self.weight_sync: BaseWeightSync | None = None
        #: Replicas that have received the base weights.
        self._based: set[ReplicaAddress] = set()

    @register(dispatch_mode="one_to_all")
    def init_model(self) -> None:
        """Build actor, reference and rollout, and register the mesh."""
        for part in (self.actor, self.ref):
            if part is not None:
                part.init_model()
        engine = self.actor.engine
        if self.setup.has_reference and self.setup.forward.vocabulary_kl is not None:
            engine.set_reference(engine if self.ref is None else self.ref.engine)
        self.register_engine("actor", engine)
        seed = self.setup.seed * 1_000_003 + engine.get_data_parallel_rank()
        _seed_process(seed)
        if self.setup.rollout is not None:
            self._build_rollout(seed)
        freeze_heap()

    def _build_rollout(self, seed: int) -> None:
        config = self.setup.rollout
        sync_class = weight_syncs.get(config.weight_sync, requested_by="rollout.weight_sync")
        if not sync_class.capabilities.same_process:
            dtype, model = self.setup.rollout_dtype, self.setup.model
            settings = SyncSettings(
                bucket_bytes=config.update_weights_bucket_megabytes << 20,
                timeout_s=config.sync_timeout_s,
                folder=config.sync_folder,
                cast=WeightCast.of_model(dtype, model.path, model.trust_remote_code) if dtype else None,
            )
            self.weight_sync = sync_class(self.actor.engine, (), settings)
            # The other ranks wait in a gather while one waits for a replica.
            set_timeouts(max(_COLLECTIVE_S, config.sync_timeout_s + _MARGIN_S))
            return
        rollout_class = rollouts.get(config.name, requested_by="rollout.name")
        self.rollout = rollout_class(
            RolloutSetup(
                config=config,
                model_path=self.setup.model.path,
                seed=seed,
                pad_token_id=self.setup.pad_token_id,
                eos_token_id=self.setup.eos_token_id,
                stop_token_ids=self.setup.stop_token_ids,
                trust_remote_code=self.setup.model.trust_remote_code,
            )
        )
        self.weight_sync = sync_class(self.actor.engine, [self.rollout])

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"), rows="same")
    async def generate_sequences(self, prompts: DataProto, sampling: SamplingParams) -> DataProto:
        """Return one response for each prompt; see :func:`rollcast_serving.generation.generate_sequences`."""
        if self.rollout is None:
            raise CapabilityError("this worker was built without a rollout; set rollout=... in the config")
        return await generate_sequences(self.rollout, prompts, sampling)

    @register(dispatch_mode=make_token_balanced_dispatch_fn("actor"), rows="same")
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Return ``old_log_probs`` under the actor and the other outputs that the setup asks for, jagged float32.

        If the batch has ``rollout_log_probs``, the columns ``POLICY_GAP`` are returned too.
        """
        output = self.actor.infer_batch(data, self.setup.infer).rename({"log_probs": "old_log_probs"})
        return output.with_columns(_compare(data, output)) if "rollout_log_probs" in data else output

    @register(dispatch_mode=make_token_balanced_dispatch_fn("actor"), rows="same")
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Return ``ref_log_prob`` under the reference policy, jagged float32."""
        if not self.setup.has_reference:
            raise CapabilityError(
                "this worker holds no reference policy; set actor.use_kl_loss or algorithm.use_kl_in_reward"
            )
        settings = self.setup.infer
        plain = replace(settings, calculate_entropy=False, calculate_sum_pi_squared=False, record_routing=False)
        if self.ref is not None:
            output = self.ref.infer_batch(data, plain)
        else:
            with self.actor.engine.disable_adapter():
                output = self.actor.infer_batch(data, plain)
        return output.rename({"log_probs": "ref_log_prob"})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
    def update_actor(self, data: DataProto, plan: UpdatePlan) -> list[dict[str, float]]:
        """Take optimizer steps over the plan's mini-batches, and return metrics, which are the same on every rank."""
        if self.setup.loss_function is None:
            raise CapabilityError("this worker was built without a loss function and cannot train")
        compared = self.ref if self.setup.forward.vocabulary_kl is not None else None
        with nullcontext() if compared is None else compared.on_device():
            return self.actor.train_mini_batches(data, plan, self.setup.loss_function, self.setup.forward)

    @register(dispatch_mode="one_to_all")
    def mix_reference(self, share: float) -> None:
        """Move the reference's weights towards the actor's by ``share``."""
        if self.ref is None:
            raise CapabilityError("this worker holds no copy of the model as its reference, so it cannot move it")
        with self.ref.on_device():
            self.ref.engine.mix_weights(self.actor.engine, share)

    def trained(self) -> dict[str, BaseEngine]:
        moving = self.ref if self.setup.reference_moves else None
        return {"actor": self.actor.engine, **({} if moving is None else {"ref": moving.engine})}

    @register(dispatch_mode="one_to_all")
    async def update_weights(
        self, version: int, replicas: Sequence[ReplicaAddress] = (), whole: bool = False
    ) -> SyncOutcome:
        """Send the actor's current weights, as ``version``, to the rollout or to replicas.

        Args:
            version: version of the weights.
            replicas: targets outside this process. A sync of shared devices sends from the rank on the replica's first
                device, another of one node from the node's first rank, and all others from rank 0.
            whole: also send the base weights of an adapter to replicas that have received them before.

        Returns:
            Metrics, and the errors of replicas that did not receive the weights.

        Raises:
            WeightSyncError: the rollout reports another version than it was sent.
        """
        if self.weight_sync is None:
            return SyncOutcome()
        served = served_by(self.context, self.weight_sync.capabilities, replicas)
        if not self.weight_sync.capabilities.same_process:
            silence_s = self.setup.rollout.replica.heartbeat_timeout_s
            self.weight_sync.targets = [ReplicaReceiver(address, silence_s=silence_s) for address in served]
        start = time.perf_counter()
        # Every rank decides the same: gathering the weights is a collective.
        only_adapter = not whole and self._based.issuperset(replicas)
        answers = await self.weight_sync.sync(version, only_adapter)
        # A rollout on the same device wakes up next, and finds only what the allocator has given back.
        empty_cache()
        reports = [answer for answer in answers if isinstance(answer, WeightReport)]
        for report in reports:
            if report.version != version:
                raise WeightSyncError(
                    f"weight sync {self.setup.rollout.weight_sync!r} was to send version {version} to the rollout, "
                    f"which reports {report.version}"
                )
        failed = {
            address.index: answer
            for address, answer in zip(served, answers, strict=False)
            if isinstance(answer, RolloutError)
        }
        self._based.update(replicas)
        numbers = frozenset(address.index for address in served)
        if not reports:
            return SyncOutcome(failed=failed, served=numbers)
        metrics = {
            "rollout/weight_version": float(version),
            "sync/tensors": float(reports[0].tensors),
            "sync/bytes": float(sum(report.bytes for report in reports)),
            "sync/seconds": time.perf_counter() - start,
            "sync/load_seconds": max(report.load_seconds for report in reports),
        }
        return SyncOutcome(metrics, failed, numbers)

    def save_further(self, folder: Path) -> None:
        """Write the state of the rollout's sampler."""
        if self.rollout is None:
            return
        try:
            torch.save(self.rollout.state_dict(), folder / f"rollout_rank_{self.rank}.pt")
        except (OSError, RuntimeError) as error:  # torch's own writer raises RuntimeError on a full disk
            raise CheckpointError(f"the rollout's state cannot be written to {folder}: {error}") from error

    def load_further(self, folder: Path) -> None:
        """Restore the sampler's state; a rank without one keeps its new one."""
        state = folder / f"rollout_rank_{self.rank}.pt"
        if self.rollout is None or not state.exists():
            return
        try:
            self.rollout.load_state_dict(torch.load(state, weights_only=True))
        except Exception as error:  # torch's unpickler and the rollout can raise any exception on damaged bytes
            reason = str(error).partition("\n")[0]
            raise CheckpointError(f"{state} cannot be read: {type(error).__name__}: {reason}") from error

    @register(dispatch_mode="one_to_all")
    def export(self, path: str) -> None:
        """Write the actor as a Hugging Face folder."""
        self.actor.engine.export(Path(path))

    def close(self) -> None:
        """Stop the rollout and leave the process group."""
        if self.weight_sync is not None:
            self.weight_sync.close()
        if self.rollout is not None:
            self.rollout.close()
        super().close()
        unfreeze_heap()
