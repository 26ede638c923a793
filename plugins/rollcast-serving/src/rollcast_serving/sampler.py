"""Where responses come from: a rollout in the actor's processes, or replicas in processes of their own."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rollcast import WorkerGroup
from rollcast.contracts.rollout import RolloutRequest, SamplingParams
from rollcast.contracts.sections import CanaryConfig
from rollcast.errors import WeightSyncError
from rollcast.protocol import DataProto, DataProtoFuture, Jagged, LazyBatch
from rollcast_serving.generation import SEQUENCES, assemble_sequences
from rollcast_serving.launcher import ReplicaAddress
from rollcast_serving.replicas import Replicas

__all__ = ["Canary", "InProcessSampler", "ReplicaSampler", "Sampler"]

logger = logging.getLogger(__name__)
_MODEL = ("prompts", "responses", "response_mask")


class Sampler(ABC):
    """Generates with the actor's weights; they are handed over by :meth:`sync`."""

    @abstractmethod
    def generate(self, prompts: DataProto, sampling: SamplingParams) -> DataProto:
        """A response for each row; see :func:`rollcast_serving.generation.generate_sequences`."""

    @abstractmethod
    def sync(self, version: int) -> dict[str, float]:
        """Hand the actor's present weights over, as ``version``; gives metrics.

        Raises:
            WeightSyncError: they did not arrive as they are.
        """

    def rest(self) -> None:
        """Give memory up until the next :meth:`sync` or :meth:`generate`; may be called again."""
        return

    def close(self) -> None:
        """Let go of what was started."""
        return


class InProcessSampler(Sampler):
    """The rollout in the actor's own processes.

    Args:
        group: the actor's view.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def generate(self, prompts: DataProto, sampling: SamplingParams) -> DataProto:
        handle = self._group.generate_sequences.remote(DataProtoFuture.of_batch(prompts), sampling)
        return LazyBatch.of(handle, SEQUENCES, {"prompts": prompts["prompts"].int()})

    def sync(self, version: int) -> dict[str, float]:
        metrics = self._group.update_weights(version)[0]
        # Nothing moved: there is no time or rate to tell.
        return {name: metrics[name] for name in ("rollout/weight_version", "sync/tensors") if name in metrics}


@dataclass(frozen=True)
class Canary:
    """The prompt that every replica continues after each sync.

    Attributes:
        prompt_ids: the prompt.
        sampling: with the temperature at which the actor computes log-probs.
        config: whether, and how far apart log-probs may be.
    """

    prompt_ids: Sequence[int]
    sampling: SamplingParams
    config: CanaryConfig


class ReplicaSampler(Sampler):
    """Replicas of an engine, which get the weights from the actor's workers.

    Args:
        group: the actor's view.
        replicas: started.
        canary: what is compared after each sync.
        takes_turns: replicas give their memory up while the actor trains.
    """

    def __init__(self, group: WorkerGroup, replicas: Replicas, canary: Canary, takes_turns: bool) -> None:
        self._group = group
        self.replicas = replicas
        self._canary = canary
        self._takes_turns = takes_turns
        self._rests = False
        self._version: int | None = None
        replicas.resync = self._resync

    def generate(self, prompts: DataProto, sampling: SamplingParams) -> DataProto:
        self._wake(["weights", "kv_cache"])
        return self.replicas.generate_sequences(prompts, sampling)

    def sync(self, version: int) -> dict[str, float]:
        self.replicas.check_health()
        rested = self._rests
        self._wake(["weights"])
        self._version = version
        metrics = self._send(version, self.replicas.addresses)
        if rested:
            self.replicas.resume(["kv_cache"])
        if self._canary.config.enable:
            metrics["sync/canary_gap"] = self._check_canary()
        return metrics

    def rest(self) -> None:
        if self._takes_turns and not self._rests:
            self.replicas.release()
            self._rests = True

    def _wake(self, tags: Sequence[str]) -> None:
        if self._rests:
            self.replicas.resume(tags)
            self._rests = False

    def close(self) -> None:
        self.replicas.close()

    def _resync(self, addresses: Sequence[ReplicaAddress]) -> None:
        if self._version is not None:
            self._send(self._version, addresses)

    def _send(self, version: int, addresses: Sequence[ReplicaAddress]) -> dict[str, float]:
        by_rank: list[Mapping[str, float]] = self._group.update_weights(version, list(addresses))
        senders = [metrics for metrics in by_rank if metrics]
        seconds = max(metrics["sync/seconds"] for metrics in senders)
        sent = sum(metrics["sync/bytes"] for metrics in senders)
        return {
            "rollout/weight_version": float(version),
            "sync/tensors": senders[0]["sync/tensors"],
            "sync/seconds": seconds,
            "sync/load_seconds": max(metrics["sync/load_seconds"] for metrics in senders),
            "sync/GB_per_s": sent / 1e9 / max(seconds, 1e-9),
        }

    def _check_canary(self) -> float:
        """How far the replicas' log-probs are from the actor's, at most.

        Raises:
            WeightSyncError: too far.
        """
        canary = self._canary
        request = RolloutRequest("canary", canary.prompt_ids, canary.sampling, seed=self._version)
        outputs = self.replicas.generate_on_each(request)
        ids = torch.tensor([list(canary.prompt_ids)] * len(outputs), dtype=torch.int32)
        prompts = DataProto.from_dict({"prompts": Jagged.from_padded(ids, torch.ones_like(ids)).column()})
        batch = assemble_sequences(prompts, outputs, canary.sampling.max_tokens)
        own = Jagged.of(self._group.compute_log_prob(batch.select(_MODEL))["old_log_probs"]).values
        generated = Jagged.of(batch["rollout_log_probs"])
        gaps = (own - generated.values).abs()
        worst = float(gaps.max()) if len(gaps) else 0.0
        if not worst <= canary.config.tolerance:
            place = int(gaps.argmax())
            row, token = int(generated.rows[place]), int(generated.places[place])
            address = self.replicas.addresses[row]
            raise WeightSyncError(
                f"replica {address.index} on {address.node} does not generate with the weights of version "
                f"{self._version}, though all tensors arrived as they were sent: the log-prob of token {token} of the "
                f"canary is {float(generated.values[place]):.4f} there and {float(own[place]):.4f} "
                f"in the actor, further apart than rollout.canary.tolerance={canary.config.tolerance:g}"
            )
        return worst
