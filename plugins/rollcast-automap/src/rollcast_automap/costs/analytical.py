"""The cost model ``analytical``: a roofline from published device figures. docs/cost-models.md lists the formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from rollcast.contracts.config import Ge, Gt, Le, config
from rollcast_automap.contract import (
    BaseCostModel,
    Cluster,
    CostModelConfig,
    GenerationSpeed,
    MemoryParts,
    Mesh,
    Mode,
    ModelFacts,
    Placement,
    Pool,
    Problem,
    RoleSpec,
    StageCost,
    StageSpec,
)
from rollcast_automap.costs.decoding import read_decoding
from rollcast_automap.costs.length_curve import LengthCurve
from rollcast_automap.memory.role_memory import price_memory

__all__ = ["AnalyticalConfig", "AnalyticalCosts"]

#: Engines that shard weights over all data-parallel ranks and gather them layer by layer.
_SHARDING = frozenset({"fsdp"})
#: Kernels of a layer of an inference engine: two norms, four products, one kernel for rotation and cache write, two for
#: attention (parts of the context, then their sum), and the activation.
_KERNELS = 10
Reached = Annotated[float, Gt(0), Le(1)]
NonNegative = Annotated[float, Ge(0)]


@config
class AnalyticalConfig(CostModelConfig):
    """Fractions of published peak figures that are reached, and fixed costs; the same for every device and stage."""

    compute: Reached = 0.8
    """Fraction of the peak FLOP per second in matrix products."""
    attention: Reached = 0.5
    """Rate of attention as a fraction of the rate of matrix products."""
    memory: Reached = 0.85
    """Fraction of the peak memory bandwidth."""
    link: Reached = 0.8
    """Fraction of the peak link bandwidth in collectives."""
    elementwise_bytes: NonNegative = 120.0
    """Bytes that norms, residuals and activations move in a forward pass, per token, layer and hidden element."""
    latency_s: NonNegative = 1e-5
    """Seconds of one small collective."""
    launch_s: NonNegative = 5e-5
    """Minimum duration of a layer in seconds."""
    kernel_s: NonNegative = 3e-6
    """Overhead of a kernel in a CUDA graph, in seconds."""
    reserve_bytes: Annotated[int, Ge(0)] | None = None
    """Bytes of a process beyond its tensors, without CUDA graphs; null for the figure of its device and plugin."""
    graph_bytes: Annotated[int, Ge(0)] | None = None
    """Bytes of a replica's CUDA graphs; null for the figure of its plugin."""


