"""The conformance suite of training engines, a class of pytest tests to inherit.

The tests run on a CPU and compare with plain transformers and torch: with one rank in this process, and with as many
ranks in other processes as the suite's layouts have. The extra ``rollcast[testing]`` and transformers must be
installed.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor

from rollcast.contracts.algorithm import Denominators
from rollcast.contracts.engine import (
    BaseEngine,
    EngineSetup,
    ForwardSettings,
    LossInputs,
    LossOutput,
    ModelConfig,
    ModelType,
    OptimConfig,
    engines,
)
from rollcast.contracts.weights import checkpoint_tensors
from rollcast.contracts.worker import WorkerContext
from rollcast.errors import ConfigError
from rollcast.protocol import DataProto, Jagged
from rollcast_testing import tiny
from rollcast_testing.checks import require
from rollcast_testing.engine_ranks import Layout, RankLaws
from rollcast_testing.engine_routing import RoutingLaws
from rollcast_testing.engine_state import StateLaws
from rollcast_testing.engine_tools import ALL_ROWS, OPTIM, infer, require_equal, train, weights
from rollcast_testing.engine_vocabulary import VocabularyLaws
from rollcast_testing.tiny import nll_loss, plain_log_probs, plain_model, plain_training, plain_weights, random_batch

__all__ = ["EngineSuite"]

Build = Callable[..., BaseEngine]


class EngineSuite(StateLaws, RankLaws, VocabularyLaws, RoutingLaws):
    """Conformance tests of one engine.

    Example::

        class TestMyEngine(EngineSuite):
            name = "my_engine"

    The engine must compute in float32 with the configuration given here. Tests of features that the engine's
    ``capabilities`` exclude are skipped.
    """

    #: Name of the engine in ``rollcast.engines``.
    name: ClassVar[str] = ""
    #: Keys of ``actor.engine`` for the tests.
    engine_config: ClassVar[Mapping[str, Any]] = {}
    #: Additional keys that pack rows without padding; empty if the engine does not support packing.
    packing_config: ClassVar[Mapping[str, Any]] = {}
    #: Layouts of the engine over ranks, by a name for messages; see :class:`Layout`.
    layouts: ClassVar[Mapping[str, Layout]] = {}
    #: Arguments of :func:`~rollcast_testing.tiny.tiny_model_folder` for the tests' models, such as ``experts``.
    model_options: ClassVar[Mapping[str, Any]] = {}
    rtol: ClassVar[float] = 1e-5
    #: Absolute tolerance of log-probs, entropy and values.
    atol: ClassVar[float] = 1e-5
    #: Absolute tolerance of weights after up to four steps of size 0.01.
    weights_atol: ClassVar[float] = 2e-6

    @pytest.fixture
    def engine_class(self) -> type[BaseEngine]:
        """Return the engine class under test; by default the plugin :attr:`name`."""
        if not self.name:
            raise NotImplementedError(f"{type(self).__name__} must set `name` or override the fixture `engine_class`")
        return engines.get(self.name, requested_by=f"{type(self).__name__}.name")

    @pytest.fixture(params=[True, False], ids=["tied", "untied"])
    def folder(self, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        """Write a tiny model, with and without tied embeddings."""
        return tiny.tiny_model_folder(tmp_path / "model", hidden=32, tied=request.param, **self.model_options)

    @pytest.fixture
    def build(self, engine_class: type[BaseEngine], folder: Path) -> Build:
        """Return a function that builds an engine: ``build(optim=, path=, keys=, random_init=, seed=, ...)``."""

        def make(
            optim: OptimConfig | None = OPTIM,
            model_type: ModelType = "language_model",
            path: Path = folder,
            keys: Mapping[str, Any] = self.engine_config,
            lora_rank: int = 0,
            random_init: bool = False,
            seed: int = 0,
        ) -> BaseEngine:
            config = engine_class.config_schema(**copy.deepcopy(dict(keys)))
            model = ModelConfig(path=str(path), lora_rank=lora_rank, random_init=random_init)
            setup = EngineSetup(model_type, model, config, optim, WorkerContext(), seed)
            engine = engine_class(setup)
            engine.initialize()
            return engine

        return make

    @pytest.fixture
    def batch(self) -> DataProto:
        """Return seven rows of ragged prompts and responses."""
        return random_batch(7, 6, 9, seed=1)

    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    def test_log_probs_and_entropy(self, build: Build, folder: Path, batch: DataProto, temperature: float) -> None:
        output = infer(build(), batch, ForwardSettings(temperature=temperature, calculate_entropy=True))
        log_probs, entropy = plain_log_probs(plain_model(folder), batch, temperature)
        self._close(output["log_probs"], log_probs.detach(), "log_probs")
        self._close(output["entropy"], entropy.detach(), "entropy")

    def test_a_jagged_batch_gives_the_padded_batch_s_values(self, build: Build, batch: DataProto) -> None:
        engine, settings = build(), ForwardSettings(calculate_entropy=True, micro_batch_size_per_gpu=3)
        padded, output = infer(engine, batch, settings), infer(engine, tiny.jagged_batch(batch), settings)
        present = batch["attention_mask"][:, batch["input_ids"].shape[1] - batch["responses"].shape[1] :]
        for name in ("log_probs", "entropy"):
            actual, expected = Jagged.of(output[name], name), Jagged.from_padded(padded[name], present)
            require(actual.values.dtype == torch.float32, f"{name} is float32, not {actual.values.dtype}")
            require(torch.equal(actual.offsets, expected.offsets), f"{name} has the rows of the responses")
            self._close(actual.values, expected.values, name, 1e-6)

    def test_trajectories_train_as_plain_torch(self, build: Build, folder: Path) -> None:
        """Check that loss and gradient do not depend on padding, packing and micro-batches."""
        jagged = tiny.trajectory_batch(9, seed=4).select(["prompts", "responses", "response_mask"])
        padded = tiny.padded_batch(jagged)
        module = plain_model(folder)
        ((loss, norm, _),) = plain_training(module, [padded], OPTIM)
        choices = [ALL_ROWS, ForwardSettings(micro_batch_size_per_gpu=2)]
        if build().capabilities.token_budget:
            choices.append(ForwardSettings(max_token_len_per_gpu=47))
        plain: Mapping[str, Any] = {}
        cases = [(data, chosen, plain) for data in (jagged, padded) for chosen in choices]
        if self.packing_config:
            cases += [(data, chosen, self.packing_config) for data, chosen, _ in cases]
        for data, chosen, keys in cases:
            engine = build(keys={**self.engine_config, **keys})
            step = train(engine, data, chosen)
            require(step.metrics["nll"] == pytest.approx(loss, rel=1e-6), f"{step} has the loss {loss} with {chosen}")
            require(step.grad_norm == pytest.approx(norm, rel=self.rtol), f"{step} has the norm {norm} with {chosen}")
            self._same_weights(weights(engine), plain_weights(module))

    def test_a_jagged_batch_trains_as_the_padded_batch(self, build: Build, batch: DataProto) -> None:
        settings = ForwardSettings(micro_batch_size_per_gpu=3)
        engines_of = [build(), build()]
        steps = [
            train(engine, data, settings)
            for engine, data in zip(engines_of, (batch, tiny.jagged_batch(batch)), strict=True)
        ]
        require(steps[1].metrics == pytest.approx(steps[0].metrics, rel=1e-6), "the metrics are the padded batch's")
        require(steps[1].grad_norm == pytest.approx(steps[0].grad_norm, rel=1e-6), "the gradient is the padded batch's")
        self._same_weights(weights(engines_of[1]), weights(engines_of[0]))

    def test_outputs_are_float32_and_zero_under_the_mask(self, build: Build, batch: DataProto) -> None:
        output = infer(build(), batch, ForwardSettings(calculate_entropy=True))
        for name in ("log_probs", "entropy"):
            require(output[name].dtype == torch.float32, f"{name} is float32, not {output[name].dtype}")
            require(output[name].shape == batch["responses"].shape, f"{name} has the responses' shape")
            require(bool((output[name][batch["response_mask"] == 0] == 0).all()), f"{name} is zero under the mask")
        require("entropy" not in infer(build(), batch, ALL_ROWS), "no entropy unless asked for")

    @pytest.mark.parametrize("steps", [1, 4])
    def test_steps_are_those_of_plain_adamw(self, build: Build, folder: Path, steps: int) -> None:
        optim = replace(OPTIM, lr_warmup_steps=3)
        engine, module = build(optim=optim), plain_model(folder)
        batches = [random_batch(5, 6, 9, seed=step) for step in range(steps)]
        for step, (loss, norm, rate) in enumerate(plain_training(module, batches, optim)):
            result = train(engine, batches[step], ALL_ROWS)
            engine.lr_scheduler_step()
            require(result.grad_norm == pytest.approx(norm, rel=self.rtol), f"gradient norm of step {step}")
            require(result.lr == pytest.approx(rate), f"learning rate of step {step}")
            require(not result.skipped, f"step {step} is not skipped")
            require(result.metrics["nll"] == pytest.approx(loss, rel=self.rtol), f"metric of step {step}")
        self._same_weights(weights(engine), plain_weights(module))

    def test_gradients_are_those_of_plain_torch(self, build: Build, folder: Path, batch: DataProto) -> None:
        """Check gradients by a first step of AdamW, which changes a weight by ``lr * g / (|g| + eps)``."""
        optim = OptimConfig(lr=1.0, betas=[0.0, 0.0], eps=1.0, weight_decay=0.0, clip_grad=math.inf)
        engine, module = build(optim=optim), plain_model(folder)
        train(engine, batch, ForwardSettings(micro_batch_size_per_gpu=3))
        (-plain_log_probs(module, batch)[0].sum() / batch["response_mask"].sum()).backward()
        moved = weights(engine)
        parameters = dict(module.named_parameters())
        expected = {
            name: (parameter - parameter.grad / (parameter.grad.abs() + 1.0)).detach()
            for name, parameter in parameters.items()
        }
        for name, tensor in checkpoint_tensors(module, expected).items():
            self._close(moved[name], tensor, f"gradient of {name}")

    def test_packing_changes_nothing(self, build: Build, batch: DataProto) -> None:
        if not self.packing_config:
            pytest.skip("the suite names no keys that pack rows")
        keys = {**self.engine_config, **self.packing_config}
        plain = build()
        asked: dict[str, Any] = {"temperature": 0.7, "calculate_entropy": True}
        if plain.capabilities.sum_pi_squared:
            asked["calculate_sum_pi_squared"] = True
        choices = [ForwardSettings(**asked), ForwardSettings(**asked, micro_batch_size_per_gpu=3)]
        if plain.capabilities.token_budget:
            choices.append(ForwardSettings(**asked, max_token_len_per_gpu=16))
        expected = infer(plain, batch, choices[0])
        for chosen in choices:
            plain, packing = build(), build(keys=keys)
            outputs = infer(packing, batch, chosen)
            for name in expected.keys():  # noqa: SIM118
                self._close(outputs[name], expected[name], f"{name} of packed rows with {chosen}")
            norms = [train(engine, batch, chosen).grad_norm for engine in (plain, packing)]
            require(norms[1] == pytest.approx(norms[0], rel=self.rtol), f"gradient norms {norms} with {chosen}")
            self._same_weights(weights(packing), weights(plain))

    def test_dropout_is_for_training(self, build: Build, folder: Path, batch: DataProto) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))
        engine = build()
        expected = plain_log_probs(plain_model(folder), batch)[0].detach()
        seen: list[Tensor] = []

        def look(inputs: LossInputs) -> LossOutput:
            if inputs.log_probs is None:
                raise AssertionError("failed check: a language model gives log_probs")
            seen.append((inputs.log_probs * inputs.response_mask).sum().detach())
            return nll_loss(inputs)

        self._close(infer(engine, batch, ALL_ROWS)["log_probs"], expected, "log_probs in evaluation mode")
        torch.manual_seed(0)
        train(engine, batch, ALL_ROWS, look)
        difference = float((seen[0] - expected.sum()).abs())
        require(difference > 1e-3, f"training drops out what the config says; log_probs differ by {difference:.1e}")
        first = infer(engine, batch, ALL_ROWS)["log_probs"]
        require(
            torch.equal(infer(engine, batch, ALL_ROWS)["log_probs"], first), "inference after training repeats itself"
        )

    def test_splitting_and_order_change_nothing(self, build: Build, batch: DataProto) -> None:
        whole = build()
        expected, norm = infer(whole, batch, ALL_ROWS)["log_probs"], train(whole, batch, ALL_ROWS).grad_norm
        settings = [ForwardSettings(micro_batch_size_per_gpu=size) for size in (1, 3)]
        if whole.capabilities.token_budget:
            settings += [ForwardSettings(max_token_len_per_gpu=tokens) for tokens in (15, 33)]
        order = [3, 0, 6, 5, 1, 4, 2]
        shuffled = batch.select_idxs(order)
        for chosen in settings:
            engine = build()
            self._close(infer(engine, shuffled, chosen)["log_probs"], expected[order], f"log_probs with {chosen}")
            result = train(engine, shuffled, chosen)
            require(result.grad_norm == pytest.approx(norm, rel=self.rtol), f"gradient norm with {chosen}")
            self._same_weights(weights(engine), weights(whole))

    def test_padding_changes_nothing(self, build: Build) -> None:
        narrow = random_batch(4, 5, 6, seed=2)
        columns = {}
        for name in list(narrow.keys()):
            pad = (3 if name not in ("responses", "response_mask") else 0, 4 if name != "prompts" else 0)
            columns[name] = torch.nn.functional.pad(narrow[name], pad)
        wide = DataProto.from_dict(tensors=columns)
        engine, other = build(), build()
        expected = torch.nn.functional.pad(infer(engine, narrow, ALL_ROWS)["log_probs"], (0, 4))
        self._close(infer(other, wide, ALL_ROWS)["log_probs"], expected, "log_probs of a wider batch")
        train(engine, narrow, ALL_ROWS)
        train(other, wide, ALL_ROWS)
        self._same_weights(weights(other), weights(engine))

    def test_a_row_over_the_token_budget_is_refused(self, build: Build, batch: DataProto) -> None:
        engine = build()
        if not engine.capabilities.token_budget:
            pytest.skip("the engine has no token budget")
        with pytest.raises(ConfigError, match=r"max_token_len_per_gpu"):
            infer(engine, batch, ForwardSettings(max_token_len_per_gpu=14))

    def test_loss_inputs_fit_together(self, build: Build, batch: DataProto) -> None:
        """Check that columns match the rows of the log-probs, and that denominators count the whole mini-batch."""
        engine = build()
        expected = infer(engine, batch, ALL_ROWS)["log_probs"]
        data = batch.with_columns({"advantages": expected, "weight": torch.arange(7.0)})
        seen: list[LossInputs] = []

        def look(inputs: LossInputs) -> LossOutput:
            seen.append(inputs)
            return nll_loss(inputs)

        train(engine, data, ForwardSettings(micro_batch_size_per_gpu=2, max_response_length=50), look)
        counts = Denominators(tokens=float(batch["response_mask"].sum()), sequences=7.0, max_tokens=50.0)
        for inputs in seen:
            if inputs.log_probs is None or inputs.entropy is not None or inputs.values is not None:
                raise AssertionError("a language model gives log_probs, no values, and no entropy unless asked for")
            chosen = inputs.response_mask > 0
            scores = inputs.columns["advantages"].where(chosen, 0.0)
            self._close(inputs.log_probs.detach().where(chosen, 0.0), scores, "columns belong to the log-probs' rows")
            require(inputs.denominators == counts, f"{inputs.denominators} counts the mini-batch: {counts}")
        rows = torch.cat([inputs.columns["weight"][inputs.response_mask.sum(-1) > 0] for inputs in seen])
        require(sorted(rows.tolist()) == list(range(7)), "every row is seen once")

    def test_metrics_add_up(self, build: Build, batch: DataProto) -> None:
        engine = build()
        with engine.eval_mode():
            output, one = engine.infer_batch(batch, ALL_ROWS, nll_loss)
            _, many = engine.infer_batch(batch, ForwardSettings(micro_batch_size_per_gpu=2), nll_loss)
        losses = -output["log_probs"]
        expected = {"nll": float(losses.sum() / batch["response_mask"].sum()), "worst": float(losses.max())}
        require(one == pytest.approx(expected, rel=self.rtol), f"metrics {one} are {expected}")
        require(many == pytest.approx(expected, rel=self.rtol), f"metrics of micro-batches {many} are {expected}")

    def test_rows_without_a_token_count_for_nothing(self, build: Build, batch: DataProto) -> None:
        mask = batch["response_mask"].clone()
        mask[[1, 4, 5]] = 0
        masked = batch.with_columns({"response_mask": mask})
        engine, other = build(), build()
        settings = ForwardSettings(micro_batch_size_per_gpu=1)
        require(infer(engine, masked, settings)["log_probs"].shape == mask.shape, "every row has a row of output")
        norm = train(engine, masked, settings).grad_norm
        require(math.isfinite(norm), f"the gradient's norm is finite, not {norm}")
        train(other, batch.select_idxs([0, 2, 3, 6]), settings)
        self._same_weights(weights(engine), weights(other))

    @pytest.mark.parametrize("rows", [0, 3])
    def test_a_batch_without_a_token_has_no_gradient(self, build: Build, batch: DataProto, rows: int) -> None:
        data = batch.select_idxs(list(range(rows)))
        data = data.with_columns({"response_mask": torch.zeros_like(data["response_mask"])})
        engine = build()
        require(infer(engine, data, ALL_ROWS)["log_probs"].shape == (rows, 9), "output has the batch's shape")
        result = train(engine, data, ALL_ROWS)
        require(result.grad_norm == 0.0, f"the gradient's norm is 0, not {result.grad_norm}")
        require(all(math.isfinite(value) for value in result.metrics.values()), f"metrics are finite: {result}")
        require(all(bool(tensor.isfinite().all()) for tensor in weights(engine).values()), "weights stay finite")

    def test_inference_changes_nothing(self, build: Build, batch: DataProto) -> None:
        engine = build()
        before = weights(engine)
        first, second = infer(engine, batch, ALL_ROWS), infer(engine, batch, ALL_ROWS)
        require(torch.equal(first["log_probs"], second["log_probs"]), "inference repeats itself")
        require(not first["log_probs"].requires_grad, "inference carries no gradient")
        with engine.train_mode():
            engine.optimizer_zero_grad()
            engine.infer_batch(batch, ALL_ROWS, nll_loss)
            require(engine.optimizer_step()[0] == 0.0, "inference leaves no gradient behind")
        require_equal(weights(build()), before, "weights")

    def test_random_initial_weights(self, build: Build) -> None:
        """With ``model.random_init`` weights are those of the setup's seed, and none is read from the folder."""
        stored = weights(build(optim=None))
        first, again, other = (weights(build(optim=None, random_init=True, seed=seed)) for seed in (1, 1, 2))
        drawn = [name for name, tensor in stored.items() if tensor.ndim > 1]
        read = [name for name in drawn if torch.equal(first[name], stored[name])]
        require(not read, f"with model.random_init no weight is the folder's; these are: {', '.join(read)}")
        require(all(torch.equal(first[name], again[name]) for name in stored), "one seed gives the same random weights")
        require(
            not any(torch.equal(first[name], other[name]) for name in drawn), "another seed gives other random weights"
        )

    def test_infers_without_an_optimizer(self, build: Build, batch: DataProto) -> None:
        expected = infer(build(), batch, ALL_ROWS)["log_probs"]
        require(torch.equal(infer(build(optim=None), batch, ALL_ROWS)["log_probs"], expected), "same log_probs")

    def test_a_gradient_that_is_not_finite_is_skipped(self, build: Build, batch: DataProto) -> None:
        engine, other = build(), build()
        before = weights(engine)
        result = train(engine, batch, ALL_ROWS, tiny.nan_loss)
        require(result.skipped and not math.isfinite(result.grad_norm), f"the step is skipped: {result}")
        require_equal(weights(engine), before, "weights after a skipped step")
        require(not train(engine, batch, ALL_ROWS).skipped, "the next step is not skipped")
        train(other, batch, ALL_ROWS)
        require_equal(weights(engine), weights(other), "weights after the next step")

    @pytest.mark.parametrize(
        ("kind", "expected"),
        [
            ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
            ("linear", [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),
            ("cosine", [0.5, 1.0, 1.0, 0.2 + 0.4 * (1 + math.sqrt(0.5)), 0.6, 0.2 + 0.4 * (1 - math.sqrt(0.5)), 0.2]),
        ],
    )
    def test_schedule(self, build: Build, kind: str, expected: list[float]) -> None:
        optim = OptimConfig(
            lr=1.0, lr_warmup_steps=2, lr_scheduler_type=cast("Any", kind), min_lr_ratio=0.2, total_training_steps=6
        )
        engine = build(optim=optim)
        rates = [engine.current_lr(), *(engine.lr_scheduler_step() for _ in range(7))]
        require(rates == pytest.approx([*expected, expected[-1]]), f"learning rates {rates} are {expected}")

    def test_value_model(self, build: Build, engine_class: type[BaseEngine], batch: DataProto) -> None:
        if not engine_class.capabilities.value_model:
            pytest.skip("the engine has no value model")
        engine = build(model_type="value_model")
        losses = [
            train(engine, batch, ForwardSettings(micro_batch_size_per_gpu=3), tiny.distance_loss) for _ in range(6)
        ]
        require(losses[-1].metrics["distance"] < 0.8 * losses[0].metrics["distance"], "values learn")
        values = infer(engine, batch, ALL_ROWS)["values"]
        require(values.dtype == torch.float32, "values are float32")
        require(bool((values[batch["response_mask"] == 0] == 0).all()), "values are zero under the mask")
        # The value of a state must not depend on the token chosen in it or on later tokens.
        ids = batch["input_ids"].clone()
        ids[0, 6 + 4 :] = (ids[0, 6 + 4 :] + 1) % 20 + 4
        changed = batch.with_columns({"input_ids": ids, "responses": ids[:, 6:]})
        others = infer(engine, changed, ALL_ROWS)["values"]
        self._close(others[0, :5], values[0, :5], "values up to the changed token")
        known = batch["response_mask"][0, 5:] > 0
        require(bool((others[0, 5:] != values[0, 5:])[known].all()), "values after the changed token see it")

    def _close(self, actual: Tensor, expected: Tensor, what: str, atol: float | None = None) -> None:
        atol = self.atol if atol is None else atol
        actual, expected = actual.cpu(), expected.cpu()  # the inputs of a loss are on the engine's device
        torch.testing.assert_close(actual, expected, rtol=self.rtol, atol=atol, msg=lambda text: f"{what}: {text}")

    def _same_weights(self, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
        require(actual.keys() == expected.keys(), f"parameters {sorted(actual)} are {sorted(expected)}")
        for name, tensor in expected.items():
            self._close(actual[name], tensor, name, self.weights_atol)
