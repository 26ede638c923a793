"""Sources of responses: a rollout in the actor's processes, or replicas in processes of their own."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rollcast import WorkerGroup
from rollcast.contracts.rollout import ROUTED_EXPERTS, RolloutRequest, SamplingParams
from rollcast.contracts.sections import CanaryConfig
from rollcast.errors import RolloutError, WeightSyncError
from rollcast.protocol import DataProto, Jagged
from rollcast_serving.contracts.weight_sync import SyncInterruptedError, SyncOutcome
from rollcast_serving.generation import SEQUENCES, assemble_sequences
from rollcast_serving.launcher import ReplicaAddress
from rollcast_serving.manager import Stragglers
from rollcast_serving.replicas import Replicas

__all__ = ["Canary", "InProcessSampler", "ReplicaSampler", "Sampler"]

logger = logging.getLogger(__name__)
_MODEL = ("prompts", "responses", "response_mask")
#: Tolerance of the canary if both dtypes round to 11 bits or more, if one is coarser or unknown, and for weights of 8
#: bits, whose log-probs no run has measured yet.
_FINE, _COARSE, _EIGHT_BITS = 0.05, 0.2, 1.0
_FINE_DTYPES = frozenset({"float64", "float32", "float16"})


class Sampler(ABC):
    """A source of responses with the actor's weights, which :meth:`sync` sends to it."""

    @abstractmethod
    def generate(self, prompts: DataProto, sampling: SamplingParams, stragglers: Stragglers | None = None) -> DataProto:
        """Return a response for each row; see :func:`rollcast_serving.generation.generate_sequences`.

        Args:
            prompts, sampling: as in that function.
            stragglers: policy for cutting late responses on replicas; None waits for all.
        """

    @abstractmethod
    def sync(self, version: int) -> dict[str, float]:
        """Send the actor's current weights to the rollout, as ``version``; return metrics.

        Raises:
            WeightSyncError: they did not arrive intact.
        """

    def serve(self) -> Sequence[ReplicaAddress]:
        """Prepare for requests from elsewhere; return the replicas that serve them, by default none."""
        return ()

    def check_health(self, is_owner: bool = True) -> None:
        """Restart dead replicas, and wait for them.

        Args:
            is_owner: False in a thread beside the trainer's; the trainer's then restarts them when it next waits.

        Raises:
            RolloutError: no replica is left.
        """
        return

    def take_metrics(self) -> dict[str, float]:
        """Return metrics of generation since the last call, by default none."""
        return {}

    def rest(self) -> None:
        """Release memory until the next :meth:`sync` or :meth:`generate`; may be called again."""
        return

    def close(self) -> None:
        """Release all resources."""
        return


class InProcessSampler(Sampler):
    """The rollout in the actor's own processes.

    Args:
        group: worker group of the actor.
        records_routing: True if the rollout records the choices of a mixture's routers.
    """

    def __init__(self, group: WorkerGroup, records_routing: bool = False) -> None:
        self._group = group
        self._columns = (*SEQUENCES, *([ROUTED_EXPERTS] if records_routing else []))

    def generate(
        self,
        prompts: DataProto,
        sampling: SamplingParams,
        stragglers: Stragglers | None = None,  # refused at the start of a run: the ranks answer together
    ) -> DataProto:
        sequences: DataProto = self._group.generate_sequences.remote(prompts, sampling).select(self._columns)
        return sequences.with_cached(prompts=prompts["prompts"].int())

    def sync(self, version: int) -> dict[str, float]:
        metrics = self._group.update_weights(version)[0].metrics
        # No data is sent, so time and rate would be meaningless.
        return {name: metrics[name] for name in ("rollout/weight_version", "sync/tensors") if name in metrics}


@dataclass(frozen=True)
class Canary:
    """The prompt that every replica continues after each sync, to verify its weights.

    Attributes:
        prompt_ids: token ids of the prompt.
        sampling: sampling parameters, with the temperature at which the actor computes log-probs.
        config: switch of the check, and its tolerance.
        actor_dtype, rollout_dtype: dtypes in which both sides compute, or the rollout's quantization; None if unknown.
    """

    prompt_ids: Sequence[int]
    sampling: SamplingParams
    config: CanaryConfig
    actor_dtype: str | None = None
    rollout_dtype: str | None = None

    @property
    def tolerance(self) -> float:
        """Maximum difference of a log-prob: the config's value, or the default for the coarser dtype."""
        if self.config.tolerance is not None:
            return self.config.tolerance
        if self.rollout_dtype == "fp8":
            return _EIGHT_BITS
        return _FINE if {self.actor_dtype, self.rollout_dtype} <= _FINE_DTYPES else _COARSE

    def describe_tolerance(self) -> str:
        """Return the tolerance with its key, and the reason for a default."""
        limit = f"rollout.canary.tolerance={self.tolerance:g}"
        if self.config.tolerance is not None:
            return limit
        actor, rollout = self.actor_dtype or "an unknown dtype", self.rollout_dtype or "an unknown dtype"
        return f"{limit}, the default for an actor in {actor} and a rollout in {rollout}"


