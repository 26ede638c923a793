"""Contract of mapping: problems, mappings, cost models that price mappings, and planners that search for the best.

A cost model prices one stage of one role on one pool. A planner composes those prices into the time of a step and
returns its best mappings. Units are seconds, bytes, bytes per second, FLOP per second and tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from collections.abc import Mapping as MappingType
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from rollcast.contracts.config import config
from rollcast.plugins import Registry, subclass_of

__all__ = [
    "BaseCostModel",
    "BasePlanner",
    "Cluster",
    "Constraints",
    "CostModelConfig",
    "DeviceKind",
    "GenerationSpeed",
    "Lengths",
    "Mapping",
    "MemoryParts",
    "Mesh",
    "ModelFacts",
    "Node",
    "Placement",
    "Pool",
    "Prediction",
    "Problem",
    "RoleSpec",
    "RolloutLayout",
    "StageCost",
    "StageSpec",
    "TrainingLayout",
    "cost_models",
    "planners",
]

#: Values of ``rollout.mode``. ``hybrid``: rollouts run in the training processes or on their devices and take turns
#: with training; ``colocated``: other processes on the same devices, at the same time; ``standalone``: own devices.
Mode = Literal["colocated", "standalone", "hybrid"]
RoleKind = Literal["trains", "forwards", "generates"]
StageKind = Literal["generate", "forward", "update"]


@dataclass(frozen=True)
class DeviceKind:
    """Published peak figures of a device.

    Attributes:
        name: name of the device, such as ``h100``.
        memory_bytes: device memory.
        flops: dense peak FLOP per second by dtype, such as ``{"bfloat16": 989e12}``.
        memory_bandwidth: peak bytes per second of the device memory.
        host_bandwidth: peak bytes per second from host to device, one way.
        source: document that publishes these figures.
    """

    name: str
    memory_bytes: int
    flops: MappingType[str, float]
    memory_bandwidth: float
    host_bandwidth: float
    source: str = ""

    def __hash__(self) -> int:
        return hash((self.name, self.memory_bytes))


@dataclass(frozen=True)
class Node:
    """A node of the cluster.

    Attributes:
        kind: kind of its devices.
        devices: number of devices.
        link_bandwidth: bytes per second from one device to another on the node, one way.
    """

    kind: DeviceKind
    devices: int
    link_bandwidth: float


@dataclass(frozen=True)
class Cluster:
    """Nodes and the network between them.

    Attributes:
        nodes: nodes of the cluster; their device kinds may differ.
        network_bandwidth: bytes per second from one device to a device on another node, one way.
    """

    nodes: tuple[Node, ...]
    network_bandwidth: float

    @property
    def devices(self) -> int:
        """Number of devices on all nodes."""
        return sum(node.devices for node in self.nodes)


@dataclass(frozen=True)
class Lengths:
    """Statistics of token counts.

    Attributes:
        mean: mean count.
        maximum: largest possible count.
        quantiles: pairs of probability and tokens, such as ``((0.5, 310.0), (0.99, 900.0))``, by increasing
            probability; without an entry for probability 1, the longest length is ``maximum``.
    """

    mean: float
    maximum: int
    quantiles: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class ModelFacts:
    """Dimensions of a decoder model.

    Attributes:
        layers, hidden, heads, kv_heads, ffn, vocab: sizes from the Hugging Face config.
        parameters: number of parameters; tied ones count once.
        head_size: dimension of an attention head.
        tied: True if input and output embeddings are one tensor.
        dtype_bytes: bytes of a stored parameter.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    parameters: int
    head_size: int
    tied: bool = False
    dtype_bytes: int = 2


