"""LoRA adapters on megatron-core's linear layers.

PEFT selects the layers and names the matrices, on a skeleton of the transformers model. Each projection of transformers
has its own pair A ``[r, in]`` and B ``[out, r]``, also where megatron-core fuses several into one matrix. If
tensor-parallel ranks split the rows of a layer, they split B; if they split its columns, they split A. The other matrix
is whole on each rank. Ranks exchange only A's output, which has ``r`` numbers per position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rollcast.contracts.weights import AdapterWeights
from rollcast.errors import ConfigError
from rollcast_engine.export import build_skeleton
from rollcast_engine.lora import Adapter, attach_adapter, merge_pair
from rollcast_megatron.build import Placed, find_name
from rollcast_megatron.maps import Split, Weight
from rollcast_megatron.weights import Shapes, gather

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch import Tensor

    from rollcast.contracts.engine import ModelConfig
    from rollcast_engine.lora import LoraPair
    from rollcast_megatron.build import Plan
    from rollcast_megatron.module import DecoderModel, Stage

__all__ = ["AdapterPlan", "StageAdapter", "adapt_stage", "plan_adapter"]


@dataclass(frozen=True)
class AdapterPlan:
    """Distribution of an adapter over the mesh.

    Attributes:
        plan: distribution of the model.
        adapter: pairs of matrices, their initial values, and PEFT's config.
        shapes: shapes of the whole matrices by name.
        layers: adapted parameters of the model, of all stages.
    """

    plan: Plan
    adapter: Adapter
    shapes: Shapes
    layers: Sequence[Placed] = field(repr=False)

    def pairs(self, layer: Placed) -> list[LoraPair | None]:
        """Return the pair of each transformers parameter that a layer's parameter is built from; None without one."""
        return [self.adapter.pairs.get(source) for source in layer.weight.sources]

    def weights(self) -> Iterator[Placed]:
        """Yield every matrix of the adapter."""
        for layer in self.layers:
            for pair in self.pairs(layer):
                if pair is None:
                    continue
                splits_rows = layer.weight.layout.dim == 0
                for name, dim in ((pair.a, None if splits_rows else 1), (pair.b, 0 if splits_rows else None)):
                    weight = Weight((f"adapter.{_key(name)}",), (name,), Split(dim))
                    yield Placed(weight, layer.stage, chunk=layer.chunk)

    def own_weights(self) -> Iterator[Placed]:
        """Yield the matrices of this rank's stage."""
        return (placed for placed in self.weights() if placed.stage == self.plan.mesh.pipeline_rank)

    def gather(self, stage: Stage) -> dict[str, Tensor]:
        """Return the whole matrices by name, on every rank; all ranks must call."""
        own = {placed.names[0] for placed in self.own_weights()}
        parameters = {name: value for name, value in stage.named_parameters() if name in own}
        gathered = gather(self.plan, parameters, self.shapes, weights=self.weights())
        # Matrices that this rank holds whole are its parameters, which later steps change.
        return {name: tensor.clone() for name, tensor in gathered}

    def gather_weights(self, stage: Stage) -> AdapterWeights:
        """Return the whole adapter by PEFT's names, on every rank; all ranks must call."""
        whole = self.gather(stage)
        # Query, key and value may come in another order than PEFT's.
        tensors = {self.adapter.peft_name(name): whole[name] for name in self.adapter.names}
        return AdapterWeights(self.adapter.config, tensors)

    def merge(self, tensors: Iterator[tuple[str, Tensor]], stage: Stage) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors of the base model with the adapter merged into them; all ranks must iterate together."""
        whole = self.gather(stage)
        for name, tensor in tensors:
            pair = self.adapter.pairs.get(name)
            yield name, tensor if pair is None else merge_pair(tensor, whole[pair.a], whole[pair.b], pair.scaling)


def plan_adapter(plan: Plan, model: ModelConfig, seed: int) -> AdapterPlan:
    """Return the distribution of the adapter that the model's keys describe.

    Raises:
        ConfigError: PEFT is not installed, ``model.target_modules`` selects layers that cannot be adapted, or a
            chunk of a pipeline stage has no adapted layer.
    """
    skeleton = build_skeleton(model, "value_model" if plan.is_value_model else "language_model", torch.float32)
    adapter = attach_adapter(skeleton, model, seed)
    shapes = {name: parameter.shape for name, parameter in skeleton.named_parameters() if adapter.owns(name)}
    left = set(adapter.pairs)
    layers = []
    for placed in plan.weights():
        chosen = left.intersection(placed.weight.sources)
        if placed.is_copy or placed.is_vocabulary or placed.peers or placed.weight.layout.dim is None or not chosen:
            continue
        if placed.weight.layout.splits_fused(plan.mesh.tensor_size):
            raise ConfigError(
                f"model.target_modules={model.target_modules} selects {min(chosen)}, but tensor-parallel ranks share "
                f"key-value heads: an adapter of queries, keys or values needs a tensor_model_parallel_size that "
                f"divides the model's {plan.map.transformer['num_query_groups']} key-value heads, not "
                f"{plan.mesh.tensor_size}"
            )
        left -= chosen
        layers.append(placed)
    if left:
        raise ConfigError(
            f"model.target_modules={model.target_modules} selects {min(left)}, which the megatron engine cannot adapt: "
            "only attention projections and feed-forward layers outside experts can be; name other layers, or use "
            "engine=fsdp"
        )
    _check_idle(plan, layers, model)
    return AdapterPlan(plan, adapter, shapes, layers)


def _check_idle(plan: Plan, layers: Sequence[Placed], model: ModelConfig) -> None:
    """Check that each chunk of each stage trains; without a gradient, it could not pass one on.

    Raises:
        ConfigError: a chunk has no adapted layer.
    """
    every = {(stage, chunk) for stage in range(plan.mesh.pipeline_size) for chunk in range(plan.chunks)}
    idle = sorted(every - {(placed.stage, placed.chunk) for placed in layers})
    if idle:
        stage, chunk = idle[0]
        which = f"chunk {chunk} of pipeline stage {stage}" if plan.chunks > 1 else f"pipeline stage {stage}"
        virtual = "virtual_pipeline_model_parallel_size or " if plan.chunks > 1 else ""
        raise ConfigError(
            f"model.target_modules={model.target_modules} selects no layer of {which}, which would train nothing; "
            f"select layers of every stage, or lower {virtual}pipeline_model_parallel_size"
        )


def adapt_stage(stage: Stage, adapter_plan: AdapterPlan, device: torch.device) -> None:
    """Add this rank's part of the adapter to a stage, with its initial values, and freeze all but a value head."""
    stage.requires_grad_(False)
    parameters, chunks = dict(stage.named_parameters()), list[Any](stage.chunks)
    banks = [_adapt_chunk(chunk, number, adapter_plan, device) for number, chunk in enumerate(chunks)]
    for layer in adapter_plan.layers:
        if layer.stage == adapter_plan.plan.mesh.pipeline_rank:
            linear = stage.get_submodule(find_name(layer, parameters).removesuffix(".weight"))
            linear.register_forward_hook(_Hook(banks[layer.chunk], layer, adapter_plan, parameters, stage.config))


