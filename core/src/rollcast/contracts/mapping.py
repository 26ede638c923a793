"""Contract of mapping: problems, mappings, cost models that price mappings and planners that search them.

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

#: As ``rollout.mode``. ``hybrid``: in the training processes or on their devices, taking turns with training;
#: ``colocated``: other processes on those devices, side by side; ``standalone``: devices of their own.
Mode = Literal["colocated", "standalone", "hybrid"]
RoleKind = Literal["trains", "forwards", "generates"]
StageKind = Literal["generate", "forward", "update"]


@dataclass(frozen=True)
class DeviceKind:
    """Published peak figures of a device.

    Attributes:
        name: such as ``h100``.
        memory_bytes: device memory.
        flops: dense peak FLOP per second by dtype, such as ``{"bfloat16": 989e12}``.
        memory_bandwidth: peak bytes per second of the device memory.
        host_bandwidth: peak bytes per second from host to device, one way.
        source: document with these figures.
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
        link_bandwidth: bytes per second of one device to another of the node, one way.
    """

    kind: DeviceKind
    devices: int
    link_bandwidth: float


@dataclass(frozen=True)
class Cluster:
    """Nodes and the network between them.

    Attributes:
        nodes: kinds may differ by node.
        network_bandwidth: bytes per second of one device to a device of another node, one way.
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
        mean: mean.
        maximum: largest possible count.
        quantiles: probability → tokens, such as ``((0.5, 310.0), (0.99, 900.0))``, by rising probability; without one
            of probability 1 the longest length is ``maximum``.
    """

    mean: float
    maximum: int
    quantiles: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a decoder.

    Attributes:
        layers, hidden, heads, kv_heads, ffn, vocab: as in a Hugging Face config.
        parameters: number of parameters, tied ones once.
        head_size: numbers in an attention head.
        tied: input and output embeddings are one tensor.
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
    """How an engine keeps a model and computes with it on any mesh.

    Attributes:
        shard_size: ranks over which a copy of the weights, gradients and optimizer state is spread, and each of which
            gathers the weights that it needs; -1 for all ranks of the role.
        computed_bytes: bytes of a number in passes.
        sequence_parts: ranks that share the tokens of a row.
        param_offload, optimizer_offload: weights, and optimizer state, are in host memory outside of their use.
        activation_offload: activations are in host memory until the backward pass.
        spreads_optimizer: data-parallel ranks share the optimizer state.
        splits_sequence: tensor-parallel ranks share the activations that tensor parallelism leaves whole.
        reshards: a layer's gathered weights are freed after its forward pass.
        head_positions: positions whose logits exist at a time; None for all of a micro-batch.
        fused_logits: log-probs are computed block by block, and logits are never held.
        logit_copies: float32 tensors of the size of the logits that exist at once in an update.
        eager_attention: attention holds the matrix of every head.
        shares_prompts: the responses of a prompt that are in one micro-batch share its activations, unless the weights
            are gathered.
        shares_weights: the weights are those of the trained role in the same pool, as of a reference beside an adapter.
        reference: place of a frozen copy of the model, with which the loss compares every word; None without one.
    """

    shard_size: int = 1
    computed_bytes: int = 2
    sequence_parts: int = 1
    param_offload: bool = False
    optimizer_offload: bool = False
    activation_offload: bool = False
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


@dataclass(frozen=True)
class RolloutLayout:
    """How a rollout uses its devices.

    Attributes:
        max_rows: sequences that a replica computes at once, at most; None for no limit.
        memory_share: fraction of a device that a replica takes, weights and cache included, whatever its rows need;
            None if the cache is as large as its rows.
        cache_bytes: fixed size of the cache on each device; None if it is not fixed.
        releases_memory: weights and cache leave the devices while the trainer computes in mode ``hybrid``.
        bucket_bytes: largest bucket of a weight sync; 0 if weights are not sent.
        captures_graphs: replicas on GPUs hold CUDA graphs, where their engine can.
    """

    max_rows: int | None = None
    memory_share: float | None = None
    cache_bytes: int | None = None
    releases_memory: bool = True
    bucket_bytes: int = 64 << 20
    captures_graphs: bool = True


@dataclass(frozen=True)
class RoleSpec:
    """A model with one purpose.

    Attributes:
        name: such as ``actor``, ``rollout``, ``critic``, ``ref``, ``reward_model``.
        kind: ``trains``, ``forwards`` or ``generates``.
        model: sizes of its model.
        plugin: name of the engine or the rollout, such as ``fsdp`` or ``vllm``.
        optimizer_bytes: bytes of the optimizer's state per parameter, a master copy included.
        gradient_bytes: bytes of a gradient per parameter.
        recompute: layers recompute their activations in the backward pass.
        offload: weights and optimizer state are in host memory outside of their use.
        value_head: the output is a number per token, so there are no logits.
        own_process: the role runs in processes of its own also where it shares devices, as replicas do.
        adapter_parameters: parameters of the adapter that is trained in place of the model; 0 without one.
        training: layout of a role that does not generate; None for the usual one of ``plugin``.
        rollout: layout of a role that generates; None for replicas with the defaults.
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
        name: unique in the problem.
        role: name of the role that computes the stage.
        kind: ``generate``, ``forward`` or ``update``.
        waits_for: names of stages that end first; all of them precede this stage in the problem.
    """

    name: str
    role: str
    kind: StageKind
    waits_for: tuple[str, ...] = ()


@dataclass(frozen=True)
class Constraints:
    """Limits on mappings.

    Attributes:
        pinned: role → number of devices of its pool.
        forbidden: pairs of roles that share no pool.
        together: pairs of roles that share a pool.
        headroom: fraction of each device's memory that stays free.
        max_staleness: largest allowed ``trainer.max_staleness``.
        meshes: role → the only meshes that it may have; other roles may have any.
        modes: ways in which rollouts may share devices with training; all of them by default.
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
    """Everything that a planner decides by.

    Attributes:
        roles: at most one of them generates.
        stages: in an order in which each follows those that it waits for.
        prompts: prompts of a step.
        samples: responses per prompt.
        mini_batches: optimizer steps per epoch over the batch.
        epochs: passes over the batch.
        prompt_lengths, response_lengths: statistics in tokens.
        cluster: devices.
        constraints: limits on mappings.
        trained_share: fraction of the rows that updates compute; the others have no advantage, so they are skipped.
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
        """Sequences of a step."""
        return self.prompts * self.samples

    @property
    def tokens(self) -> float:
        """Mean tokens of a step, prompts included."""
        return self.rows * (self.prompt_lengths.mean + self.response_lengths.mean)

    def role(self, name: str) -> RoleSpec:
        """Return the role with this name.

        Raises:
            KeyError: there is none.
        """
        return {role.name: role for role in self.roles}[name]


@dataclass(frozen=True)
class Mesh:
    """Sizes by which a role's pool is divided; their product is the number of its devices.

    Attributes:
        data: data-parallel ranks; of a rollout, its replicas.
        tensor: ranks that share each layer.
        pipeline: ranks that each hold part of the layers.
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
    """Devices on nodes.

    Attributes:
        name: unique in the mapping.
        places: (index of the node in the cluster, number of devices there), by rising index.
    """

    name: str
    places: tuple[tuple[int, int], ...]

    @property
    def devices(self) -> int:
        """Number of devices."""
        return sum(count for _, count in self.places)

    @property
    def process_on_nodes(self) -> tuple[int, ...]:
        """Processes per node, as in ``placement.pools``."""
        return tuple(count for _, count in self.places)


