"""Schemas of the sections ``placement`` and ``rollout``; importable without torch.

A rollout's own schema derives from :class:`RolloutConfig`, sets its name, and adds the keys of its engine.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from rollcast.contracts.config import (
    Fraction,
    Ge,
    Gt,
    Le,
    NonNegative,
    OnAccelerator,
    Positive,
    Seconds,
    Temperature,
    config,
)

__all__ = [
    "CanaryConfig",
    "PlacementConfig",
    "PoolConfig",
    "ReplicaConfig",
    "RolloutConfig",
    "StragglersConfig",
    "ValKwargs",
]

#: The bounds of the sampling contract, which apply to all engines.
Probability = Annotated[float, Gt(0), Le(1)]


@config
class PoolConfig:
    """A pool with options, in ``placement.pools``."""

    processes: list[int] = field(default_factory=list)
    """Processes on each node, such as `[8, 8]`."""
    max_colocate_count: Positive = 1
    """Worker groups that may share the pool's devices."""
    cpus_per_process: Annotated[float, Ge(0)] = 1.0
    """CPU cores that a process reserves with the cluster's scheduler."""
    accelerator_type: str | None = None
    """Type of device that a node must have, such as `H100`; null for any."""
    device: str | None = None
    """Registered device of the processes, such as `cpu` for rewards and agents in a run with accelerators; null for
    `placement.device`."""
    strategy: str = "STRICT_PACK"
    """`STRICT_PACK` keeps the processes of one entry on one node; `PACK` does so if possible."""
    resources: dict[str, float] = field(default_factory=dict)
    """Custom resources that each process reserves, by name."""


@config
class PlacementConfig:
    """Worker processes, nodes and pools of a run."""

    nnodes: Positive = 1
    """Number of nodes."""
    n_gpus_per_node: Positive = 1
    """Processes per node (verl's name); CPU processes where there is no GPU."""
    device: str = "auto"
    """A registered device (`cuda`, `npu`, `xpu`, `cpu`), or `auto` for the machine's accelerator."""
    pools: dict[str, Any] = field(default_factory=dict)
    """Further pools by name. The value is the number of processes on each node, as in `{critic_pool: [8, 8]}`, or the
    keys of a pool, as in `{critic_pool: {processes: [8, 8], accelerator_type: H100}}`."""
    mapping: dict[str, str] = field(default_factory=dict)
    """Pool of each role; roles not listed share the pool of `nnodes` and `n_gpus_per_node`."""


@config
class ValKwargs:
    """Sampling during validation."""

    temperature: Temperature = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: Probability = 1.0
    """Nucleus mass; 1 keeps all tokens."""
    top_k: int = -1
    """Number of candidate tokens; -1 or 0 for all."""
    n: Positive = 1
    """Sequences per prompt."""
    min_p: Annotated[float, Ge(0), Le(1)] = 0.0
    """Smallest probability of a candidate token as a fraction of the likeliest one's; 0 for all."""
    repetition_penalty: Annotated[float, Gt(0), Le(10)] = 1.0
    """Repetition penalty during validation; see `rollout.repetition_penalty`."""


@config
class ReplicaConfig:
    """Replicas, processes that each run one engine; unused by a rollout in the trainer's own process."""

    python: str | None = None
    """Python interpreter of the environment in which the engine is installed; null for the trainer's."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the processes."""
    launch_timeout_s: Seconds = 300.0
    """Timeout for a replica's start in seconds."""
    heartbeat_timeout_s: Seconds = 120.0
    """Longest time in seconds without a heartbeat of a replica. A live replica sends one every 5 seconds, however
    long a request takes."""
    max_restarts: NonNegative = 3
    """Largest number of restarts of a dead replica per run."""


@config
class StragglersConfig:
    """Early termination of the slowest responses once the other responses have ended."""

    share: Fraction = 0.0
    """Largest share of the awaited responses that may be cut, of those of a step, or of a prompt if
    `trainer.max_staleness` is above 0. 0 waits for all responses."""
    grace_s: Annotated[float, Gt(0)] = 10.0
    """Time in seconds that the remaining responses have after the others ended."""


@config
class CanaryConfig:
    """A check after each weight update that compares the log-probs of one continued prompt with the trainer's."""

    enable: bool = True
    """Run the check."""
    max_tokens: Positive = 8
    """Number of tokens by which the prompt is continued."""
    tolerance: Annotated[float, Ge(0)] | None = None
    """Largest allowed difference of a log-prob; null for 0.05 if actor and rollout both compute in float32 or float16,
    0.2 if one computes in bfloat16, or in a dtype that is unknown before the start, and 1 with
    `rollout.quantization`."""


