"""Routing of tokens to experts: choice, replay, balance and load of the routers of a model.

Engines pass their routers' logits to a :class:`RouterTape`, so that a mixture of experts behaves alike on all of them.
Axes: ``n`` tokens as a layer sees them on this rank, ``b`` rows, ``L`` layers with experts, ``E`` experts, ``k``
experts of a token.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rollcast.contracts.rollout import ROUTED_EXPERTS
from rollcast.errors import CapabilityError, ColumnError
from rollcast.protocol import Jagged
from rollcast_engine._rows import RaggedRows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from rollcast.contracts.engine import ForwardSettings
    from rollcast.protocol import DataProto
    from rollcast_engine._rows import MicroBatch, Rows

__all__ = [
    "RoutedTokens",
    "RouterLoad",
    "RouterTape",
    "RoutingRecord",
    "RoutingRule",
    "check_replay",
    "routed_tokens",
    "start_record",
]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RoutingRule:
    """Rule by which a router chooses a token's experts and weighs them.

    Attributes:
        experts, top_k: number of experts, and of those that a token visits.
        normalize: True if the weights of a token's experts add up to ``factor``.
        sigmoid: True if each expert has a score of its own (DeepSeek-V3, arXiv:2412.19437, section 2.1.2); False for a
            softmax over all.
        groups, top_groups: experts are chosen from the ``top_groups`` of ``groups`` equal groups with the largest sums
            of their two best scores; 1 and 1 to choose from all.
        factor: factor of the weights.
    """

    experts: int
    top_k: int
    normalize: bool
    sigmoid: bool = False
    groups: int = 1
    top_groups: int = 1
    factor: float = 1.0

    def scores(self, logits: Tensor) -> Tensor:
        """Return the experts' scores, float32 ``[n, E]``, for a router's logits."""
        return logits.float().sigmoid() if self.sigmoid else torch.softmax(logits, dim=-1, dtype=torch.float32)

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return scores as a distribution over the experts."""
        return scores / scores.sum(-1, keepdim=True) if self.sigmoid else scores

    def choose(self, scores: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the chosen experts, int64 ``[n, k]``; ``bias`` ``[E]`` is added to the scores for the choice alone."""
        ranking = scores if bias is None else scores + bias
        if self.top_groups < self.groups:
            grouped = ranking.view(len(ranking), self.groups, -1)
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.top_groups, dim=-1).indices
            allowed = torch.zeros_like(grouped[:, :, 0], dtype=torch.bool).scatter(1, best, True)
            ranking = grouped.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(1)
        return torch.topk(ranking, self.top_k, dim=-1).indices

    def weigh(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Return the weights of chosen experts, float32 ``[n, k]``."""
        weights = scores.gather(1, chosen)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if self.sigmoid else 0.0))
        return weights * self.factor if self.factor != 1.0 else weights


@dataclass(frozen=True)
class RoutedTokens:
    """The tokens of a micro-batch in the order in which a layer sees them on this rank.

    A row's last token predicts nothing, so it counts neither for the load nor for the balance.

    Attributes:
        rows: int64 ``[n]``, row of each token in the micro-batch.
        places: int64 ``[n]``, number of each token among those of its row.
        counted: bool ``[n]``, True for tokens that are there and predict a token.
        lengths: float32 ``[b]``, counted tokens of each row on all ranks that share the rows.
        shares: float32 ``[b]``, share of each row in the mini-batch's balance loss.
        recorded: int16 ``[n, L, k]``, experts to choose; -1 where the router chooses. None if it always chooses.
    """

    rows: Tensor
    places: Tensor
    counted: Tensor
    lengths: Tensor
    shares: Tensor
    recorded: Tensor | None


def routed_tokens(micro: MicroBatch, rows: Tensor, places: Tensor, sequences: float) -> RoutedTokens:
    """Return the tokens of a micro-batch.

    Args:
        micro: the micro-batch, on the device of the model.
        rows: int64 ``[n]``, row of each token.
        places: int64 ``[n]``, number of each token among those of its row; -1 for padding.
        sequences: rows of the mini-batch with a trained token.
    """
    present = (micro.model_inputs["attention_mask"] > 0).sum(1)
    lengths = (present - 1).clamp(min=1)
    counted = (places >= 0) & (places < present[rows] - 1)
    trained = (micro.response_mask > 0).any(1)
    if micro.is_dummy:
        counted = torch.zeros_like(counted)
    recorded = micro.columns.get(ROUTED_EXPERTS)
    if recorded is not None:
        chosen = recorded[rows, places.clamp(min=0, max=recorded.size(1) - 1)]
        recorded = chosen.where((places >= 0).view(-1, 1, 1), -1)
    return RoutedTokens(rows, places, counted, lengths.float(), trained.float() / sequences, recorded)