@dataclass(frozen=True)
class TrainingLayout:
    """An engine's memory layout of a model and its options of computation, for any mesh.

    Attributes:
        shard_size: number of ranks over which weights, gradients and optimizer state are sharded; each rank gathers
            the weights that it needs. -1 for all ranks of the role.
        computed_bytes: bytes of a number in forward and backward passes.
        sequence_parts: number of ranks that split the tokens of a row (sequence parallelism).
        param_offload, optimizer_offload: True if weights, or optimizer state, are offloaded to host memory when not
            in use.
        activation_offload: True if activations are offloaded to host memory until the backward pass.
        keeps_gradients: True if the memory of gradients stays allocated between updates.
        spreads_optimizer: True if the optimizer state is sharded over data-parallel ranks.
        splits_sequence: True if tensor-parallel ranks split the activations that tensor parallelism replicates.
        reshards: True if a layer's gathered weights are freed after its forward pass.
        head_positions: number of positions whose logits exist at a time; None for all of a micro-batch.
        fused_logits: True if log-probs are computed by chunks of positions, so that the logits never exist as a whole.
        logit_copies: number of float32 tensors of the size of the logits that exist at once in an update.
        eager_attention: True if attention materializes the score matrix of every head.
        shares_prompts: True if responses to one prompt within a micro-batch share the prompt's activations; does not
            apply if the weights are gathered.
        shares_weights: True if the weights are those of the trained role in the same pool, as for a reference beside
            an adapter.
        reference: placement of a frozen copy of the model, for a loss that compares the whole vocabulary; None
            without a copy.
        pipeline_chunks: number of chunks of layers in each pipeline stage; more than one for an interleaved schedule.
        streams_weights: True if weights, gradients and optimizer state stay in host memory, and passes gather weights
            from there.
    """

    shard_size: int = 1
    computed_bytes: int = 2
    sequence_parts: int = 1
    param_offload: bool = False
    optimizer_offload: bool = False
    activation_offload: bool = False
    keeps_gradients: bool = False
    spreads_optimizer: bool = False
    splits_sequence: bool = False
    reshards: bool = True
    head_positions: int | None = None
    fused_logits: bool = False
    logit_copies: int = 3
    eager_attention: bool = False
    shares_prompts: bool = False
    shares_weights: bool = False
    reference: Literal["device", "host"] | None = None
    pipeline_chunks: int = 1
    streams_weights: bool = False


@dataclass(frozen=True)
class RolloutLayout:
    """A rollout's use of its devices.

    Attributes:
        max_rows: largest number of sequences that a replica computes at once; None for no limit.
        memory_share: fraction of a device's memory that a replica reserves for weights and cache; None if the cache
            grows with its rows.
        cache_bytes: fixed size of the cache on each device; None if it is not fixed.
        releases_memory: True if weights and cache leave the devices while the trainer computes in mode ``hybrid``.
        bucket_bytes: size of the largest bucket of a weight sync; 0 if weights are not sent.
        sync_buffers: buffers for buckets on the device during a weight sync.
        captures_graphs: True if replicas on GPUs keep CUDA graphs, where their engine supports them.
    """

    max_rows: int | None = None
    memory_share: float | None = None
    cache_bytes: int | None = None
    releases_memory: bool = True
    bucket_bytes: int = 64 << 20
    sync_buffers: int = 1
    captures_graphs: bool = True


@dataclass(frozen=True)
class RoleSpec:
    """A role of a run: a model and its purpose.

    Attributes:
        name: name of the role, such as ``actor``, ``rollout``, ``critic``, ``ref``, ``reward_model``.
        kind: ``trains``, ``forwards`` or ``generates``.
        model: sizes of its model.
        plugin: name of the engine or the rollout, such as ``fsdp`` or ``vllm``.
        optimizer_bytes: bytes of optimizer state per parameter, including a master copy.
        gradient_bytes: bytes of a gradient per parameter.
        recompute: True if layers recompute their activations in the backward pass.
        offload: True if weights and optimizer state are offloaded to host memory when not in use.
        value_head: True if the output is one number per token, so there are no logits.
        own_process: True if the role runs in its own processes even where it shares devices, as replicas do.
        adapter_parameters: number of parameters of the adapter trained instead of the model; 0 without an adapter.
        training: layout of a role that does not generate; None for the default layout of ``plugin``.
        rollout: layout of a role that generates; None for replicas with default options.
    """

    name: str
    kind: RoleKind
    model: ModelFacts
    plugin: str
    optimizer_bytes: int = 12
    gradient_bytes: int = 4
    recompute: bool = True
    offload: bool = False
    value_head: bool = False
    own_process: bool = False
    adapter_parameters: int = 0
    training: TrainingLayout | None = None
    rollout: RolloutLayout | None = None