@config
class RolloutConfig:
    """Base schema of ``rollout`` sections. Names are verl's where verl has the key."""

    name: str = ""
    """Registry name of the rollout."""
    mode: Literal["hybrid", "colocated", "standalone"] = "hybrid"
    """Placement of the rollout: `hybrid` takes turns with the trainer on its devices, `colocated` runs on the same
    devices at the same time, `standalone` has its own pool."""
    weight_sync: str = "shared_memory"
    """Registry name of the weight sync."""
    n: Positive = 1
    """Sequences per training prompt."""
    temperature: Temperature = 1.0
    """Sampling temperature of training prompts; 0 is greedy."""
    top_p: Probability = 1.0
    """Nucleus mass; 1 keeps all tokens."""
    top_k: int = -1
    """Number of candidate tokens; -1 or 0 for all."""
    min_p: Annotated[float, Ge(0), Le(1)] = 0.0
    """Smallest probability of a candidate token as a fraction of the likeliest one's; 0 for all."""
    repetition_penalty: Annotated[float, Gt(0), Le(10)] = 1.0
    """Divisor of the positive logits, and factor of the negative ones, of tokens that a sequence already holds; 1 for
    none."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Numbers added to logits, -100 to 100, by token id."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a response; the token that completes a stop text stays in the response."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Token ids that end a response, in addition to the tokenizer's EOS and the ids in the model's
    `generation_config.json`."""
    ignore_eos: bool = False
    """End responses only at `stop`, `stop_token_ids` and the length limit."""
    on_long_prompt: Literal["refuse", "clamp"] = "refuse"
    """Treatment of a prompt that leaves fewer positions of the model than `data.max_response_length`: `refuse` ends the
    run, `clamp` shortens the response. A prompt that leaves no position is always refused."""
    tensor_model_parallel_size: Positive = 1
    """Devices of a replica that share each layer."""
    pipeline_model_parallel_size: Positive = 1
    """Pipeline stages of a replica, each with an equal part of the layers."""
    data_parallel_size: Positive = 1
    """Copies of the attention layers in a replica, each with `tensor_model_parallel_size` devices and requests of its
    own; all of them share the experts of a mixture. A replica has as many devices as the product of the three sizes,
    and may span nodes."""
    expert_parallel_size: Positive = 1
    """Devices over which the experts of a mixture are distributed as a whole: 1 for none, which splits each expert, or
    `tensor_model_parallel_size` x `data_parallel_size`."""
    quantization: Literal["fp8"] | None = None
    """Precision to which the engine rounds the weights of linear layers as they arrive; null for none. Their log-probs
    then differ from the actor's, so `algorithm.rollout_correction.rollout_is=auto` weights tokens."""
    update_weights_bucket_megabytes: Annotated[
        Positive, OnAccelerator(512, "a device fills small buckets faster than they are announced")
    ] = 64
    """Size of the largest bucket of weights in flight, in MiB."""
    update_in_flight: Literal["continue", "finish", "interrupt"] = "continue"
    """A replica's treatment of the requests in flight when new weights arrive. `continue` leaves them to the engine,
    which computes their next tokens with the new weights if it can, else as by `finish`; `finish` completes them with
    the old weights first, while new requests wait; `interrupt` aborts them and continues them from the tokens sampled
    so far with the new weights."""
    sync_timeout_s: Seconds = 600.0
    """Timeout in seconds for a replica to take one bucket of weights."""
    sync_folder: str | None = None
    """Folder for the weights of the syncs `disk` and `delta`, accessible to trainer and replicas: a path, or an fsspec
    URL such as `s3://bucket/weights`; null for the node's temporary folder."""
    enable_rollout_routing_replay: bool = False
    """Record which experts of a mixture each token visits, so that `actor.router_replay.mode=R3` can replay them."""
    stragglers: StragglersConfig = field(default_factory=StragglersConfig)
    """Training responses that are cut because the others have ended; they count as cut at the length limit."""
    val_kwargs: ValKwargs = field(default_factory=ValKwargs)
    """Sampling during validation."""
    replica: ReplicaConfig = field(default_factory=ReplicaConfig)
    """Processes that run the engines."""
    canary: CanaryConfig = field(default_factory=CanaryConfig)
    """The check after each weight update."""

    @property
    def replica_size(self) -> int:
        """Number of devices of a replica."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.data_parallel_size
