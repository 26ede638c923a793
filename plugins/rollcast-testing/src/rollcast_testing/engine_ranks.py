"""Conformance tests of an engine on several ranks; part of ``EngineSuite``."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from torch import Tensor

from rollcast.contracts.engine import (
    BaseEngine,
    EngineSetup,
    ForwardSettings,
    ModelConfig,
    ModelType,
    TrainOutput,
)
from rollcast.contracts.weights import checkpoint_tensors
from rollcast.contracts.worker import WorkerContext
from rollcast.errors import CheckpointError, ConfigError
from rollcast.protocol import DataProto
from rollcast_testing.checks import require
from rollcast_testing.engine_routing import record_and_replay
from rollcast_testing.engine_tools import OPTIM, infer, require_equal, require_mixture, train, weights
from rollcast_testing.ranks import shared_ranks
from rollcast_testing.tiny import (
    distance_loss,
    nan_loss,
    nll_loss,
    padded_batch,
    plain_log_probs,
    plain_model,
    plain_training,
    plain_weights,
    random_batch,
    tiny_model_folder,
    trajectory_batch,
)

__all__ = ["Layout", "RankLaws", "Seen", "train_on_a_rank"]

_ROWS, _STEPS = 7, 3
#: Share of the trained weights in those of ``Seen.mixed``.
_SHARE = 0.25
_OPTIM = replace(OPTIM, lr_warmup_steps=4)
_SETTINGS = ForwardSettings(micro_batch_size_per_gpu=2, temperature=1.0, calculate_entropy=True)


@dataclass(frozen=True)
class Layout:
    """A layout of an engine.

    Attributes:
        ranks: number of ranks.
        keys: keys of ``actor.engine`` that the layout needs.
        layers: number of layers of the model; 0 for that of the suite's.
    """

    ranks: int
    keys: Mapping[str, Any] = field(default_factory=dict)
    layers: int = 0


@dataclass(frozen=True)
class Seen:
    """The observations of one rank.

    Attributes:
        data_parallel: data-parallel rank and size.
        is_source: True if the rank's outputs are collected.
        loaded: weights after loading a checkpoint written by a single rank.
        outputs: inference outputs for this rank's rows, ``log_probs`` and ``entropy`` ``[b, T]``.
        steps: training steps after loading.
        skipped: a step whose loss is NaN, which must not change the weights.
        refused: error message for a row that exceeds the token budget; empty if the engine has no token budget.
        unwritten: error message of an export to the path of a file; empty if there was no error.
        gaps: metrics of a batch of trajectories with gaps, before training.
        routing: choices and log-probs of a mixture of experts for this rank's trajectories, before training.
        trained: weights after training.
        mixed: weights of an untrained engine after they were mixed with those of the trained one.
        critic: training steps of a value model on the same ranks.
    """

    data_parallel: tuple[int, int]
    is_source: bool
    loaded: dict[str, Tensor]
    outputs: dict[str, Tensor]
    steps: list[TrainOutput]
    skipped: TrainOutput
    refused: str
    unwritten: str
    gaps: Mapping[str, float]
    routing: dict[str, Tensor]
    trained: dict[str, Tensor]
    mixed: dict[str, Tensor]
    critic: list[TrainOutput]


def _share(data: DataProto, rank: int, size: int, step: int) -> DataProto:
    """Return a rank's rows: equally many, fewer or none, depending on the step."""
    rows = len(data)
    if step % 3 == 1:  # the first rank has none
        bounds = [0, *(rows * place // max(size - 1, 1) for place in range(size))] if size > 1 else [0, rows]
    else:
        bounds = [rows * place // size for place in range(size + 1)]
    return data.select_idxs(list(range(bounds[rank], bounds[rank + 1])))


def _trajectories() -> DataProto:
    return trajectory_batch(_ROWS, seed=6).select(["prompts", "responses", "response_mask"])


def _build(
    engine_class: type[BaseEngine],
    keys: Mapping[str, Any],
    folder: Path,
    context: WorkerContext,
    model_type: ModelType = "language_model",
) -> BaseEngine:
    config = engine_class.config_schema(**copy.deepcopy(dict(keys)))
    engine = engine_class(EngineSetup(model_type, ModelConfig(path=str(folder)), config, _OPTIM, context))
    engine.initialize()
    return engine


def train_on_a_rank(
    context: WorkerContext,
    engine_class: type[BaseEngine],
    keys: Mapping[str, Any],
    folder: Path,
    before: Path,
    after: Path,
    blocked: Path,
    experts: int = 0,
) -> Seen:
    """Collect all observations of one rank with a single engine, because starting engines is slow.

    Args:
        context: place of this rank.
        engine_class, keys: engine under test, and its keys.
        folder: folder of the model.
        before: path of a checkpoint of a single rank to start from.
        after: path of the checkpoint to write at the end.
        blocked: path of a file, so that an export to this path fails.
        experts: number of experts of the model; 0 for a dense model.
    """
    engine = _build(engine_class, keys, folder, context)
    place = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    engine.load_checkpoint(before)
    loaded = weights(engine)
    rows = [_share(random_batch(_ROWS, 6, 9, seed=step), *place, step) for step in range(_STEPS)]
    outputs = infer(engine, rows[0], _SETTINGS)
    with engine.eval_mode():
        _, gaps = engine.infer_batch(_share(_trajectories(), *place, 0), _SETTINGS, nll_loss)
    replays = experts and engine.capabilities.routing_replay
    routing = record_and_replay(engine, _share(_trajectories(), *place, 0), experts) if replays else {}
    steps = []
    for step in range(1, _STEPS):
        steps.append(train(engine, rows[step], _SETTINGS))
        engine.lr_scheduler_step()
    trained = weights(engine)
    skipped = train(engine, rows[0], _SETTINGS, nan_loss)
    require_equal(weights(engine), trained, "weights after a skipped step")
    refused = unwritten = ""
    if engine.capabilities.token_budget:
        try:
            infer(engine, rows[0], ForwardSettings(max_token_len_per_gpu=2))
        except ConfigError as error:
            refused = str(error)
    try:
        engine.export(blocked)
    except CheckpointError as error:
        unwritten = str(error)
    engine.save_checkpoint(after)
    mixed = {}
    if engine.capabilities.weight_mixing:
        other = _build(engine_class, keys, folder, context)
        other.mix_weights(engine, _SHARE)
        mixed = weights(other)
    critic = []
    if engine.capabilities.value_model:
        judge = _build(engine_class, keys, folder, context, "value_model")
        critic = [train(judge, rows[step], _SETTINGS, distance_loss) for step in range(2)]
    named = {name: outputs[name] for name in ("log_probs", "entropy")}
    source = engine.is_mp_src_rank_with_outputs()
    return Seen(place, source, loaded, named, steps, skipped, refused, unwritten, gaps, routing, trained, mixed, critic)


class RankLaws:
    """Base class of :class:`rollcast_testing.EngineSuite`, whose fixtures it uses."""

    layouts: ClassVar[Mapping[str, Layout]]
    engine_config: ClassVar[Mapping[str, Any]]
    model_options: ClassVar[Mapping[str, Any]]
    rtol: ClassVar[float]

    if TYPE_CHECKING:

        def _close(self, actual: Tensor, expected: Tensor, what: str, atol: float | None = None) -> None: ...

        def _same_weights(self, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None: ...

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Generate one test per layout."""
        if "layout" in metafunc.fixturenames:
            metafunc.parametrize("layout", list(self.layouts.values()), ids=list(self.layouts))

    def test_ranks_train_as_one(self, layout: Layout, engine_class: type[BaseEngine], tmp_path: Path) -> None:
        """Check that all ranks agree with plain torch, and that checkpoints load on one rank and on many."""
        options = {**self.model_options, **({"layers": layout.layers} if layout.layers else {})}
        folder = tiny_model_folder(tmp_path / "spread", hidden=64, tied=layout.ranks % 4 != 0, **options)
        before, after, blocked = (tmp_path / name for name in ("before", "after", "blocked"))
        blocked.write_text("a file, not a folder")
        alone = _build(engine_class, self.engine_config, folder, WorkerContext())
        batches = [random_batch(_ROWS, 6, 9, seed=step) for step in range(_STEPS)]
        train(alone, batches[0], _SETTINGS)
        alone.lr_scheduler_step()
        alone.save_checkpoint(before)
        ranks = shared_ranks().run(
            train_on_a_rank,
            world_size=layout.ranks,
            engine_class=engine_class,
            keys={**self.engine_config, **layout.keys},
            folder=folder,
            before=before,
            after=after,
            blocked=blocked,
            experts=int(self.model_options.get("experts", 0)),
        )
        self._check_outputs(ranks, alone, batches[0])
        module = plain_model(folder)
        plain = plain_training(module, batches, _OPTIM)
        for seen in ranks:
            require_equal(seen.loaded, weights(alone), "weights of one rank's checkpoint")
            for step, (loss, norm, rate) in zip(seen.steps, plain[1:], strict=True):
                require(step.grad_norm == pytest.approx(norm, rel=self.rtol), f"{step} has the gradient norm {norm}")
                require(step.metrics["nll"] == pytest.approx(loss, rel=self.rtol), f"{step} has the loss {loss}")
                require(step.lr == pytest.approx(rate), f"{step} has the rate {rate}")
            require(seen.skipped.skipped, "a loss that is not a number is skipped on every rank")
            require(not math.isfinite(seen.skipped.grad_norm), "a skipped step's norm is not finite")
            if alone.capabilities.token_budget:
                require("max_token_len_per_gpu" in seen.refused, "a row over the budget is refused on every rank")
            require(str(blocked) in seen.unwritten, "an export that cannot be written fails on every rank")
            self._same_weights(seen.trained, plain_weights(module))
            if alone.capabilities.weight_mixing:
                require_mixture(seen.mixed, plain_weights(plain_model(folder)), seen.trained, _SHARE)
        self._check_critic(ranks, engine_class, folder)
        again = _build(engine_class, self.engine_config, folder, WorkerContext())
        again.load_checkpoint(after)
        require_equal(weights(again), ranks[0].trained, "weights of the ranks' checkpoint on one")

    def _check_outputs(self, ranks: list[Seen], alone: BaseEngine, batch: DataProto) -> None:
        size = ranks[0].data_parallel[1]
        sources = [seen for seen in ranks if seen.is_source]
        places = [seen.data_parallel for seen in sources]
        require(sorted(places) == [(rank, size) for rank in range(size)], f"each shard has one source: {places}")
        module = plain_model(Path(alone.setup.model.path))
        with torch.no_grad():
            for name, parameter in checkpoint_tensors(module, dict(module.named_parameters())).items():
                parameter.copy_(ranks[0].loaded[name])
            expected = plain_log_probs(module, batch)
        ordered = sorted(sources, key=lambda seen: seen.data_parallel)
        if ranks[0].routing:
            routing = record_and_replay(alone, _trajectories(), int(self.model_options["experts"]))
            whole = {name: torch.cat([seen.routing[name] for seen in ordered]) for name in routing}
            require(
                torch.equal(whole["routed_experts"].sort(-1).values, routing["routed_experts"].sort(-1).values),
                "the ranks choose one rank's experts",
            )
            for name in ("log_probs", "replayed"):
                self._close(whole[name], routing[name], f"{name} of a mixture's ranks")
        padded = padded_batch(_trajectories())
        with torch.no_grad():
            loss = -float(plain_log_probs(module, padded)[0].sum() / padded["response_mask"].sum())
        for seen in ranks:
            require(
                seen.gaps["nll"] == pytest.approx(loss, rel=1e-6), f"{seen.gaps} of trajectories, whose loss is {loss}"
            )
        for name, values in zip(("log_probs", "entropy"), expected, strict=True):
            self._close(torch.cat([seen.outputs[name] for seen in ordered]), values, f"{name} of all ranks")

    def _check_critic(self, ranks: list[Seen], engine_class: type[BaseEngine], folder: Path) -> None:
        if not ranks[0].critic:
            return
        judge = _build(engine_class, self.engine_config, folder, WorkerContext(), "value_model")
        steps = [train(judge, random_batch(_ROWS, 6, 9, seed=step), _SETTINGS, distance_loss) for step in range(2)]
        for seen in ranks:
            for actual, expected in zip(seen.critic, steps, strict=True):
                norm = pytest.approx(expected.grad_norm, rel=self.rtol)
                require(actual.grad_norm == norm, f"a value model's gradient norm: {actual}, {expected}")
                require(actual.metrics == pytest.approx(dict(expected.metrics), rel=self.rtol), f"{actual}, {expected}")