@dataclass(frozen=True)
class Placement:
    """A role's place.

    Attributes:
        role: name of the role.
        pool: name of the pool.
        mesh: mesh on the pool; of a rollout, ``mesh.data`` replicas of ``mesh.tensor`` devices.
        micro_batch_rows: rows of a micro-batch on each data-parallel rank; of a rollout, sequences at a time.
    """

    role: str
    pool: str
    mesh: Mesh
    micro_batch_rows: int


@dataclass(frozen=True)
class Mapping:
    """Pools, and the place of each role.

    Attributes:
        pools: disjoint sets of devices.
        placements: one per role.
        mode: way in which rollouts share devices with training.
        max_staleness: steps by which generation may run ahead; with 1 or more, generation overlaps training.
    """

    pools: tuple[Pool, ...]
    placements: tuple[Placement, ...]
    mode: Mode
    max_staleness: int = 0


@dataclass(frozen=True)
class StageCost:
    """Predicted duration of a stage in its parts, each in seconds.

    Attributes:
        compute: arithmetic at the achieved rate.
        memory: time bound by the device memory beyond ``compute``.
        communication: exposed collectives and transfers.
        bubble: pipeline bubbles.
        tail: wait for the longest responses.
        idle: wait for other stages.
        note: how far the prediction extrapolates; empty if it does not.
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
        """Name of a part → its seconds."""
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
    """How fast a replica generates.

    Attributes:
        prefill: seconds of the prefill of a prompt of mean length.
        decode: (sequences decoded at once, mean tokens of each so far, its prompt included) → seconds of one decoding
            step, in which each of them gets one token.
    """

    prefill: float
    decode: Callable[[float, float], float]


@dataclass(frozen=True)
class MemoryParts:
    """Predicted bytes of a role on each of its devices; with a pipeline, on the fullest one.

    Attributes:
        parameters, gradients, optimizer, kv_cache: held during the whole step, unless they are ``visiting``.
        activations, logits, gathered: present while the role computes; ``gathered`` are weights of other ranks.
        buckets: buffers of the weight sync, present during it; 0 for a role that takes no part.
        reserve: CUDA context, libraries and graphs of the process; held. Roles that share a process share it.
        visiting: names of the parts that are on the device only while the role uses them.
        own_process: the role has processes of its own, also where it shares devices with others.
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
        """All bytes at the role's peak, the reserve of its process included."""
        return self.reserve + self.held + max(self.passing, self.syncing)

    @property
    def held(self) -> int:
        """Bytes beside the reserve that stay while another role of the pool computes."""
        return sum(self._resting(name, visits=False) for name in ("parameters", "gradients", "optimizer", "kv_cache"))

    @property
    def passing(self) -> int:
        """Bytes that are there only while the role computes; the optimizer state visits after the passes."""
        passes = self.activations + self.logits + self.gathered + self._resting("kv_cache", visits=True)
        weights = self._resting("parameters", visits=True) + self._resting("gradients", visits=True)
        return weights + max(passes, self._resting("optimizer", visits=True))

    @property
    def syncing(self) -> int:
        """Bytes beside the held ones during a weight sync; 0 for a role that takes no part."""
        return self.buckets + self._resting("parameters", visits=True) if self.buckets else 0

    def _resting(self, name: str, *, visits: bool) -> int:
        """Return the bytes of a part if it visits, or if it does not; else 0."""
        return int(getattr(self, name)) if (name in self.visiting) == visits else 0