class _AddLoss(torch.autograd.Function):
    """Identity that adds the gradient of a loss; it works in recomputed layers and in any stage of a pipeline."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(loss)
        ctx.scale = scale
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (loss,) = ctx.saved_tensors
        return gradients[0], torch.full_like(loss, ctx.scale), None


@dataclass
class RouterLoad:
    """Load of the experts, summed over micro-batches; kept on the device until :meth:`metrics`.

    Attributes:
        chosen: float64 ``[L, E]``, choices of each expert.
        probabilities: float64 ``[L, E]``, sums of the routers' probabilities.
        balance: float64 ``[L]``, balance loss of each layer, before its coefficient.
        shares: float64 ``[L]``, shares in the mini-batch's loss of the rows that ``balance`` is summed over.
    """

    chosen: Tensor
    probabilities: Tensor
    balance: Tensor
    shares: Tensor

    def metrics(self, groups: Sequence[Any], prefix: str) -> dict[str, float]:
        """Return the metrics over all ranks, equal on every rank; empty if no token was routed.

        ``max_violation`` and ``mean_violation`` are the largest and the mean distance of an expert's load from an even
        one, relative to it; ``entropy`` is that of the routers' mean distribution in nats; ``aux_loss`` is the mean
        balance loss of a row. Each is a mean over layers.

        Args:
            groups: process groups along which ranks saw other tokens or other layers; rows of layers that a rank does
                not have are zero.
            prefix: start of the metrics' names.
        """
        table = torch.cat([self.chosen, self.probabilities, torch.stack([self.balance, self.shares], 1)], 1)
        for group in groups:
            dist.all_reduce(table, group=group)
        experts = self.chosen.size(1)
        chosen, sums, balance, shares = torch.split(table.cpu(), [experts, experts, 1, 1], 1)
        if float(chosen.sum()) == 0:
            return {}
        violation = chosen / chosen.mean(1, keepdim=True) - 1.0
        mean = sums / sums.sum(1, keepdim=True)
        routes = {
            "max_violation": violation.amax(1),
            "mean_violation": violation.abs().mean(1),
            "entropy": -(mean * mean.clamp(min=1e-30).log()).sum(1),
            "aux_loss": (balance / shares.clamp(min=1e-30)).squeeze(1),
        }
        return {f"{prefix}router/{name}": float(values.mean()) for name, values in routes.items()}


@dataclass
class _Pass:
    """One micro-batch: its tokens, the settings of its pass, and each layer's choices and even shares."""

    tokens: RoutedTokens
    scale: float | None
    chosen: dict[int, Tensor] = field(default_factory=dict)
    evenness: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class RouterTape:
    """The routers of a model during the passes of an engine.

    Example::

        with tape.batch(device):
            with tape.forward(tokens, scale):      # each layer calls tape.choose
                loss = ...
            loss.backward()                        # layers that recompute call it again
        metrics = tape.load.metrics(groups, "actor/")

    Attributes:
        layers: number of layers with experts.
        rule: rule of the routers.
        coefficient: coefficient of the balance loss.
        group: process group of the ranks that share rows; None if each has whole rows.
        keeps: True if several micro-batches are between forward and backward, which a pipeline runs in order.
        load: load of the last batch.
        problem: why the tape does not know the routers' rule, and does nothing; empty if it does.
    """

    layers: int
    rule: RoutingRule
    coefficient: float = 0.0
    group: Any = None
    keeps: bool = False
    load: RouterLoad | None = None
    problem: str = ""
    _current: _Pass | None = None
    _last: _Pass | None = None
    #: Passes of each layer: the chunks of an interleaved pipeline are at different micro-batches.
    _passes: dict[int, list[_Pass]] = field(default_factory=dict)
    #: Micro-batches that each layer has recomputed.
    _again: dict[int, int] = field(default_factory=dict)

    @property
    def is_active(self) -> bool:
        """True within a batch, from its first micro-batch."""
        return self._last is not None

    @contextmanager
    def batch(self, device: torch.device) -> Iterator[None]:
        """Route the micro-batches of a batch, and count their load from zero."""
        shape = (self.layers, self.rule.experts)
        chosen, probabilities = (torch.zeros(shape, dtype=torch.float64, device=device) for _ in range(2))
        self.load = RouterLoad(chosen, probabilities, *(chosen.new_zeros(self.layers) for _ in range(2)))
        try:
            yield
        finally:
            self._last, self._passes, self._again = None, {}, {}

    @contextmanager
    def forward(self, tokens: RoutedTokens, scale: float | None) -> Iterator[None]:
        """Route the tokens of a micro-batch in a forward pass.

        Args:
            tokens: tokens of the micro-batch.
            scale: factor of losses in the backward pass; None if there is none, and so no balance loss.
        """
        self._current = self._last = _Pass(tokens, scale)
        if not self.keeps:
            self._passes, self._again = {}, {}
        try:
            yield
        finally:
            self._current = None

    def refuse(self, problem: str) -> None:
        """Do nothing from now on, because of a problem with the routers.

        Raises:
            CapabilityError: a balance loss or recorded choices need the tape.
        """
        self.problem = problem
        if self.coefficient or (self._last is not None and self._last.tokens.recorded is not None):
            raise CapabilityError(
                f"{problem}, which router_aux_loss_coef and recorded choices ({ROUTED_EXPERTS}) need; set "
                "router_aux_loss_coef=0 and actor.router_replay.mode=disabled"
            )
        log.warning("%s: the load of its experts is not measured", problem)

    def choose(
        self, layer: int, logits: Tensor, bias: Tensor | None = None, own: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return weights and numbers of each token's experts, ``[n, k]``.

        Args:
            layer: number of the layer among those with experts.
            logits: logits of the layer's router, ``[n, E]``.
            bias: ``[E]``, added to the scores for the choice alone.
            own: weights and choice of the router itself, which stand unless others are recorded; None to compute them.
        """
        scores = self.rule.scores(logits)
        run = self._pass_of(layer)
        recorded = None if run is None or run.tokens.recorded is None else run.tokens.recorded[:, layer].long()
        weights, chosen = own or (None, self.rule.choose(scores, bias))
        if recorded is not None:
            weights, chosen = None, recorded.where(recorded >= 0, chosen)
        if weights is None:
            weights = self.rule.weigh(scores, chosen)
        if run is not None:
            probabilities = self.rule.probabilities(scores)
            if layer not in run.chosen:
                self._note(layer, run, probabilities.detach(), chosen)
            if run.scale is not None and self.coefficient:
                loss = _balance(run, layer, probabilities)
                weights = _AddLoss.apply(weights, self.coefficient * loss, run.scale)  # type: ignore[no-untyped-call]
        return weights.to(logits.dtype if own is None else own[0].dtype), chosen

    def _pass_of(self, layer: int) -> _Pass | None:
        if self._last is None:
            return None
        passes = self._passes.setdefault(layer, [])
        if self._current is not None:
            passes.append(self._current)
            return self._current
        # A layer recomputes its forward passes in their order.
        number = self._again.get(layer, 0)
        self._again[layer] = number + 1
        return passes[number]

    def _note(self, layer: int, run: _Pass, probabilities: Tensor, chosen: Tensor) -> None:
        """Count a layer's load, once for a micro-batch."""
        tokens, counted = run.tokens, run.tokens.counted.unsqueeze(1)
        choices = torch.zeros_like(probabilities).scatter(1, chosen, 1.0) * counted
        shares = probabilities.new_zeros((len(tokens.lengths), self.rule.experts)).index_add_(0, tokens.rows, choices)
        if self.group is not None:
            dist.all_reduce(shares, group=self.group)
        scale = self.rule.experts / (self.rule.top_k * tokens.lengths**2) * tokens.shares
        run.chosen[layer], run.evenness[layer] = chosen, shares * scale.unsqueeze(1)
        if self.load is not None:
            self.load.chosen[layer] += choices.sum(0)
            self.load.probabilities[layer] += (probabilities * counted).sum(0)
            self.load.balance[layer] += _balance(run, layer, probabilities)
            self.load.shares[layer] += ((tokens.shares / tokens.lengths)[tokens.rows] * tokens.counted).sum()

    def record(self, micro: MicroBatch, record: RoutingRecord) -> None:
        """Write the choices of the last micro-batch, ``micro``, to a record of its batch.

        Raises:
            CapabilityError: the routers' rule is unknown.
        """
        if self.problem:
            raise CapabilityError(f"record_routing (actor.router_replay.mode=R2): {self.problem}")
        if self._last is not None:
            record.write(micro.rows, self._last.tokens, self._last.chosen)


class RoutingRecord:
    """The choices of each layer for each token of a jagged batch, as they become the column ``routed_experts``.

    Args:
        source: the rank's rows.
        tape: routers of the model.
        device: device of the model.

    Raises:
        ColumnError: the rows are padded.
    """

    def __init__(self, source: Rows, tape: RouterTape, device: torch.device) -> None:
        if not isinstance(source, RaggedRows):
            raise ColumnError(f"the column {ROUTED_EXPERTS} can be recorded for jagged batches only")
        self._lengths = source.tokens
        starts = torch.nn.functional.pad(source.tokens.cumsum(0), (1, 0))
        self._starts = starts.to(device)
        shape = (int(starts[-1]), tape.layers, tape.rule.top_k)
        # int32, because NCCL has no int16. The last row takes what does not count, because choosing the others by a
        # mask would wait for the device in each layer.
        self._chosen = torch.full((shape[0] + 1, *shape[1:]), -1, dtype=torch.int32, device=device)

    def write(self, rows: Tensor, tokens: RoutedTokens, chosen: Mapping[int, Tensor]) -> None:
        """Write the choices ``[n, k]`` of the layers that this rank has, for tokens of the batch's ``rows``."""
        if not len(rows):
            return  # a dummy
        starts = self._starts[rows.to(self._starts.device)][tokens.rows]
        places = (starts + tokens.places).where(tokens.counted, len(self._chosen) - 1)
        for layer, experts in chosen.items():
            self._chosen[places, layer] = experts.int()

    def column(self, groups: Sequence[Any]) -> Tensor:
        """Return the column, in host memory.

        Args:
            groups: process groups along which ranks have other tokens of the same rows, or other layers.
        """
        for group in groups:
            dist.all_reduce(self._chosen, op=dist.ReduceOp.MAX, group=group)
        return Jagged.from_lengths(self._chosen[:-1].to("cpu", torch.int16), self._lengths).column()


def start_record(
    settings: ForwardSettings, source: Rows, tape: RouterTape | None, device: torch.device
) -> RoutingRecord | None:
    """Return the record of a pass's choices; None if ``settings`` do not request it.

    Raises:
        CapabilityError: the model has no routers whose choices can be recorded.
        ColumnError: the rows are padded.
    """
    if not settings.record_routing:
        return None
    if tape is None:
        raise CapabilityError(
            "record_routing (actor.router_replay.mode=R2) needs a mixture of experts such as Qwen3-MoE, but the model "
            "has no routers that the engine knows"
        )
    return RoutingRecord(source, tape, device)


def check_replay(data: DataProto, tape: RouterTape | None) -> None:
    """Check that recorded choices in a batch can be replayed.

    Raises:
        CapabilityError: they cannot; the message says why.
        ColumnError: the rows are padded, or have tokens without a choice.
    """
    if ROUTED_EXPERTS not in data:
        return
    if tape is None:
        raise CapabilityError(
            f"the batch has the column {ROUTED_EXPERTS}, but the model has no routers whose choices can be replayed"
        )
    columns = [data[name] for name in (ROUTED_EXPERTS, "prompts", "responses")]
    if not all(column.is_nested for column in columns):
        raise ColumnError(f"the column {ROUTED_EXPERTS} needs a jagged batch")
    shape = tuple(columns[0].shape[2:])
    if shape != (tape.layers, tape.rule.top_k):
        raise CapabilityError(
            f"the column {ROUTED_EXPERTS} is for {shape} layers and experts of a token, but the model has "
            f"{(tape.layers, tape.rule.top_k)}"
        )
    choices, prompts, responses = (Jagged.of(column).lengths for column in columns)
    if (choices < prompts + responses).any():
        row = int((choices < prompts + responses).nonzero()[0])
        raise ColumnError(
            f"the column {ROUTED_EXPERTS} has {int(choices[row])} choices for row {row}, which has "
            f"{int(prompts[row] + responses[row])} prompt and response tokens"
        )


def _balance(run: _Pass, layer: int, probabilities: Tensor) -> Tensor:
    """Return this rank's part of a layer's balance loss.

    The loss of a row is ``E * sum(f * p)`` with the experts' shares of its choices, ``f``, and their mean
    probabilities, ``p``: 1 if both are even. A loss by rows does not depend on the split into micro-batches.
    """
    return (run.evenness[layer][run.tokens.rows] * probabilities * run.tokens.counted.unsqueeze(1)).sum()