class ReplicaSampler(Sampler):
    """Replicas of an engine, which receive the weights from the actor's workers.

    Args:
        group: worker group of the actor.
        replicas: started replicas.
        canary: prompt to compare after each sync.
        takes_turns: True if replicas release their memory while the actor trains.
    """

    def __init__(self, group: WorkerGroup, replicas: Replicas, canary: Canary, takes_turns: bool) -> None:
        self._group = group
        self.replicas = replicas
        self._canary = canary
        self._takes_turns = takes_turns
        self._rests = False
        self._version: int | None = None
        #: Metrics of the last sync that reached a replica.
        self._sent: dict[str, float] = {}
        replicas.resync = self._resync

    def generate(self, prompts: DataProto, sampling: SamplingParams, stragglers: Stragglers | None = None) -> DataProto:
        self._wake(["weights", "kv_cache"])
        return self.replicas.generate_sequences(prompts, sampling, stragglers)

    def serve(self) -> Sequence[ReplicaAddress]:
        self._wake(["weights", "kv_cache"])
        return self.replicas.addresses

    def check_health(self, is_owner: bool = True) -> None:
        if is_owner:
            self.replicas.check_health()
        else:
            self.replicas.loop.submit(self.replicas.manager.check_health()).result()

    def sync(self, version: int) -> dict[str, float]:
        self.replicas.check_health()
        rested = self._rests
        self._wake(["weights"])
        self._version = version
        metrics = dict(self._send(version))
        if rested:
            self.replicas.resume(["kv_cache"])
        if self._canary.config.enable:
            metrics["sync/canary_gap"] = self._check_canary()
        return metrics

    def take_metrics(self) -> dict[str, float]:
        return self.replicas.take_metrics()

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
        """Send the current weights to a restarted replica.

        Raises:
            RolloutError: the replica died meanwhile, so its restart has failed.
        """
        if self._version is not None:
            for error in self._deliver(self._version, addresses).values():
                raise error

    def _send(self, version: int) -> dict[str, float]:
        """Send the weights to all replicas, and again to those that another replica's death interrupted.

        A replica that dies meanwhile is restarted and receives the weights at its start.

        Raises:
            WeightSyncError: a replica refused the weights.
            RolloutError: no replica is left.
        """
        waiting, again = self.replicas.addresses, False
        while waiting:
            failed = self._deliver(version, waiting, whole=again)
            dead = {index: error for index, error in failed.items() if not isinstance(error, SyncInterruptedError)}
            if dead:
                self.replicas.replace_dead(dead)
            waiting = [job for job in waiting if job.index in failed and job.index not in dead]
            again = True
        return self._sent

    def _deliver(
        self, version: int, addresses: Sequence[ReplicaAddress], whole: bool = False
    ) -> Mapping[int, RolloutError]:
        """Send the weights to replicas once; return the errors of those that failed, by number.

        Raises:
            WeightSyncError: no rank of the actor is where it could send to one of them.
        """
        by_rank: list[SyncOutcome] = self._group.update_weights(version, list(addresses), whole)
        served = frozenset().union(*(outcome.served for outcome in by_rank))
        for address in addresses:
            if address.index not in served:
                device = f", device {address.device}" if address.device else ""
                raise WeightSyncError(
                    f"replica {address.index} on node {address.node}{device} gets no weights: this weight sync stays "
                    "within a node (cuda_ipc within a device), and no rank of the actor is there; place actor and "
                    "rollout alike (placement.pools, placement.mapping), or choose rollout.weight_sync=disk"
                )
        senders = [outcome.metrics for outcome in by_rank if outcome.metrics]
        if senders:
            seconds = max(metrics["sync/seconds"] for metrics in senders)
            sent = sum(metrics["sync/bytes"] for metrics in senders)
            self._sent = {
                "rollout/weight_version": float(version),
                "sync/tensors": senders[0]["sync/tensors"],
                "sync/seconds": seconds,
                "sync/load_seconds": max(metrics["sync/load_seconds"] for metrics in senders),
                "sync/GB_per_s": sent / 1e9 / max(seconds, 1e-9),
            }
        return {index: error for outcome in by_rank for index, error in outcome.failed.items()}

    def _check_canary(self) -> float:
        """Return the maximum difference between the replicas' log-probs of the canary and the actor's.

        Raises:
            WeightSyncError: it exceeds the tolerance.
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
        if not worst <= canary.tolerance:
            place = int(gaps.argmax())
            row, token = int(generated.rows[place]), int(generated.places[place])
            address = self.replicas.addresses[row]
            raise WeightSyncError(
                f"replica {address.index} on {address.node} does not generate with the weights of version "
                f"{self._version}, although all tensors arrived intact: the log-prob of token {token} of the "
                f"canary is {float(generated.values[place]):.4f} in the replica and {float(own[place]):.4f} "
                f"in the actor, a difference above {canary.describe_tolerance()}"
            )
        return worst