@dataclass(frozen=True)
class StageSpec:
    """One stage of a step.

    Attributes:
        name: name of the stage, unique in the problem.
        role: name of the role that computes the stage.
        kind: ``generate``, ``forward`` or ``update``.
        waits_for: names of the stages that must end before this one starts; all of them precede it in the problem.
    """

    name: str
    role: str
    kind: StageKind
    waits_for: tuple[str, ...] = ()


@dataclass(frozen=True)
class Constraints:
    """Restrictions on mappings.

    Attributes:
        pinned: role → required number of devices of its pool.
        forbidden: pairs of roles that must not share a pool.
        together: pairs of roles that must share a pool.
        headroom: fraction of each device's memory that must stay free.
        max_staleness: largest allowed ``trainer.max_staleness``.
        meshes: role → allowed meshes; a role that is not listed may have any mesh.
        modes: allowed ways in which rollouts share devices with training; all of them by default.
    """

    pinned: MappingType[str, int] = field(default_factory=dict)
    forbidden: tuple[tuple[str, str], ...] = ()
    together: tuple[tuple[str, str], ...] = ()
    headroom: float = 0.05
    max_staleness: int = 0
    meshes: MappingType[str, tuple[Mesh, ...]] = field(default_factory=dict)
    modes: tuple[Mode, ...] = ("hybrid", "colocated", "standalone")


@dataclass(frozen=True)
class Problem:
    """Input of a planner: roles, stages, workload, cluster and constraints.

    Attributes:
        roles: roles of the run; at most one of them generates.
        stages: stages of a step, sorted so that each follows the stages that it waits for.
        prompts: number of prompts per step.
        samples: number of responses per prompt.
        mini_batches: number of optimizer steps per epoch over the batch.
        epochs: number of passes over the batch.
        prompt_lengths, response_lengths: length statistics in tokens.
        cluster: nodes and devices to use.
        constraints: restrictions on mappings.
        trained_share: fraction of the rows that updates compute; rows without advantage are skipped.
    """

    roles: tuple[RoleSpec, ...]
    stages: tuple[StageSpec, ...]
    prompts: int
    samples: int
    mini_batches: int
    epochs: int
    prompt_lengths: Lengths
    response_lengths: Lengths
    cluster: Cluster
    constraints: Constraints = field(default_factory=Constraints)
    trained_share: float = 1.0

    @property
    def rows(self) -> int:
        """Number of sequences per step."""
        return self.prompts * self.samples

    @property
    def tokens(self) -> float:
        """Mean number of tokens per step, including prompts."""
        return self.rows * (self.prompt_lengths.mean + self.response_lengths.mean)

    def role(self, name: str) -> RoleSpec:
        """Return the role with this name.

        Raises:
            KeyError: there is no such role.
        """
        return {role.name: role for role in self.roles}[name]