@dataclass(frozen=True)
class _Place:
    """Figures of the slowest device of a pool, in FLOP/s and bytes/s."""

    flops: float
    bandwidth: float
    host: float
    link: float
    network: float
    nodes: int
    per_node: int
    efficiency: AnalyticalConfig

    def gather(self, size: float, ranks: int, stride: int) -> float:
        """Return the seconds of an all-gather or reduce-scatter of ``size`` bytes over ranks ``stride`` apart."""
        if ranks < 2:
            return 0.0
        inside = max(self.per_node // stride, 1)
        nodes = -(-ranks // inside) if self.nodes > 1 else 1
        seconds = size * (ranks - 1) / ranks / self.link if inside > 1 or nodes == 1 else 0.0
        if nodes > 1:
            seconds = max(seconds, size * (nodes - 1) / nodes / (min(inside, ranks) * self.network))
        return seconds / self.efficiency.link + self.efficiency.latency_s * math.log2(ranks)

    def reduce(self, size: float, ranks: int) -> float:
        """Return the seconds of an inference engine's all-reduce of ``size`` bytes over neighbouring ranks.

        Within a node, a rank reads the memory of the other ranks. Two methods are priced and the faster counts: one
        kernel that reads everything, or one kernel that reads the rank's share and a second that reads the sums.
        Between nodes, an all-reduce is a reduce-scatter and an all-gather.
        """
        if ranks < 2:
            return 0.0
        if self.nodes > 1 and ranks > self.per_node:
            return 2 * self.gather(size, ranks, 1)
        peers, wire = ranks - 1, size / self.link / self.efficiency.link
        return self.efficiency.kernel_s + min(peers * wire, 2 * peers / ranks * wire + self.efficiency.kernel_s)

    def send(self, size: float) -> float:
        """Return the seconds in which each device sends ``size`` bytes to a device of the next pipeline stage."""
        return size / (self.network if self.nodes > 1 else self.link) / self.efficiency.link + self.efficiency.latency_s


def _exchanges(recomputes: bool, splits: bool, trains: bool) -> int:
    """Return the all-gathers and reduce-scatters of a layer's activations over tensor-parallel ranks.

    A pass sums the outputs of attention and MLP, each in a reduce-scatter and an all-gather. The backward pass sums the
    gradients of their inputs; if the ranks split the sequence, it also gathers these inputs again.
    """
    if not trains:
        return 4
    return 4 + (4 if recomputes else 0) + (6 if splits else 4)


def _end_exchanges(splits: bool, trains: bool, apart: bool) -> int:
    """Return those of embedding and head; if they are on stages ``apart``, those of the stage that has more."""
    if not splits:  # the embedding's outputs are summed, and the gradients of the head's inputs
        return 2 if apart or not trains else 4
    if trains:
        return 3 if apart else 5
    return 1 if apart else 2


def _embeddings(model: ModelFacts) -> int:
    return model.hidden * model.vocab * (1 if model.tied else 2)


def _layer_weights(model: ModelFacts) -> float:
    attention = model.hidden * model.head_size * (2 * model.heads + 2 * model.kv_heads)
    stored = (model.parameters - _embeddings(model)) / model.layers
    # In a mixture of experts, a token is multiplied only with the weights of its experts; ffn is their total width.
    return min(stored, attention + 3 * model.hidden * model.ffn)


class AnalyticalCosts(BaseCostModel):
    """Roofline costs from published device figures."""

    config_schema: ClassVar[type[CostModelConfig]] = AnalyticalConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.efficiency: AnalyticalConfig = config
        self._cluster: Cluster | None = None
        self._places: dict[tuple[tuple[int, int], ...], _Place] = {}

    def stage_cost(self, problem: Problem, stage: StageSpec, placement: Placement, pool: Pool, mode: Mode) -> StageCost:
        """Return the cost of a stage of one step, without its waits for other stages."""
        role, place = problem.role(stage.role), self._place(problem, pool)
        if stage.kind == "generate":
            return self._generate(problem, role, placement, place)
        return self._pass(problem, role, placement, place, stage.kind == "update")

    def generation_speed(
        self, problem: Problem, stage: StageSpec, placement: Placement, pool: Pool, mode: Mode
    ) -> GenerationSpeed | None:
        """Return the prefill and decoding speed of a replica of a generating stage."""
        role, place = problem.role(stage.role), self._place(problem, pool)
        rows = math.ceil(problem.rows / placement.mesh.data)

        def decode(active: float, context: float) -> float:
            return sum(self._decode(role.model, placement.mesh, place, active, context))

        return GenerationSpeed(sum(self._prefill(problem, role, placement, place)) / rows, decode)

    def sync_cost(
        self, problem: Problem, trained: tuple[Placement, Pool], rollout: tuple[Placement, Pool], mode: Mode
    ) -> StageCost:
        """Return the cost of one transfer of the trained weights to the rollout, resharding included."""
        source, target = self._place(problem, trained[1]), self._place(problem, rollout[1])
        role = problem.role(rollout[0].role)
        mesh, weights = trained[0].mesh, self._parameters(role) * role.model.dtype_bytes
        shards = mesh.size if problem.role(trained[0].role).plugin in _SHARDING else mesh.tensor * mesh.pipeline
        tensor = rollout[0].mesh.tensor
        # Each device gathers its part of the rollout's weights from the ranks that shard one training copy.
        seconds = source.gather(weights / tensor, max(shards // tensor, 1), 1)
        if trained[1].name != rollout[1].name:
            senders = min(source.per_node * source.nodes, target.per_node)
            seconds += weights / (max(senders, 1) * target.network * self.efficiency.link) + self.efficiency.latency_s
        return StageCost(communication=seconds)

    def switch_cost(self, problem: Problem, role: RoleSpec, placement: Placement, pool: Pool, mode: Mode) -> StageCost:
        """Return the cost per step of loading the role onto its devices and offloading it; 0 if the role stays."""
        if not role.offload:
            return StageCost()
        parts = self.memory(problem, role, placement, pool, mode)
        # Weights of a frozen role do not change, so they are loaded but never copied back to host memory.
        ways = 2 if role.kind == "trains" else 1
        moved = ways * sum(int(getattr(parts, name)) for name in ("parameters", "optimizer") if name in parts.visiting)
        return StageCost(communication=moved / (self._place(problem, pool).host * self.efficiency.link))

    def memory(self, problem: Problem, role: RoleSpec, placement: Placement, pool: Pool, mode: Mode) -> MemoryParts:
        """Return the memory of a role on each of its devices."""
        efficiency = self.efficiency
        return price_memory(problem, role, placement, pool, mode, efficiency.reserve_bytes, efficiency.graph_bytes)

    def _parameters(self, role: RoleSpec) -> int:
        model = role.model
        if not role.value_head:
            return model.parameters
        return model.parameters - (0 if model.tied else model.hidden * model.vocab) + model.hidden

    def _place(self, problem: Problem, pool: Pool) -> _Place:
        if self._cluster is not problem.cluster:
            self._cluster, self._places = problem.cluster, {}
        if pool.places not in self._places:
            self._places[pool.places] = self._find_place(problem, pool)
        return self._places[pool.places]

    def _find_place(self, problem: Problem, pool: Pool) -> _Place:
        nodes = [problem.cluster.nodes[index] for index, _ in pool.places]
        return _Place(
            flops=min(node.kind.flops["bfloat16"] for node in nodes) * self.efficiency.compute,
            bandwidth=min(node.kind.memory_bandwidth for node in nodes) * self.efficiency.memory,
            host=min(node.kind.host_bandwidth for node in nodes),
            link=min(node.link_bandwidth for node in nodes),
            network=problem.cluster.network_bandwidth,
            nodes=len(nodes),
            per_node=min(count for _, count in pool.places),
            efficiency=self.efficiency,
        )

    def _layer(self, model: ModelFacts, place: _Place, tokens: float, pairs: float, tensor: int) -> tuple[float, float]:
        """Return the seconds of a layer's forward pass: arithmetic, and memory traffic that it does not hide."""
        weights = _layer_weights(model)
        products = 2 * weights * tokens / tensor / place.flops
        # A causal kernel computes half of the square of positions.
        attention = 2 * model.heads * model.head_size * pairs / tensor / (place.flops * self.efficiency.attention)
        load = weights * 2 / tensor / place.bandwidth
        moved = self.efficiency.elementwise_bytes * tokens * model.hidden / tensor / place.bandwidth
        compute = products + attention
        return compute, max(max(load, products) + attention + moved, self.efficiency.launch_s) - compute

    def _pass(self, problem: Problem, role: RoleSpec, at: Placement, place: _Place, trains: bool) -> StageCost:
        """Return the cost of forward passes, or of forward and backward passes and optimizer steps, over the batch."""
        model, mesh = role.model, at.mesh
        prompt, response = LengthCurve.read(problem.prompt_lengths), LengthCurve.read(problem.response_lengths)
        mean, square = prompt.plus(response)
        batches = problem.mini_batches * problem.epochs if trains else 1
        rows = problem.rows * (problem.trained_share / problem.mini_batches if trains else 1) / mesh.data
        # trained_share, and so rows, is 0 if no row has an advantage.
        micro = max(math.ceil(rows / min(at.micro_batch_rows, max(math.ceil(rows), 1))), 1)
        tokens, share = mean * rows / micro, rows / micro
        layers = model.layers / mesh.pipeline
        compute, memory = self._layer(model, place, tokens, square * share, mesh.tensor)
        # A backward pass is two forward passes; recomputation adds one.
        passes = (4.0 if role.recompute else 3.0) if trains else 1.0
        compute, memory = compute * passes * layers, memory * passes * layers
        if not role.value_head:
            head = response.mean * share * model.vocab / mesh.tensor
            compute += (3.0 if trains else 1.0) * 2 * model.hidden * head / place.flops
            memory += (3.0 if trains else 1.0) * 8 * head / place.bandwidth
        activation = tokens * model.hidden * 2
        splits = role.training is not None and role.training.splits_sequence
        exchanges = _exchanges(role.recompute, splits, trains) * layers + _end_exchanges(
            splits, trains, mesh.pipeline > 1
        )
        exchanged = exchanges * place.gather(activation, mesh.tensor, 1)
        streams = role.training is not None and role.training.streams_weights
        if role.plugin in _SHARDING and (mesh.data > 1 or streams):
            gathered = place.gather(2 * _layer_weights(model) * layers, mesh.data, 1)
            wire = gathered * (2 + role.gradient_bytes / 2 if trains else 1)
            if trains:  # embedding and head are gathered once for both passes
                wire += place.gather(2 * _embeddings(model), mesh.data, 1) * (1 + role.gradient_bytes / 2)
            if streams:
                # Each rank copies its shards from host memory, and back their gradients.
                number = _layer_weights(model) * layers / mesh.data / (place.host * self.efficiency.link)
                gathered += model.dtype_bytes * number
                wire += (2 * model.dtype_bytes + role.gradient_bytes if trains else model.dtype_bytes) * number
            # A layer's gather overlaps with the previous layer's computation; nothing hides the first gather of a pass.
            exchanged += max(wire - compute - memory, gathered / layers)
        chunks = role.training.pipeline_chunks if role.training is not None else 1
        if mesh.pipeline > 1:
            # Each chunk of a stage sends its output. The schedules wait for the shapes of what they receive, so that
            # little computation hides a transfer.
            exchanged += (2 if trains else 1) * chunks * place.send(activation / mesh.tensor)
        bubble = (mesh.pipeline - 1) * (compute + memory + exchanged) / chunks
        sums = [batches * micro * part for part in (compute, memory, exchanged)]
        if trains:
            numbers = self._parameters(role) / (mesh.tensor * mesh.pipeline)
            if role.plugin in _SHARDING:
                numbers /= mesh.data
            else:
                reduced = place.gather(numbers * role.gradient_bytes, mesh.data, mesh.tensor)
                sums[2] += batches * (reduced + place.gather(numbers * 2, mesh.data, mesh.tensor))
                numbers /= mesh.data
            # No figure of a node describes a CPU's memory; the copies from it are not faster than it.
            bandwidth = place.host if streams else place.bandwidth
            sums[1] += batches * numbers * 2 * (role.optimizer_bytes + role.gradient_bytes) / bandwidth
        return StageCost(sums[0], sums[1], sums[2], bubble=batches * bubble)

    def _generate(self, problem: Problem, role: RoleSpec, at: Placement, place: _Place) -> StageCost:
        """Return the cost of generating the batch; ``tail`` is the time that unequal lengths add."""
        prompt, response = LengthCurve.read(problem.prompt_lengths), LengthCurve.read(problem.response_lengths)
        rows = math.ceil(problem.rows / at.mesh.data)
        parts = list(self._prefill(problem, role, at, place))
        decoding = read_decoding(response, rows, at.micro_batch_rows, problem.rows)
        context = prompt.mean + response.mean_square / (2 * response.mean)
        whole = self._decode(role.model, at.mesh, place, decoding.slots, context)
        for place_in, part in enumerate(whole):
            parts[place_in] += decoding.equal * part
        seconds = sum(
            steps * sum(self._decode(role.model, at.mesh, place, active, prompt.mean + done))
            for steps, active, done in decoding.phases
        )
        tail = max(seconds - decoding.equal * sum(whole), 0.0)
        return StageCost(parts[0], parts[1], parts[2], tail=tail)

    def _prefill(self, problem: Problem, role: RoleSpec, at: Placement, place: _Place) -> tuple[float, float, float]:
        """Return compute, memory and communication of the prompts of a replica."""
        model, prompt = role.model, LengthCurve.read(problem.prompt_lengths)
        rows = math.ceil(problem.rows / at.mesh.data)
        tokens = rows * prompt.mean
        compute, memory = self._layer(model, place, tokens, rows * prompt.mean_square, at.mesh.tensor)
        memory += _KERNELS * self.efficiency.kernel_s
        wire = 2 * place.reduce(tokens * model.hidden * 2, at.mesh.tensor)
        return compute * model.layers, memory * model.layers, wire * model.layers

    def _decode(
        self, model: ModelFacts, mesh: Mesh, place: _Place, active: float, context: float
    ) -> tuple[float, float, float]:
        """Return compute, memory and communication of a token for each of ``active`` rows of ``context`` tokens."""
        tensor, weights = mesh.tensor, _layer_weights(model)
        cache = 2 * model.kv_heads * model.head_size * 2 / min(tensor, model.kv_heads)
        pairs = 4 * active * context * model.heads * model.head_size / tensor
        head = model.hidden * model.vocab / tensor
        # Kernels run one after the other, so each has its own bound: arithmetic or memory.
        compute = memory = 0.0
        for count, work, read in (
            (model.layers, 2 * active * weights / tensor, 2 * weights / tensor),
            (model.layers, pairs / self.efficiency.attention, active * context * cache),
            (1, 2 * active * head, 2 * head),
        ):
            busy = work / place.flops
            compute += count * busy
            memory += count * max(read / place.bandwidth - busy, 0.0)
        moved = self.efficiency.elementwise_bytes * active * model.hidden / tensor / place.bandwidth
        memory += model.layers * (moved + _KERNELS * self.efficiency.kernel_s)
        return compute, memory, model.layers * 2 * place.reduce(active * model.hidden * 2, tensor)
