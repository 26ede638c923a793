"""Conformance tests of an engine's mixtures of experts; part of ``EngineSuite``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from torch import Tensor

from rollcast.contracts.engine import BaseEngine, ForwardSettings, OptimConfig
from rollcast.errors import CapabilityError, ColumnError
from rollcast.protocol import DataProto, Jagged
from rollcast_testing import tiny
from rollcast_testing.checks import require
from rollcast_testing.engine_tools import infer, train

__all__ = ["RoutingLaws", "other_choices", "record_and_replay"]

Build = Callable[..., BaseEngine]
_COEFFICIENT = 0.3
_RECORDING = ForwardSettings(record_routing=True, micro_batch_size_per_gpu=2)


def other_choices(batch: DataProto, choices: Tensor, experts: int) -> DataProto:
    """Return the batch with recorded choices, each moved to the next expert."""
    recorded = Jagged.of(choices)
    moved = torch.where(recorded.values >= 0, (recorded.values + 1) % experts, recorded.values)
    return batch.with_columns({"routed_experts": recorded.like(moved.to(torch.int16))})


def record_and_replay(engine: BaseEngine, batch: DataProto, experts: int) -> dict[str, Tensor]:
    """Return the choices for a jagged batch, its log-probs, and those with other choices, without padding."""
    output = infer(engine, batch, _RECORDING)
    changed = other_choices(batch, output["routed_experts"], experts)
    again = infer(engine, changed, ForwardSettings(micro_batch_size_per_gpu=3))
    return {
        "routed_experts": Jagged.of(output["routed_experts"]).values,
        "log_probs": Jagged.of(output["log_probs"]).values,
        "replayed": Jagged.of(again["log_probs"]).values,
    }


class RoutingLaws:
    """Base class of :class:`rollcast_testing.EngineSuite`, for ``model_options`` with experts."""

    model_options: ClassVar[Mapping[str, Any]]
    engine_config: ClassVar[Mapping[str, Any]]
    packing_config: ClassVar[Mapping[str, Any]]
    rtol: ClassVar[float]

    if TYPE_CHECKING:

        def _close(self, actual: Tensor, expected: Tensor, what: str, atol: float | None = None) -> None: ...

    @pytest.fixture
    def experts(self, engine_class: type[BaseEngine]) -> int:
        """Return the number of experts of the tests' models; skip the test if there are none, or no replay."""
        experts = int(self.model_options.get("experts", 0))
        if not experts:
            pytest.skip("the suite's models have no experts")
        if not engine_class.capabilities.routing_replay:
            pytest.skip("the engine neither records nor replays the choices of routers")
        return experts

    def test_recorded_choices_are_replayed(self, build: Build, folder: Path, batch: DataProto, experts: int) -> None:
        """Check choices and log-probs by plain transformers, whose routers are made to choose other experts."""
        jagged, module = tiny.jagged_batch(batch), tiny.plain_model(folder)
        for keys in (self.engine_config, {**self.engine_config, **self.packing_config}):
            output = infer(build(keys=keys), jagged, _RECORDING)
            choices = Jagged.of(output["routed_experts"])
            lengths = Jagged.of(jagged["prompts"]).lengths + Jagged.of(jagged["responses"]).lengths
            require(torch.equal(choices.lengths, lengths), "there is a choice for each prompt and response token")
            require(choices.values.dtype == torch.int16, f"choices are int16, not {choices.values.dtype}")
            with _routers(module) as routers:
                plain = tiny.plain_log_probs(module, batch)[0].detach()
            present = batch["attention_mask"][:, -batch["responses"].size(1) :]
            self._close(Jagged.of(output["log_probs"]).values, Jagged.from_padded(plain, present).values, "log_probs")
            for row, own in enumerate(torch.tensor_split(choices.values, choices.offsets[1:-1])):
                require(bool((own[-1] == -1).all()), "a row's last token has no choice")
                seen = torch.stack([chosen[row] for chosen in routers.chosen], 1)[: len(own) - 1]
                same = torch.equal(own[:-1].long().sort(-1).values, seen.sort(-1).values)
                require(same, f"choices of row {row} are those of transformers")
            changed = other_choices(jagged, output["routed_experts"], experts)
            moved = Jagged.of(changed["routed_experts"])
            with _routers(module, list(torch.tensor_split(moved.values.long(), moved.offsets[1:-1]))):
                expected = tiny.plain_log_probs(module, batch)[0].detach()
            require(float((expected - plain).abs().max()) > 1e-4, "other experts have other log-probs")
            replayed = infer(build(keys=keys), changed, ForwardSettings(micro_batch_size_per_gpu=3))["log_probs"]
            self._close(Jagged.of(replayed).values, Jagged.from_padded(expected, present).values, "replayed log_probs")

    def test_choices_of_another_model_are_refused(self, build: Build, batch: DataProto, experts: int) -> None:
        jagged = tiny.jagged_batch(batch)
        output = infer(build(), jagged, _RECORDING)
        recorded = Jagged.of(output["routed_experts"])
        wide = jagged.with_columns({"routed_experts": recorded.like(recorded.values.repeat(1, 2, 1))})
        engine = build()
        with pytest.raises(CapabilityError, match="routed_experts"):
            infer(engine, wide, ForwardSettings())
        fewer = Jagged.from_lengths(recorded.values[1:], recorded.lengths - torch.eye(len(recorded.lengths))[0].long())
        for incomplete, reason in ((fewer.column(), "choices for row 0"), (torch.zeros(len(jagged), 99), "jagged")):
            with pytest.raises(ColumnError, match=f"routed_experts.*{reason}"):
                infer(engine, jagged.with_columns({"routed_experts": incomplete}), ForwardSettings())

    def test_the_balance_loss_is_that_of_plain_torch(
        self, build: Build, folder: Path, batch: DataProto, experts: int
    ) -> None:
        """Check that gradient and metrics do not depend on packing and micro-batches."""
        module = tiny.plain_model(folder)
        with _routers(module) as routers:
            log_probs, _ = tiny.plain_log_probs(module, batch)
        balance = routers.balance(experts)
        loss = -log_probs.sum() / batch["response_mask"].sum() + _COEFFICIENT * balance
        norm = float(torch.stack([g.norm() for g in torch.autograd.grad(loss, list(module.parameters()))]).norm())
        load = routers.load(experts)
        optim = OptimConfig(lr=1e-3, clip_grad=math.inf)
        for packing in ({}, self.packing_config):
            for size in (None, 2):
                keys = {**self.engine_config, **packing, "router_aux_loss_coef": _COEFFICIENT}
                step = train(build(optim=optim, keys=keys), batch, ForwardSettings(micro_batch_size_per_gpu=size))
                require(step.grad_norm == pytest.approx(norm, rel=self.rtol), f"{step} has the norm {norm}")
                metrics = {name.rpartition("/")[2]: value for name, value in step.metrics.items() if "/router/" in name}
                require(metrics == pytest.approx(load, rel=1e-5), f"{metrics} is the load {load}")