def _adapt_chunk(chunk: DecoderModel, number: int, adapter_plan: AdapterPlan, device: torch.device) -> StageAdapter:
    if chunk.is_value_model and chunk.post_process:
        chunk.score.requires_grad_(True)
    if chunk.pre_process and chunk.config.recompute_granularity == "full":
        # A recomputed layer has gradients only if its input requires one, and a frozen embedding's output does not.
        chunk.embedding.register_forward_hook(_require_gradient)
    chunk.adapter = StageAdapter(adapter_plan, number, chunk.config.sequence_parallel, device)
    return chunk.adapter


def _require_gradient(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
    if torch.is_grad_enabled():
        output.requires_grad_(True)


class StageAdapter(nn.Module):
    """A chunk's matrices of the adapter, float32: their updates would be lost in the rounding of bfloat16.

    Args:
        adapter_plan: distribution of the adapter.
        chunk: number of the chunk in this rank's stage.
        is_sequence_parallel: True if tensor-parallel ranks share positions.
        device: device of the matrices.

    Attributes:
        enabled: True if forward passes use the adapter.
    """

    def __init__(self, adapter_plan: AdapterPlan, chunk: int, is_sequence_parallel: bool, device: torch.device) -> None:
        from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

        super().__init__()
        self.enabled = True
        mesh = adapter_plan.plan.mesh
        self._replica = mesh.data_rank * mesh.context_size + mesh.context_rank
        self._tensor = mesh.tensor_rank, mesh.tensor_size
        self._dims: dict[str, tuple[str, int | None]] = {}
        for placed in adapter_plan.own_weights():
            if placed.chunk != chunk:
                continue
            name, dim = placed.weight.sources[0], placed.weight.layout.dim
            value = adapter_plan.adapter.initial(name, tuple(adapter_plan.shapes[name]))
            if dim is not None:
                value = value.chunk(mesh.tensor_size, dim)[mesh.tensor_rank]
            parameter: Any = nn.Parameter(value.to(device, copy=True).contiguous())
            set_tensor_model_parallel_attributes(parameter, dim is not None, -1 if dim is None else dim, 1)
            # Each rank computes the gradient of a whole matrix from its own positions; megatron-core sums them.
            parameter.sequence_parallel = is_sequence_parallel and dim is None
            self.register_parameter(_key(name), parameter)
            self._dims[_key(name)] = name, dim

    def matrix(self, name: str) -> Tensor:
        """Return this rank's part of a matrix."""
        return self.get_parameter(_key(name))

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Use only the base model in forward passes during the block."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Return each matrix with its position in the whole one, as megatron-core's modules do."""
        from megatron.core.dist_checkpointing import ShardedTensor

        rank, ranks = self._tensor
        entries = {}
        for key, (name, dim) in self._dims.items():
            offsets = [] if dim is None else [(dim, rank, ranks)]
            replica = (0, rank if dim is None else 0, self._replica)
            entries[prefix + key] = ShardedTensor.from_rank_offsets(
                f"adapter.{name}", self.get_parameter(key), *offsets, replica_id=replica
            )
        return entries


class _Hook:
    """Forward hook that adds the adapter's output to that of a linear layer of megatron-core."""

    def __init__(
        self,
        bank: StageAdapter,
        layer: Placed,
        adapter_plan: AdapterPlan,
        parameters: Mapping[str, Tensor],
        config: TransformerConfig,
    ) -> None:
        self._is_sequence_parallel = config.sequence_parallel
        self._bank, self._layout = bank, layer.weight.layout
        self._pairs = adapter_plan.pairs(layer)
        mesh = adapter_plan.plan.mesh
        self._ranks, self._group = mesh.tensor_size, mesh.tensor_group
        self._parameter = parameters[find_name(layer, parameters)]
        self._splits_rows = layer.weight.layout.dim == 0

    def __call__(self, module: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> Any:
        if not self._bank.enabled:
            return None
        result, bias = output
        low = nn.functional.linear(_normalized(module, inputs[0]).float(), self._down())
        added = nn.functional.linear(self._exchange(low), self._up())
        return result + added.to(result.dtype), bias

    def _down(self) -> Tensor:
        """Return A of all pairs of this layer, one below the other."""
        return torch.cat([self._bank.matrix(pair.a) for pair in self._pairs if pair is not None])

    def _exchange(self, low: Tensor) -> Tensor:
        """Return A's output for all positions that B needs: of the whole input, if ranks split its columns."""
        from megatron.core import tensor_parallel as tp

        if self._splits_rows:
            exchange = (
                tp.gather_from_sequence_parallel_region
                if self._is_sequence_parallel
                else tp.copy_to_tensor_model_parallel_region
            )
        else:
            exchange = (
                tp.reduce_scatter_to_sequence_parallel_region
                if self._is_sequence_parallel
                else tp.reduce_from_tensor_model_parallel_region
            )
        exchanged: Tensor = exchange(low, group=self._group)
        return exchanged

    def _up(self) -> Tensor:
        """Return scaled B of all pairs, fused as the layer's rows; each row is zero outside the columns of its pair."""
        width = sum(self._bank.matrix(pair.a).size(0) for pair in self._pairs if pair is not None)
        blocks, start = [], 0
        for rows, pair in zip(self._rows(), self._pairs, strict=True):
            if pair is None:
                blocks.append(self._bank.matrix(self._any().b).new_zeros((rows, width)))
                continue
            b = self._bank.matrix(pair.b) * pair.scaling
            blocks.append(nn.functional.pad(b, (start, width - start - b.size(1))))
            start += b.size(1)
        return self._layout.fuse(blocks, self._ranks)

    def _rows(self) -> list[int]:
        """Return this rank's rows of each transformers parameter."""
        return [part.size(0) for part in self._layout.unfuse(self._parameter, self._ranks)]

    def _any(self) -> LoraPair:
        return next(pair for pair in self._pairs if pair is not None)


def _normalized(module: Any, hidden: Tensor) -> Tensor:
    """Return the input of a layer's matrix: Transformer Engine's fused layers normalize it themselves."""
    weight = getattr(module, "layer_norm_weight", None)
    return hidden if weight is None else nn.functional.rms_norm(hidden, (hidden.size(-1),), weight, module.eps)


def _key(name: str) -> str:
    """Return the name of a matrix as a parameter of its module, which may contain no dots."""
    return name.replace(".", "/")
