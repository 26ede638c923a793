"""The laws that every training engine keeps, as pytest tests to inherit.

One rank in this process, on CPU, against plain transformers and torch. The extra
``rollcast[testing]`` and transformers have to be installed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from rollcast.contracts.algorithm import Denominators
from rollcast.contracts.engine import (
    BaseEngine,
    EngineSetup,
    ForwardSettings,
    LossFunction,
    LossInputs,
    LossOutput,
    ModelConfig,
    ModelType,
    OptimConfig,
    TrainOutput,
    engines,
)
from rollcast.controller.worker import WorkerContext
from rollcast.errors import CapabilityError, CheckpointError, ConfigError
from rollcast.protocol import DataProto
from rollcast.testing import tiny
from rollcast.testing.engine_vocabulary import VocabularyLaws
from rollcast.testing.tiny import nll_loss, plain_log_probs, plain_model, plain_weights, random_batch

__all__ = ["EngineSuite"]

#: The large eps keeps rounding apart from errors: some gradients (of the keys' biases) are next to
#: nothing, and with a small eps Adam makes whole steps of their rounding.
_OPTIM = OptimConfig(lr=1e-2, eps=1e-4, weight_decay=0.1, clip_grad=0.5)
_ALL_ROWS = ForwardSettings()

Build = Callable[..., BaseEngine]


class EngineSuite(VocabularyLaws):
    """Conformance tests of one engine.

    Example::

        class TestMyEngine(EngineSuite):
            name = "my_engine"

    The engine has to compute in float32 with the configuration given here. Laws about what the
    engine's ``capabilities`` exclude are skipped.
    """

    #: Name of the engine in ``rollcast.engines``.
    name: ClassVar[str] = ""
    #: Keys of ``actor.engine`` that the engine is tested with.
    engine_config: ClassVar[Mapping[str, Any]] = {}
    rtol: ClassVar[float] = 1e-5
    #: Of log-probs, entropy and values.
    atol: ClassVar[float] = 1e-5
    #: Of weights after up to four steps of size 0.01.
    weights_atol: ClassVar[float] = 2e-6

    @pytest.fixture
    def engine_class(self) -> type[BaseEngine]:
        """The engine under test; by default the part that :attr:`name` names."""
        if not self.name:
            raise NotImplementedError(f"{type(self).__name__} must set `name` or override the fixture `engine_class`")
        return engines.get(self.name, requested_by=f"{type(self).__name__}.name")

    @pytest.fixture(params=[True, False], ids=["tied", "untied"])
    def folder(self, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        """A tiny model, with and without tied embeddings."""
        return tiny.tiny_model_folder(tmp_path / "model", hidden=32, tied=request.param)

    @pytest.fixture
    def build(self, engine_class: type[BaseEngine], folder: Path) -> Build:
        """Makes an initialized engine: ``build(optim=..., model_type=..., path=...)``."""

        def make(
            optim: OptimConfig | None = _OPTIM, model_type: ModelType = "language_model", path: Path = folder
        ) -> BaseEngine:
            config = engine_class.config_schema(**copy.deepcopy(dict(self.engine_config)))
            setup = EngineSetup(model_type, ModelConfig(path=str(path)), config, optim, WorkerContext())
            engine = engine_class(setup)
            engine.initialize()
            return engine

        return make

    @pytest.fixture
    def batch(self) -> DataProto:
        """Seven rows of ragged prompts and responses."""
        return random_batch(7, 6, 9, seed=1)

    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    def test_log_probs_and_entropy(self, build: Build, folder: Path, batch: DataProto, temperature: float) -> None:
        output = _infer(build(), batch, ForwardSettings(temperature=temperature, calculate_entropy=True))
        log_probs, entropy = plain_log_probs(plain_model(folder), batch, temperature)
        self._close(output["log_probs"], log_probs.detach(), "log_probs")
        self._close(output["entropy"], entropy.detach(), "entropy")

    def test_outputs_are_float32_and_zero_under_the_mask(self, build: Build, batch: DataProto) -> None:
        output = _infer(build(), batch, ForwardSettings(calculate_entropy=True))
        for name in ("log_probs", "entropy"):
            _require(output[name].dtype == torch.float32, f"{name} is float32, not {output[name].dtype}")
            _require(output[name].shape == batch["responses"].shape, f"{name} has the responses' shape")
            _require(bool((output[name][batch["response_mask"] == 0] == 0).all()), f"{name} is zero under the mask")
        _require("entropy" not in _infer(build(), batch, _ALL_ROWS), "no entropy unless asked for")

    @pytest.mark.parametrize("steps", [1, 4])
    def test_steps_are_those_of_plain_adamw(self, build: Build, folder: Path, steps: int) -> None:
        optim = replace(_OPTIM, lr_warmup_steps=3)
        engine, module = build(optim=optim), plain_model(folder).train()
        adamw = torch.optim.AdamW(module.parameters(), lr=optim.lr, eps=optim.eps, weight_decay=optim.weight_decay)
        for step in range(steps):
            data = random_batch(5, 6, 9, seed=step)
            with engine.train_mode():
                result = engine.train_batch(data, nll_loss, _ALL_ROWS)
            engine.lr_scheduler_step()
            adamw.zero_grad()
            log_probs, _ = plain_log_probs(module, data)
            loss = -log_probs.sum() / data["response_mask"].sum()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(module.parameters(), optim.clip_grad)
            adamw.param_groups[0]["lr"] = optim.lr * min(1.0, (step + 1) / 3)
            adamw.step()
            _require(result.grad_norm == pytest.approx(float(norm), rel=self.rtol), f"gradient norm of step {step}")
            _require(result.lr == pytest.approx(adamw.param_groups[0]["lr"]), f"learning rate of step {step}")
            _require(not result.skipped, f"step {step} is not skipped")
            metric = pytest.approx(float(loss.detach()), rel=self.rtol)
            _require(result.metrics["nll"] == metric, f"metric of step {step}")
        self._same_weights(_weights(engine), plain_weights(module))

    def test_splitting_and_order_change_nothing(self, build: Build, batch: DataProto) -> None:
        whole = build()
        expected, norm = _infer(whole, batch, _ALL_ROWS)["log_probs"], _train(whole, batch, _ALL_ROWS).grad_norm
        settings = [ForwardSettings(micro_batch_size_per_gpu=size) for size in (1, 3)]
        if whole.capabilities.token_budget:
            settings += [ForwardSettings(max_token_len_per_gpu=tokens) for tokens in (15, 33)]
        order = [3, 0, 6, 5, 1, 4, 2]
        shuffled = batch.select_idxs(order)
        for chosen in settings:
            engine = build()
            self._close(_infer(engine, shuffled, chosen)["log_probs"], expected[order], f"log_probs with {chosen}")
            result = _train(engine, shuffled, chosen)
            _require(result.grad_norm == pytest.approx(norm, rel=self.rtol), f"gradient norm with {chosen}")
            self._same_weights(_weights(engine), _weights(whole))

    def test_padding_changes_nothing(self, build: Build) -> None:
        narrow = random_batch(4, 5, 6, seed=2)
        columns = {}
        for name in list(narrow.keys()):
            pad = (3 if name not in ("responses", "response_mask") else 0, 4 if name != "prompts" else 0)
            columns[name] = torch.nn.functional.pad(narrow[name], pad)
        wide = DataProto.from_dict(tensors=columns)
        engine, other = build(), build()
        expected = torch.nn.functional.pad(_infer(engine, narrow, _ALL_ROWS)["log_probs"], (0, 4))
        self._close(_infer(other, wide, _ALL_ROWS)["log_probs"], expected, "log_probs of a wider batch")
        _train(engine, narrow, _ALL_ROWS)
        _train(other, wide, _ALL_ROWS)
        self._same_weights(_weights(other), _weights(engine))

    def test_a_row_over_the_token_budget_is_refused(self, build: Build, batch: DataProto) -> None:
        engine = build()
        if not engine.capabilities.token_budget:
            pytest.skip("the engine has no token budget")
        with pytest.raises(ConfigError, match=r"max_token_len_per_gpu"):
            _infer(engine, batch, ForwardSettings(max_token_len_per_gpu=14))

    def test_loss_inputs_fit_together(self, build: Build, batch: DataProto) -> None:
        """Columns belong to the rows of the log-probs; denominators count the whole mini-batch."""
        engine = build()
        expected = _infer(engine, batch, _ALL_ROWS)["log_probs"]
        data = batch.with_columns({"advantages": expected, "weight": torch.arange(7.0)})
        seen: list[LossInputs] = []

        def look(inputs: LossInputs) -> LossOutput:
            seen.append(inputs)
            return nll_loss(inputs)

        _train(engine, data, ForwardSettings(micro_batch_size_per_gpu=2, max_response_length=50), look)
        counts = Denominators(tokens=float(batch["response_mask"].sum()), sequences=7.0, max_tokens=50.0)
        for inputs in seen:
            if inputs.log_probs is None or inputs.entropy is not None or inputs.values is not None:
                raise AssertionError("a language model gives log_probs, no values, and no entropy unless asked for")
            chosen = inputs.response_mask > 0
            given = inputs.columns["advantages"].where(chosen, 0.0)
            self._close(inputs.log_probs.detach().where(chosen, 0.0), given, "columns belong to the log-probs' rows")
            _require(inputs.denominators == counts, f"{inputs.denominators} counts the mini-batch: {counts}")
        rows = torch.cat([inputs.columns["weight"][inputs.response_mask.sum(-1) > 0] for inputs in seen])
        _require(sorted(rows.tolist()) == list(range(7)), "every row is seen once")

    def test_metrics_add_up(self, build: Build, batch: DataProto) -> None:
        engine = build()
        with engine.eval_mode():
            output, one = engine.infer_batch(batch, _ALL_ROWS, nll_loss)
            _, many = engine.infer_batch(batch, ForwardSettings(micro_batch_size_per_gpu=2), nll_loss)
        losses = -output["log_probs"]
        expected = {"nll": float(losses.sum() / batch["response_mask"].sum()), "worst": float(losses.max())}
        _require(one == pytest.approx(expected, rel=self.rtol), f"metrics {one} are {expected}")
        _require(many == pytest.approx(expected, rel=self.rtol), f"metrics of micro-batches {many} are {expected}")

    def test_rows_without_a_token_count_for_nothing(self, build: Build, batch: DataProto) -> None:
        mask = batch["response_mask"].clone()
        mask[[1, 4, 5]] = 0
        masked = batch.with_columns({"response_mask": mask})
        engine, other = build(), build()
        settings = ForwardSettings(micro_batch_size_per_gpu=1)
        _require(_infer(engine, masked, settings)["log_probs"].shape == mask.shape, "every row has a row of output")
        norm = _train(engine, masked, settings).grad_norm
        _require(math.isfinite(norm), f"the gradient's norm is finite, not {norm}")
        _train(other, batch.select_idxs([0, 2, 3, 6]), settings)
        self._same_weights(_weights(engine), _weights(other))

    @pytest.mark.parametrize("rows", [0, 3])
    def test_a_batch_without_a_token_has_no_gradient(self, build: Build, batch: DataProto, rows: int) -> None:
        data = batch.select_idxs(list(range(rows)))
        data = data.with_columns({"response_mask": torch.zeros_like(data["response_mask"])})
        engine = build()
        _require(_infer(engine, data, _ALL_ROWS)["log_probs"].shape == (rows, 9), "output has the batch's shape")
        result = _train(engine, data, _ALL_ROWS)
        _require(result.grad_norm == 0.0, f"the gradient's norm is 0, not {result.grad_norm}")
        _require(all(math.isfinite(value) for value in result.metrics.values()), f"metrics are finite: {result}")
        _require(all(bool(tensor.isfinite().all()) for tensor in _weights(engine).values()), "weights stay finite")

    def test_inference_changes_nothing(self, build: Build, batch: DataProto) -> None:
        engine = build()
        before = _weights(engine)
        first, second = _infer(engine, batch, _ALL_ROWS), _infer(engine, batch, _ALL_ROWS)
        _require(torch.equal(first["log_probs"], second["log_probs"]), "inference repeats itself")
        _require(not first["log_probs"].requires_grad, "inference carries no gradient")
        with engine.train_mode():
            engine.optimizer_zero_grad()
            engine.infer_batch(batch, _ALL_ROWS, nll_loss)
            _require(engine.optimizer_step()[0] == 0.0, "inference leaves no gradient behind")
        _require_equal(_weights(build()), before, "weights")

    def test_infers_without_an_optimizer(self, build: Build, batch: DataProto) -> None:
        expected = _infer(build(), batch, _ALL_ROWS)["log_probs"]
        _require(torch.equal(_infer(build(optim=None), batch, _ALL_ROWS)["log_probs"], expected), "same log_probs")

    def test_a_gradient_that_is_not_finite_is_skipped(self, build: Build, batch: DataProto) -> None:
        engine, other = build(), build()
        before = _weights(engine)
        result = _train(engine, batch, _ALL_ROWS, tiny.nan_loss)
        _require(result.skipped and not math.isfinite(result.grad_norm), f"the step is skipped: {result}")
        _require_equal(_weights(engine), before, "weights after a skipped step")
        _require(not _train(engine, batch, _ALL_ROWS).skipped, "the next step is not skipped")
        _train(other, batch, _ALL_ROWS)
        _require_equal(_weights(engine), _weights(other), "weights after the next step")

    @pytest.mark.parametrize(
        ("kind", "expected"),
        [
            ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
            ("linear", [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),
            ("cosine", [0.5, 1.0, 1.0, 0.2 + 0.4 * (1 + math.sqrt(0.5)), 0.6, 0.2 + 0.4 * (1 - math.sqrt(0.5)), 0.2]),
        ],
    )
    def test_schedule(self, build: Build, kind: str, expected: list[float]) -> None:
        optim = OptimConfig(lr=1.0, lr_warmup_steps=2, lr_scheduler_type=kind, min_lr_ratio=0.2, total_training_steps=6)
        engine = build(optim=optim)
        rates = [engine.current_lr(), *(engine.lr_scheduler_step() for _ in range(7))]
        _require(rates == pytest.approx([*expected, expected[-1]]), f"learning rates {rates} are {expected}")

    def test_checkpoint_resumes_bitwise(self, build: Build, batch: DataProto, tmp_path: Path) -> None:
        optim = replace(_OPTIM, lr_warmup_steps=9)
        engine, other = build(optim=optim), build(optim=optim)
        _train(engine, batch, _ALL_ROWS)
        engine.lr_scheduler_step()
        engine.save_checkpoint(tmp_path / "checkpoint")
        saved, noise = _weights(engine), torch.rand(3)
        torch.manual_seed(77)
        other.load_checkpoint(tmp_path / "checkpoint")
        _require_equal(_weights(other), saved, "weights")
        _require(torch.equal(torch.rand(3), noise), "random numbers go on where they were")
        _require(other.current_lr() == engine.current_lr(), "the schedule goes on where it was")
        for step in range(2):
            first, second = (_train(one, random_batch(4, 6, 9, seed=step), _ALL_ROWS) for one in (engine, other))
            _require(first == second, f"step {step} after loading: {first}, {second}")
        _require_equal(_weights(other), _weights(engine), "weights after two more steps")

    def test_wrong_checkpoints_are_named(
        self, build: Build, engine_class: type[BaseEngine], folder: Path, tmp_path: Path
    ) -> None:
        engine = build()
        with pytest.raises(CheckpointError, match="absent"):
            engine.load_checkpoint(tmp_path / "absent")
        with pytest.raises(CheckpointError, match="absent"):
            engine_class.export_checkpoint(tmp_path / "absent", ModelConfig(path=str(folder)), tmp_path / "out")
        other = build(path=tiny.tiny_model_folder(tmp_path / "other", hidden=48))
        other.save_checkpoint(tmp_path / "of_another_model")
        before = _weights(engine)
        with pytest.raises(CheckpointError, match="of_another_model"):
            engine.load_checkpoint(tmp_path / "of_another_model")
        _require_equal(_weights(engine), before, "weights after a refused checkpoint")

    def test_exports_open_in_transformers(
        self, build: Build, engine_class: type[BaseEngine], folder: Path, tmp_path: Path
    ) -> None:
        from transformers import AutoTokenizer

        engine, data = build(), random_batch(4, 6, 9, seed=3)
        _train(engine, data, _ALL_ROWS)
        engine.export(tmp_path / "live")
        engine.save_checkpoint(tmp_path / "checkpoint")
        engine_class.export_checkpoint(tmp_path / "checkpoint", ModelConfig(path=str(folder)), tmp_path / "saved")
        expected = _infer(engine, data, _ALL_ROWS)["log_probs"]
        for path in (tmp_path / "live", tmp_path / "saved"):
            module = plain_model(path)
            self._close(expected, plain_log_probs(module, data)[0].detach(), f"log_probs of the export {path.name}")
            _require_equal(plain_weights(module), _weights(engine), f"weights of the export {path.name}")
            text = AutoTokenizer.from_pretrained(path)("12+3")["input_ids"]
            _require(text == AutoTokenizer.from_pretrained(folder)("12+3")["input_ids"], "the tokenizer is exported")

    def test_parameters_have_their_hugging_face_names(self, build: Build, folder: Path) -> None:
        names = [name for name, _ in build().get_per_tensor_param()]
        _require(len(names) == len(set(names)), "each parameter comes once")
        _require_equal(_weights(build()), plain_weights(plain_model(folder)), "parameters")

    def test_in_process_module(self, build: Build, folder: Path, batch: DataProto) -> None:
        engine, other = build(), build()
        if not engine.capabilities.in_process_module:
            with pytest.raises(CapabilityError):
                engine.in_process_module()
            return
        ids = batch["input_ids"][:1]
        with engine.in_process_module() as module, torch.no_grad():
            logits = module(input_ids=ids).logits
        self._close(logits, plain_model(folder)(input_ids=ids).logits.detach(), "logits")
        _train(engine, batch, _ALL_ROWS)
        _train(other, batch, _ALL_ROWS)
        _require_equal(_weights(engine), _weights(other), "weights trained after using the module")

    def test_value_model(self, build: Build, engine_class: type[BaseEngine], batch: DataProto) -> None:
        if not engine_class.capabilities.value_model:
            pytest.skip("the engine has no value model")
        engine = build(model_type="value_model")
        losses = [
            _train(engine, batch, ForwardSettings(micro_batch_size_per_gpu=3), tiny.distance_loss) for _ in range(6)
        ]
        _require(losses[-1].metrics["distance"] < 0.8 * losses[0].metrics["distance"], "values learn")
        values = _infer(engine, batch, _ALL_ROWS)["values"]
        _require(values.dtype == torch.float32, "values are float32")
        _require(bool((values[batch["response_mask"] == 0] == 0).all()), "values are zero under the mask")
        # The value of a state must not know the token that is chosen in it, nor any later one.
        ids = batch["input_ids"].clone()
        ids[0, 6 + 4 :] = (ids[0, 6 + 4 :] + 1) % 20 + 4
        changed = batch.with_columns({"input_ids": ids, "responses": ids[:, 6:]})
        others = _infer(engine, changed, _ALL_ROWS)["values"]
        self._close(others[0, :5], values[0, :5], "values up to the changed token")
        known = batch["response_mask"][0, 5:] > 0
        _require(bool((others[0, 5:] != values[0, 5:])[known].all()), "values after the changed token see it")

    def _close(self, given: Tensor, expected: Tensor, what: str, atol: float | None = None) -> None:
        atol = self.atol if atol is None else atol
        torch.testing.assert_close(given, expected, rtol=self.rtol, atol=atol, msg=lambda text: f"{what}: {text}")

    def _same_weights(self, given: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
        _require(given.keys() == expected.keys(), f"parameters {sorted(given)} are {sorted(expected)}")
        for name, tensor in expected.items():
            self._close(given[name], tensor, name, self.weights_atol)


def _infer(engine: BaseEngine, data: DataProto, settings: ForwardSettings) -> DataProto:
    with engine.eval_mode():
        return engine.infer_batch(data, settings)[0]


def _train(engine: BaseEngine, data: DataProto, chosen: ForwardSettings, loss: LossFunction = nll_loss) -> TrainOutput:
    with engine.train_mode():
        return engine.train_batch(data, loss, chosen)


def _weights(engine: BaseEngine) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in engine.get_per_tensor_param()}


def _require(condition: bool, law: str) -> None:
    __tracebackhide__ = True
    if not condition:
        raise AssertionError(f"broken law: {law}")


def _require_equal(given: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    __tracebackhide__ = True
    _require(given.keys() == expected.keys(), f"{what}: {sorted(given)} are {sorted(expected)}")
    different = [name for name, tensor in expected.items() if not torch.equal(given[name], tensor)]
    _require(not different, f"{what} are the same to the last bit; {different[:3]} differ")