class _Routers:
    """Probabilities and choices of plain transformers' routers, by layer and row."""

    def __init__(self) -> None:
        self.probabilities: list[list[Tensor]] = []
        self.chosen: list[list[Tensor]] = []

    def balance(self, experts: int) -> Tensor:
        """Return the balance loss, summed over layers and averaged over rows."""
        layers = zip(self.probabilities, self.chosen, strict=True)
        return torch.stack([_balance(rows, chosen, experts) for rows, chosen in layers]).sum()

    def load(self, experts: int) -> dict[str, float]:
        """Return the metrics of the load."""
        metrics: dict[str, list[float]] = {}
        for rows, choices in zip(self.probabilities, self.chosen, strict=True):
            counts = torch.bincount(
                torch.cat([choice[:-1].flatten() for choice in choices]), minlength=experts
            ).double()
            mean = torch.cat([sample[:-1] for sample in rows]).double().mean(0)
            violation = counts / counts.mean() - 1
            values = {
                "max_violation": violation.max(),
                "mean_violation": violation.abs().mean(),
                "entropy": -(mean * mean.log()).sum(),
                "aux_loss": _balance(rows, choices, experts),
            }
            for name, value in values.items():
                metrics.setdefault(name, []).append(float(value.detach()))
        return {name: sum(values) / len(values) for name, values in metrics.items()}


def _balance(rows: list[Tensor], choices: list[Tensor], experts: int) -> Tensor:
    losses = []
    for probabilities, chosen in zip(rows, choices, strict=True):
        share = torch.bincount(chosen[:-1].flatten(), minlength=experts) / chosen[:-1].numel()
        losses.append(experts * (share * probabilities[:-1].mean(0)).sum())
    return torch.stack(losses).mean()


@contextmanager
def _routers(module: Any, forced: list[Tensor] | None = None) -> Iterator[_Routers]:
    """Record what the routers of plain transformers choose for each row, or make them choose ``forced``."""
    seen, handles = _Routers(), []
    gates = [layer for name, layer in module.named_modules() if name.endswith("mlp.gate")]

    def hook(layer: int) -> Any:
        seen.probabilities.append([])
        seen.chosen.append([])

        def choose(_gate: Any, _inputs: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            probabilities = output[0].softmax(-1)
            chosen = output[2] if forced is None else forced[len(seen.chosen[layer])][: len(output[2]), layer]
            chosen = torch.where(chosen < 0, output[2], chosen)
            seen.probabilities[layer].append(probabilities)
            seen.chosen[layer].append(chosen)
            weights = probabilities.gather(1, chosen)
            return output[0], weights / weights.sum(1, keepdim=True), chosen

        return choose

    try:
        handles = [gate.register_forward_hook(hook(layer)) for layer, gate in enumerate(gates)]
        yield seen
    finally:
        for handle in handles:
            handle.remove()
