"""How a model of transformers is stored in megatron-core: the table that other plugins can extend.

A family is a function from a model's transformers config to its :class:`ModelMap`, announced under
the config's ``model_type`` in the entry-point group ``rollcast.megatron_models``.

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

__all__ = ["Family", "FusedQkv", "FusedRows", "Layout", "ModelMap", "Split", "Weight", "families", "find_map"]


class Layout(ABC):
    """How parameters of transformers make up one of megatron-core's, and how ranks share it.

    Attributes:
        dim: the dimension along which tensor-parallel ranks split each of the former; None: all hold it whole.
    """

    dim: int | None = None

    @abstractmethod
    def fuse(self, parts: Sequence[Tensor], ranks: int) -> Tensor:
        """megatron-core's parameter on a rank, from its share of each of transformers'."""

    @abstractmethod
    def unfuse(self, whole: Tensor, ranks: int) -> list[Tensor]:
        """The inverse of :meth:`fuse`."""


@dataclass(frozen=True)
class Split(Layout):
    """One parameter as it is: whole on each rank, or split along ``dim``."""

    dim: int | None = None

    def fuse(self, parts: Sequence[Tensor], ranks: int) -> Tensor:
        """The part itself."""
        return parts[0]

    def unfuse(self, whole: Tensor, ranks: int) -> list[Tensor]:
        """The parameter itself."""
        return [whole]


@dataclass(frozen=True)
class FusedRows(Layout):
    """Matrices of equal shapes, one above the other on each rank; such as gate and up projection."""

    count: int = 2
    dim: int | None = 0

    def fuse(self, parts: Sequence[Tensor], ranks: int) -> Tensor:
        """One above the other."""
        return torch.cat(list(parts))

    def unfuse(self, whole: Tensor, ranks: int) -> list[Tensor]:
        """The equal shares of its rows."""
        return list(whole.chunk(self.count))


@dataclass(frozen=True)
class FusedQkv(Layout):
    """Query, key and value projections, group by group: a group's query heads, its key head, its value head.

    Attributes:
        heads, groups: attention heads, and key-value heads, of the whole model.
        head_dim: rows of a head.
    """

    heads: int
    groups: int
    head_dim: int
    dim: int | None = 0

    def fuse(self, parts: Sequence[Tensor], ranks: int) -> Tensor:
        """Interleaved by group; weights ``[rows, h]`` or biases ``[rows]``."""
        groups = self.groups // ranks
        grouped = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, 1).reshape(-1, *parts[0].shape[1:])

    def unfuse(self, whole: Tensor, ranks: int) -> list[Tensor]:
        """The three projections' shares."""
        groups, queries = self.groups // ranks, self.heads // self.groups * self.head_dim
        grouped = whole.reshape(groups, -1, *whole.shape[1:])
        parts = torch.split(grouped, [queries, self.head_dim, self.head_dim], 1)
        return [part.reshape(-1, *whole.shape[1:]) for part in parts]


@dataclass(frozen=True)
class Weight:
    """One parameter of megatron-core.

    Attributes:
        names: what it is called there; the first that exists counts, for layers differ with and without
            Transformer Engine.
        sources: the parameters of transformers that it is made of.
        layout: how.
    """

    names: tuple[str, ...]
    sources: tuple[str, ...]
    layout: Layout = field(default_factory=Split)


@dataclass(frozen=True)
class ModelMap:
    """A decoder of megatron-core that computes what a model of transformers does, and where its weights are.

    Attributes:
        transformer: fields of megatron-core's ``TransformerConfig``.
        vocab_size, max_positions: of the model.
        tied: the head is the embedding.
        rope: the transformers config's rotary embedding: ``rope_theta``, ``rope_type`` and the rest.
        layer: the parameters of a layer; their names there follow ``decoder.layers.<n>.``, and ``{layer}``
            in their sources stands for its number.
        embedding, final_norm, head: transformers' names of what is outside of the layers.
    """

    transformer: Mapping[str, Any]
    vocab_size: int
    max_positions: int
    tied: bool
    rope: Mapping[str, Any]
    layer: Sequence[Weight]
    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"

    @property
    def layers(self) -> int:
        """Number of layers."""
        return int(self.transformer["num_layers"])


Family = Callable[[Any], ModelMap]

families: Registry[Family] = Registry(
    "rollcast.megatron_models", is_callable(1), description="how models of transformers are stored in megatron-core"
)


def find_map(config: Any) -> ModelMap:
    """The map of a model by its transformers config.

    Raises:
        ConfigError: there is none for its ``model_type``, naming those that exist; or the model has
            something that its family's map does not know.
    """
    kind = config.model_type
    try:
        family = families.get(kind, requested_by="model.path (model_type in its config.json)")
    except PluginNotFoundError as error:
        raise ConfigError(
            f"the megatron engine has no map for the model type {kind!r} in rollcast.megatron_models, which holds "
            f"{', '.join(families.names())}; use engine=fsdp, or write a map: docs/engine-megatron.md"
        ) from error
    return family(config)
