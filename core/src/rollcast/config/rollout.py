"""The keys that every ``rollout`` section has; importable without torch.

A rollout's own schema derives from :class:`RolloutConfig`, gives its name, and adds what its engine
needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["CanaryConfig", "ReplicaConfig", "RolloutConfig", "ValKwargs"]


@dataclass
class ValKwargs:
    """Sampling during validation; the trainer builds its requests from it.

    Attributes:
        temperature: 0 for greedy.
        top_p: nucleus mass, 1 for all.
        top_k: number of candidates; -1 or 0 for all.
        n: sequences per prompt.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    n: int = 1


@dataclass
class ReplicaConfig:
    """Processes that each hold one engine; not used by a rollout in the trainer's own process.

    Attributes:
        python: interpreter of the environment in which the engine is installed; empty for the trainer's.
        env: environment variables of the processes.
        launch_timeout_s: until a replica has to be ready.
        request_timeout_s: until a request has to be answered.
        max_restarts: how often a replica that died is started again in a run.
    """

    python: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    launch_timeout_s: float = 300.0
    request_timeout_s: float = 1800.0
    max_restarts: int = 3


@dataclass
class CanaryConfig:
    """One prompt that is continued after each weight update and compared with the trainer's log-probs.

    Attributes:
        enable: whether it is.
        max_tokens: length of the continuation.
        tolerance: how far a log-prob may be from the trainer's; with engines in bfloat16 it has to be
            wider.
    """

    enable: bool = True
    max_tokens: int = 8
    tolerance: float = 0.05


@dataclass
class RolloutConfig:
    """Keys of every rollout. Names are verl's where it has one.

    Attributes:
        name: registry name of the rollout.
        mode: ``hybrid``, ``colocated`` or ``standalone``.
        weight_sync: registry name of the weight sync.
        n: sequences per training prompt; read by the trainer, as are the three keys below.
        temperature: of training samples; 0 for greedy.
        top_p: nucleus mass, 1 for all.
        top_k: number of candidates; -1 or 0 for all.
        tensor_model_parallel_size: devices of one replica.
        update_weights_bucket_megabytes: largest part of the weights that is under way at once, in MiB.
        val_kwargs: sampling during validation.
        replica: processes of the engines.
        canary: the check after each weight update.
    """

    name: str = ""
    mode: str = "hybrid"
    weight_sync: str = "shared_memory"
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    tensor_model_parallel_size: int = 1
    update_weights_bucket_megabytes: int = 64
    val_kwargs: ValKwargs = field(default_factory=ValKwargs)
    replica: ReplicaConfig = field(default_factory=ReplicaConfig)
    canary: CanaryConfig = field(default_factory=CanaryConfig)
