"""Conformance tests of an engine's state (checkpoints, exports, offloading, adapters); part of ``EngineSuite``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from rollcast.contracts.engine import BaseEngine, ModelConfig
from rollcast.errors import CapabilityError, CheckpointError
from rollcast.protocol import DataProto
from rollcast_data.tokenizer import read_tokenizer
from rollcast_testing import tiny
from rollcast_testing.checks import require
from rollcast_testing.engine_tools import ALL_ROWS, OPTIM, infer, require_equal, require_mixture, train, weights
from rollcast_testing.tiny import plain_log_probs, plain_model, plain_weights, random_batch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["StateLaws"]

Build = Callable[..., BaseEngine]


class StateLaws:
    """Base class of :class:`rollcast_testing.EngineSuite`, whose fixtures it uses."""

    model_options: ClassVar[Mapping[str, Any]]

    if TYPE_CHECKING:

        def _close(self, actual: Tensor, expected: Tensor, what: str, atol: float | None = None) -> None: ...

    def test_checkpoint_resumes_bitwise(self, build: Build, batch: DataProto, tmp_path: Path) -> None:
        optim = replace(OPTIM, lr_warmup_steps=9)
        engine, other = build(optim=optim), build(optim=optim)
        train(engine, batch, ALL_ROWS)
        engine.lr_scheduler_step()
        engine.save_checkpoint(tmp_path / "checkpoint")
        saved, noise = weights(engine), torch.rand(3)
        torch.manual_seed(77)
        other.load_checkpoint(tmp_path / "checkpoint")
        require_equal(weights(other), saved, "weights")
        require(torch.equal(torch.rand(3), noise), "random numbers go on where they were")
        require(other.current_lr() == engine.current_lr(), "the schedule goes on where it was")
        for step in range(2):
            first, second = (train(one, random_batch(4, 6, 9, seed=step), ALL_ROWS) for one in (engine, other))
            require(first == second, f"step {step} after loading: {first}, {second}")
        require_equal(weights(other), weights(engine), "weights after two more steps")

    def test_wrong_checkpoints_are_named(
        self, build: Build, engine_class: type[BaseEngine], folder: Path, tmp_path: Path
    ) -> None:
        engine = build()
        with pytest.raises(CheckpointError, match="absent"):
            engine.load_checkpoint(tmp_path / "absent")
        with pytest.raises(CheckpointError, match="absent"):
            engine_class.export_checkpoint(tmp_path / "absent", ModelConfig(path=str(folder)), tmp_path / "out")
        other = build(path=tiny.tiny_model_folder(tmp_path / "other", hidden=48, **self.model_options))
        other.save_checkpoint(tmp_path / "of_another_model")
        before = weights(engine)
        with pytest.raises(CheckpointError, match="of_another_model"):
            engine.load_checkpoint(tmp_path / "of_another_model")
        require_equal(weights(engine), before, "weights after a refused checkpoint")

    def test_exports_open_in_transformers(
        self, build: Build, engine_class: type[BaseEngine], folder: Path, tmp_path: Path
    ) -> None:
        engine, data = build(), random_batch(4, 6, 9, seed=3)
        train(engine, data, ALL_ROWS)
        engine.export(tmp_path / "live")
        engine.save_checkpoint(tmp_path / "checkpoint")
        engine_class.export_checkpoint(tmp_path / "checkpoint", ModelConfig(path=str(folder)), tmp_path / "saved")
        expected = infer(engine, data, ALL_ROWS)["log_probs"]
        for path in (tmp_path / "live", tmp_path / "saved"):
            module = plain_model(path)
            self._close(expected, plain_log_probs(module, data)[0].detach(), f"log_probs of the export {path.name}")
            require_equal(plain_weights(module), weights(engine), f"weights of the export {path.name}")
            text = read_tokenizer(path)("12+3")["input_ids"]
            require(text == read_tokenizer(folder)("12+3")["input_ids"], "the tokenizer is exported")

    def test_exports_that_cannot_be_written(self, build: Build, tmp_path: Path) -> None:
        (tmp_path / "blocked").write_text("a file, not a folder")
        with pytest.raises(CheckpointError, match="blocked"):
            build().export(tmp_path / "blocked")

    def test_parameters_have_their_hugging_face_names(self, build: Build, folder: Path) -> None:
        names = [name for name, _ in build().get_per_tensor_param()]
        require(len(names) == len(set(names)), "each parameter comes once")
        require_equal(weights(build()), plain_weights(plain_model(folder)), "parameters")

    def test_in_process_module(self, build: Build, folder: Path, batch: DataProto) -> None:
        engine, other = build(), build()
        if not engine.capabilities.in_process_module:
            with pytest.raises(CapabilityError):
                engine.in_process_module()
            return
        ids = batch["input_ids"][:1]
        with engine.in_process_module() as module, torch.no_grad():
            logits = module(input_ids=ids.to(next(module.parameters()).device)).logits
        self._close(logits.cpu(), plain_model(folder)(input_ids=ids).logits.detach(), "logits")
        train(engine, batch, ALL_ROWS)
        train(other, batch, ALL_ROWS)
        require_equal(weights(engine), weights(other), "weights trained after using the module")

    def test_state_moves_away_and_back(self, build: Build, batch: DataProto) -> None:
        engine, other = build(), build()
        if not engine.capabilities.offload:
            pytest.skip("the engine does not move its state")
        before = weights(engine)
        for moves in ({}, {"optimizer": False}, {"model": False, "grad": False}):
            engine.to("cpu", **moves)
            engine.to("device", **moves)
        require_equal(weights(engine), before, "weights that were away")
        for _ in range(2):
            first, second = train(engine, batch, ALL_ROWS), train(other, batch, ALL_ROWS)
            require(first == second, f"a step after state was away: {first}, {second}")
            engine.to("cpu")
            engine.to("device")
        require_equal(weights(engine), weights(other), "weights trained after state was away")

    def test_weights_mix_with_those_of_another_engine(self, build: Build, batch: DataProto) -> None:
        engine, source = build(), build()
        if not engine.capabilities.weight_mixing:
            with pytest.raises(CapabilityError):
                engine.mix_weights(source, 0.25)
            return
        train(source, batch, ALL_ROWS)
        before, trained = weights(engine), weights(source)
        engine.mix_weights(source, 0.25)
        require_mixture(weights(engine), before, trained, 0.25)
        require_equal(weights(source), trained, "weights of the source")
        engine.mix_weights(source, 1.0)
        require_equal(weights(engine), trained, "weights of which the source has all")
        expected = infer(source, batch, ALL_ROWS)["log_probs"]
        self._close(infer(engine, batch, ALL_ROWS)["log_probs"], expected, "log_probs of the mixed weights")

    def test_adapters(self, build: Build, batch: DataProto, tmp_path: Path) -> None:
        """Check that only the adapter learns, that it can be disabled, and that it resumes from a checkpoint."""
        plain = build()
        if not plain.capabilities.lora:
            with pytest.raises(CapabilityError):
                plain.disable_adapter()
            return
        engine, base = build(lora_rank=4), weights(plain)
        expected = infer(plain, batch, ALL_ROWS)["log_probs"]
        self._close(infer(engine, batch, ALL_ROWS)["log_probs"], expected, "log_probs of a fresh adapter")
        losses = [train(engine, batch, ALL_ROWS).metrics["nll"] for _ in range(4)]
        require(losses[-1] < losses[0], f"the adapter learns: {losses}")
        changed = infer(engine, batch, ALL_ROWS)["log_probs"]
        require(float((changed - expected).abs().max()) > 1e-3, "a trained adapter changes log_probs")
        with engine.disable_adapter():
            self._close(infer(engine, batch, ALL_ROWS)["log_probs"], expected, "log_probs without the adapter")
        require_equal(weights(engine), base, "weights of the base")
        adapter = engine.get_adapter()
        require(adapter is not None and plain.get_adapter() is None, "only who trains an adapter gives one")
        engine.save_checkpoint(tmp_path / "checkpoint")
        other = build(lora_rank=4)
        other.load_checkpoint(tmp_path / "checkpoint")
        require(torch.equal(infer(other, batch, ALL_ROWS)["log_probs"], changed), "the adapter resumes")
        engine.export(tmp_path / "merged")
        self._close(changed, plain_log_probs(plain_model(tmp_path / "merged"), batch)[0].detach(), "the export")