@dataclass(frozen=True)
class Mesh:
    """Parallel sizes of a role; their product is the number of devices of the role's pool.

    Attributes:
        data: number of data-parallel ranks; for a rollout, the number of replicas.
        tensor: number of tensor-parallel ranks, which share each layer.
        pipeline: number of pipeline-parallel ranks, each with a part of the layers.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.data * self.tensor * self.pipeline


@dataclass(frozen=True)
class Pool:
    """A set of devices on nodes.

    Attributes:
        name: name of the pool, unique in the mapping.
        places: pairs of a node's index in the cluster and the number of devices there, by increasing index.
    """

    name: str
    places: tuple[tuple[int, int], ...]

    @property
    def devices(self) -> int:
        """Number of devices."""
        return sum(count for _, count in self.places)

    @property
    def process_on_nodes(self) -> tuple[int, ...]:
        """Number of processes per node, as in ``placement.pools``."""
        return tuple(count for _, count in self.places)


@dataclass(frozen=True)
class Placement:
    """A role's pool and mesh.

    Attributes:
        role: name of the role.
        pool: name of the pool.
        mesh: mesh on the pool; for a rollout, ``mesh.data`` replicas of ``mesh.tensor`` devices each.
        micro_batch_rows: rows per micro-batch on each data-parallel rank; for a rollout, sequences at a time.
    """

    role: str
    pool: str
    mesh: Mesh
    micro_batch_rows: int


@dataclass(frozen=True)
class Mapping:
    """A set of pools and the placement of each role.

    Attributes:
        pools: disjoint sets of devices.
        placements: one placement per role.
        mode: placement of rollouts with respect to training.
        max_staleness: number of steps by which generation may run ahead; at 1 or more, generation overlaps training.
    """

    pools: tuple[Pool, ...]
    placements: tuple[Placement, ...]
    mode: Mode
    max_staleness: int = 0


@dataclass(frozen=True)
class StageCost:
    """Predicted duration of a stage, split into parts in seconds.

    Attributes:
        compute: time of arithmetic at the achieved rate.
        memory: additional time bound by device memory bandwidth.
        communication: time of collectives and transfers that do not overlap with computation.
        bubble: time of pipeline bubbles.
        tail: time spent waiting for the longest responses.
        idle: time spent waiting for other stages.
        note: text that says how far the prediction extrapolates; empty if it does not.
    """

    compute: float = 0.0
    memory: float = 0.0
    communication: float = 0.0
    bubble: float = 0.0
    tail: float = 0.0
    idle: float = 0.0
    note: str = ""

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of each part, by name."""
        return {name: value for name, value in vars(self).items() if name != "note"}

    @property
    def seconds(self) -> float:
        """Sum of the parts."""
        return sum(self.parts.values())

    @property
    def limit(self) -> str:
        """Name of the largest part."""
        parts = self.parts
        return max(parts, key=parts.__getitem__)


@dataclass(frozen=True)
class GenerationSpeed:
    """Speed of a replica in generation.

    Attributes:
        prefill: seconds of the prefill of a prompt of mean length.
        decode: (sequences decoded at once, mean tokens of each so far, its prompt included) → seconds of one decoding
            step, in which each of them gets one token.
    """

    prefill: float
    decode: Callable[[float, float], float]


@dataclass(frozen=True)
class MemoryParts:
    """Predicted memory of a role in bytes per device; with a pipeline, on the device that uses most.

    Attributes:
        parameters, gradients, optimizer, kv_cache: allocated during the whole step, unless listed in ``visiting``.
        activations, logits, gathered: allocated while the role computes; ``gathered`` are weights of other ranks.
        buckets: buffers of the weight sync, allocated during the sync; 0 for a role that takes no part in it.
        reserve: CUDA context, libraries and graphs of the process, always allocated; shared by the roles of a process.
        visiting: names of the parts that are on the device only while the role uses them.
        own_process: True if the role has its own processes even where it shares devices with others.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    gathered: int = 0
    kv_cache: int = 0
    buckets: int = 0
    reserve: int = 0
    visiting: frozenset[str] = frozenset({"kv_cache"})
    own_process: bool = False

    @property
    def total(self) -> int:
        """Bytes at the role's peak, including the reserve of its process."""
        return self.reserve + self.held + max(self.passing, self.syncing)

    @property
    def held(self) -> int:
        """Bytes, without the reserve, that stay allocated while another role of the pool computes."""
        return sum(self._resting(name, visits=False) for name in ("parameters", "gradients", "optimizer", "kv_cache"))

    @property
    def passing(self) -> int:
        """Bytes allocated only while the role computes; the optimizer state is loaded after the passes."""
        passes = self.activations + self.logits + self.gathered + self._resting("kv_cache", visits=True)
        weights = self._resting("parameters", visits=True) + self._resting("gradients", visits=True)
        return weights + max(passes, self._resting("optimizer", visits=True))

    @property
    def syncing(self) -> int:
        """Bytes allocated in addition to ``held`` during a weight sync; 0 for a role that takes no part in it."""
        return self.buckets + self._resting("parameters", visits=True) if self.buckets else 0

    def _resting(self, name: str, *, visits: bool) -> int:
        """Return the bytes of the part ``name`` if its membership in ``visiting`` equals ``visits``, else 0."""
        return int(getattr(self, name)) if (name in self.visiting) == visits else 0