@dataclass(frozen=True)
class Prediction:
    """A mapping with its predicted figures.

    Attributes:
        mapping: the mapping.
        step_seconds: duration of a step.
        tokens_per_second: tokens of a step, prompts included, divided by its duration.
        stages: stage → cost; ``weight_sync`` and ``switch`` are among the names.
        memory: role → bytes on each of its devices.
        device_bytes: pool → peak bytes on each of its devices, all its roles together.
    """

    mapping: Mapping
    step_seconds: float
    tokens_per_second: float
    stages: MappingType[str, StageCost]
    memory: MappingType[str, MemoryParts]
    device_bytes: MappingType[str, int]

    @property
    def limits(self) -> dict[str, str]:
        """Stage → name of the largest part of its cost."""
        return {name: cost.limit for name, cost in self.stages.items()}


@config
class CostModelConfig:
    """Keys of a cost model that has none; others derive from it."""


class BaseCostModel(ABC):
    """Prices the stages of a mapping. Equal arguments have equal prices, so that planners may keep them.

    Args:
        config: the options ``cost_model.*``, an instance of ``config_schema``.
    """

    #: Dataclass of the options ``cost_model.*``.
    config_schema: ClassVar[type[CostModelConfig]] = CostModelConfig

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def stage_cost(self, problem: Problem, stage: StageSpec, placement: Placement, pool: Pool, mode: Mode) -> StageCost:
        """Return the cost of a stage of one step, without its waits for other stages."""

    def generation_speed(  # for subclasses
        self, problem: Problem, stage: StageSpec, placement: Placement, pool: Pool, mode: Mode
    ) -> GenerationSpeed | None:
        """Return how fast a replica of a generating stage is; None if the model prices whole stages only.

        The price of the stage follows from this speed and the problem's lengths, so that a simulation with drawn
        lengths can be held against it.
        """
        return None

    @abstractmethod
    def memory(self, problem: Problem, role: RoleSpec, placement: Placement, pool: Pool, mode: Mode) -> MemoryParts:
        """Return the memory of a role on each of its devices."""

    @abstractmethod
    def sync_cost(
        self, problem: Problem, trained: tuple[Placement, Pool], rollout: tuple[Placement, Pool], mode: Mode
    ) -> StageCost:
        """Return the cost of one transfer of the trained weights to the rollout, resharding included."""

    @abstractmethod
    def switch_cost(self, problem: Problem, role: RoleSpec, placement: Placement, pool: Pool, mode: Mode) -> StageCost:
        """Return the cost per step of loading the role onto its devices and offloading it; 0 if the role stays."""

    def controller_cost(self, problem: Problem, mode: Mode) -> StageCost:  # for subclasses
        """Return the cost per step of what the controller does between the stages, such as rewards; 0 if unknown."""
        return StageCost()


class BasePlanner(ABC):
    """Searches mappings. Equal problems and cost models have equal results."""

    @abstractmethod
    def plan(self, problem: Problem, cost_model: BaseCostModel, count: int = 1) -> Sequence[Prediction]:
        """Return up to ``count`` mappings by rising step time.

        Raises:
            ResourceError: no mapping fits; names the role and the memory that it lacks.
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
