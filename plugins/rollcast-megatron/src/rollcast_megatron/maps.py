"""The registry of model maps, which say how megatron-core stores a transformers model.

A family is a function from a model's transformers config to its :class:`ModelMap`, registered under the config's
``model_type`` in the entry-point group ``rollcast.megatron_models``.

Example, for an architecture like Llama's with other names::

    def mine(config: Any) -> ModelMap:
        return replace(llama(config), final_norm="backbone.norm.weight")
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from rollcast.errors import ConfigError, PluginNotFoundError
from rollcast.plugins import Registry, is_callable

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast_engine.routing import RoutingRule

__all__ = [
    "Family",
    "FusedQkv",
    "FusedRows",
    "Layout",
    "Mixture",
    "ModelMap",
    "Split",
    "Weight",
    "families",
    "find_map",
]


class Layout(ABC):
    """Rule for building one parameter of megatron-core from parameters of transformers, and for sharding it.

    Attributes:
        dim: dimension along which tensor-parallel ranks split each transformers parameter; None if all hold it whole.
    """

    dim: int | None = None

    def splits_fused(self, ranks: int) -> bool:  # for subclasses
        """Return True if the ranks split the fused parameter into equal rows, instead of its transformers parameters.

        :meth:`fuse` and :meth:`unfuse` then receive whole parameters, and 1 as the number of ranks.
        """
        return False

    @abstractmethod
    def fuse(self, parts: Sequence[Tensor], ranks: int) -> Tensor:
        """Return a rank's megatron-core parameter, built from its share of each transformers parameter."""

    @abstractmethod
    def unfuse(self, whole: Tensor, ranks: int) -> list[Tensor]:
        """Return the shares that :meth:`fuse` combined."""


@dataclass(frozen=True)
class Split(Layout):
    """Layout of a single parameter: whole on each rank, or split along ``dim``."""

    dim: int | None = None

    def fuse(self, parts: Sequence[Tensor], ranks: int) -> Tensor:
        """Return the only part."""
        return parts[0]

    def unfuse(self, whole: Tensor, ranks: int) -> list[Tensor]:
        """Return the parameter as the only part."""
        return [whole]


@dataclass(frozen=True)
class FusedRows(Layout):
    """Layout of matrices of equal shape, stacked on each rank, such as gate and up projection."""

    count: int = 2
    dim: int | None = 0

    def fuse(self, parts: Sequence[Tensor], ranks: int) -> Tensor:
        """Return the parts stacked along their rows."""
        return torch.cat(list(parts))

    def unfuse(self, whole: Tensor, ranks: int) -> list[Tensor]:
        """Return the equal shares of its rows."""
        return list(whole.chunk(self.count))


@dataclass(frozen=True)
class FusedQkv(Layout):
    """Layout of query, key and value projections by group: a group's query heads, its key head, its value head.

    Attributes:
        heads, groups: attention heads and key-value heads of the whole model.
        head_dim: rows of a head.
    """

    heads: int
    groups: int
    head_dim: int
    dim: int | None = 0

    def splits_fused(self, ranks: int) -> bool:
        """Return True if there are more ranks than groups: several ranks share a key head and its value head."""
        return self.groups < ranks

    def fuse(self, parts: Sequence[Tensor], ranks: int) -> Tensor:
        """Return the projections interleaved by group; weights ``[rows, h]`` or biases ``[rows]``."""
        groups = self.groups // ranks
        grouped = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, 1).reshape(-1, *parts[0].shape[1:])

    def unfuse(self, whole: Tensor, ranks: int) -> list[Tensor]:
        """Return the shares of the three projections."""
        groups, queries = self.groups // ranks, self.heads // self.groups * self.head_dim
        grouped = whole.reshape(groups, -1, *whole.shape[1:])
        parts = torch.split(grouped, [queries, self.head_dim, self.head_dim], 1)
        return [part.reshape(-1, *whole.shape[1:]) for part in parts]


@dataclass(frozen=True)
class Weight:
    """One parameter of megatron-core.

    Attributes:
        names: possible names in megatron-core, of which the first existing one is used: layers differ with and without
            Transformer Engine.
        sources: parameters of transformers that it is built from.
        layout: rule that builds it.
        dtype: its dtype; None for the model's.
    """

    names: tuple[str, ...]
    sources: tuple[str, ...]
    layout: Layout = field(default_factory=Split)
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Mixture:
    """The layers of a model in which each token visits some of several feed-forward networks, its experts.

    Attributes:
        rule: rule by which the routers choose.
        layers: for each layer of the model, True if it has experts.
        layer: parameters of such a layer without its experts, named as in :attr:`ModelMap.layer`.
        expert: parameters of an expert; ``{expert}`` stands for its number, in their names among the experts of a rank,
            and in their sources among all.
    """

    rule: RoutingRule
    layers: Sequence[bool]
    layer: Sequence[Weight]
    expert: Sequence[Weight]


@dataclass(frozen=True)
class ModelMap:
    """A decoder of megatron-core that is equivalent to a transformers model, and the mapping of its weights.

    Attributes:
        transformer: fields of megatron-core's ``TransformerConfig``, or ``MLATransformerConfig``.
        vocab_size, max_positions: sizes of the model.
        tied: True if the head shares the embedding's weight.
        rope: rotary embedding of the transformers config: ``rope_theta``, ``rope_type``,
            ``partial_rotary_factor`` and further keys.
        layer: parameters of a layer; their names follow ``decoder.layers.<n>.``, and ``{layer}`` in their sources
            stands for the layer's number.
        mixture: layers with experts; None if there are none.
        embedding, final_norm, head: transformers' names of the parameters outside the layers.
    """

    transformer: Mapping[str, Any]
    vocab_size: int
    max_positions: int
    tied: bool
    rope: Mapping[str, Any]
    layer: Sequence[Weight]
    mixture: Mixture | None = None
    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"

    @property
    def layers(self) -> int:
        """Number of layers."""
        return int(self.transformer["num_layers"])

    @property
    def has_latent_attention(self) -> bool:
        """True if keys and values are computed from a latent vector (MLA, arXiv:2405.04434, section 2.1)."""
        return bool(self.transformer.get("multi_latent_attention"))

    def has_experts(self, layer: int) -> bool:
        """Return True if a layer, counted from 0, has experts."""
        return self.mixture is not None and self.mixture.layers[layer]


Family = Callable[[Any], ModelMap]

families: Registry[Family] = Registry(
    "rollcast.megatron_models", is_callable(1), description="how models of transformers are stored in megatron-core"
)


def find_map(config: Any) -> ModelMap:
    """Return the map of a model by its transformers config.

    Raises:
        ConfigError: there is no map for its ``model_type``, or the map does not support a feature of the model.
    """
    kind = config.model_type
    try:
        family = families.get(kind, requested_by="model.path (model_type in its config.json)")
    except PluginNotFoundError as error:
        raise ConfigError(
            f"the megatron engine has no map for the model type {kind!r} in rollcast.megatron_models, which contains "
            f"{', '.join(families.names())}; use engine=fsdp, or write a map: docs/engine-megatron.md"
        ) from error
    return family(config)