@dataclass(frozen=True)
class Prediction:
    """A mapping and its predicted performance.

    Attributes:
        mapping: the mapping that the figures are for.
        step_seconds: duration of a step in seconds.
        tokens_per_second: tokens of a step, including prompts, divided by its duration.
        stages: stage → cost, including the entries ``weight_sync`` and ``switch``.
        memory: role → memory on each of its devices.
        device_bytes: pool → peak bytes on each of its devices, over all its roles.
    """

    mapping: Mapping
    step_seconds: float
    tokens_per_second: float
    stages: MappingType[str, StageCost]
    memory: MappingType[str, MemoryParts]
    device_bytes: MappingType[str, int]

    @property
    def limits(self) -> dict[str, str]:
        """Name of the largest part of each stage's cost, by stage."""
        return {name: cost.limit for name, cost in self.stages.items()}


@config
class CostModelConfig:
    """Base schema of cost models, without keys; schemas with keys derive from it."""


class BaseCostModel(ABC):
    """Base class of cost models, which predict the cost of the stages of a mapping.

    Equal arguments must have equal results, so that planners can cache them.

    Args:
        config: options ``cost_model.*``, an instance of ``config_schema``.
    """

    #: Dataclass of the options ``cost_model.*``.
    config_schema: ClassVar[type[CostModelConfig]] = CostModelConfig

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def stage_cost(self, problem: Problem, stage: StageSpec, placement: Placement, pool: Pool, mode: Mode) -> StageCost:
        """Return the cost of a stage in one step, without waiting for other stages."""

    def generation_speed(  # for subclasses
        self, problem: Problem, stage: StageSpec, placement: Placement, pool: Pool, mode: Mode
    ) -> GenerationSpeed | None:
        """Return the speed of a replica of a generating stage; None if the model prices whole stages only.

        The price of the stage follows from this speed and the problem's lengths, so that a simulation with drawn
        lengths can be held against it.
        """
        return None

    @abstractmethod
    def memory(self, problem: Problem, role: RoleSpec, placement: Placement, pool: Pool, mode: Mode) -> MemoryParts:
        """Return the memory of a role per device."""

    @abstractmethod
    def sync_cost(
        self, problem: Problem, trained: tuple[Placement, Pool], rollout: tuple[Placement, Pool], mode: Mode
    ) -> StageCost:
        """Return the cost of one transfer of the trained weights to the rollout, including resharding."""

    @abstractmethod
    def switch_cost(self, problem: Problem, role: RoleSpec, placement: Placement, pool: Pool, mode: Mode) -> StageCost:
        """Return the cost per step of loading the role onto its devices and offloading it; 0 if it is not offloaded."""

    def controller_cost(self, problem: Problem, mode: Mode) -> StageCost:  # for subclasses
        """Return the cost per step of the controller's work between stages, such as rewards; 0 if unknown."""
        return StageCost()


class BasePlanner(ABC):
    """Base class of planners, which search for the best mappings.

    Equal problems and cost models must have equal results.
    """

    @abstractmethod
    def plan(self, problem: Problem, cost_model: BaseCostModel, count: int = 1) -> Sequence[Prediction]:
        """Return up to ``count`` mappings, sorted by increasing step time.

        Raises:
            ResourceError: no mapping fits; names the role that lacks memory, and how much.
        """


cost_models: Registry[type[BaseCostModel]] = Registry(
    "rollcast.cost_models",
    subclass_of(BaseCostModel),
    "rollcast map --cost-model",
    description="prices of a mapping's stages",
)
planners: Registry[type[BasePlanner]] = Registry(
    "rollcast.planners",
    subclass_of(BasePlanner),
    "rollcast map --planner",
    description="searches for the best mapping",
)
