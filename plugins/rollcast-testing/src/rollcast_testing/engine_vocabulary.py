"""Conformance tests of an engine's KL divergence over the whole vocabulary; part of ``EngineSuite``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from rollcast.contracts.algorithm import kl_penalties, kl_penalty
from rollcast.contracts.engine import BaseEngine, ForwardSettings, LossInputs, LossOutput
from rollcast.errors import CapabilityError
from rollcast.protocol import DataProto
from rollcast_testing import tiny

__all__ = ["VocabularyLaws"]

_NAME = "rollcast_testing_kl"


@kl_penalty(needs_vocabulary=True)
def _exact_kl(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    _require(log_probs.ndim == 3, f"a penalty over the vocabulary gets [B, T, V], not {list(log_probs.shape)}")
    policy, ref = log_probs.log_softmax(-1), ref_log_probs.log_softmax(-1)
    return (policy.exp() * (policy - ref)).sum(-1)


def _kl_loss(inputs: LossInputs) -> LossOutput:
    if inputs.vocabulary_kl is None:
        raise AssertionError("failed check: the loss function gets the vocabulary_kl that was asked for")
    loss = (inputs.vocabulary_kl * inputs.response_mask).sum() / inputs.denominators.tokens
    return LossOutput(loss, {"kl": loss.detach()})


class VocabularyLaws:
    """Base class of :class:`rollcast_testing.EngineSuite`, whose fixtures it uses."""

    model_options: ClassVar[Mapping[str, Any]]
    rtol: ClassVar[float]
    atol: ClassVar[float]

    @pytest.fixture
    def other_folder(self, tmp_path: Path) -> Path:
        """Write a model with the same vocabulary and other weights."""
        return tiny.tiny_model_folder(tmp_path / "reference", hidden=48, seed=5, **self.model_options)

    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    def test_kl_over_the_vocabulary(
        self, build: Callable[..., BaseEngine], folder: Path, other_folder: Path, batch: DataProto, temperature: float
    ) -> None:
        engine = _compared(build, build(optim=None, path=other_folder))
        policy, ref = tiny.plain_model(folder), tiny.plain_model(other_folder)
        expected = _plain_kl(policy, ref, batch, temperature)
        loss = expected.sum() / batch["response_mask"].sum()
        loss.backward()
        norm = float(torch.stack([p.grad.norm() for p in policy.parameters() if p.grad is not None]).norm())
        _require(norm > 1e-3, "the two models differ")
        whole = ForwardSettings(temperature=temperature, vocabulary_kl=_NAME, calculate_entropy=True)
        parts = replace(whole, micro_batch_size_per_gpu=2)
        with _registered():
            for settings in (whole, parts):
                with engine.eval_mode():
                    output = engine.infer_batch(batch, settings)[0]["vocabulary_kl"]
                torch.testing.assert_close(output, expected.detach(), rtol=self.rtol, atol=self.atol)
            with engine.train_mode():
                result = engine.train_batch(batch, _kl_loss, parts)
        _require(result.grad_norm == pytest.approx(norm, rel=10 * self.rtol), f"the gradient's norm is {norm}")
        _require(result.metrics["kl"] == pytest.approx(float(loss.detach()), rel=10 * self.rtol), "the loss agrees")

    def test_kl_over_the_vocabulary_leaves_the_reference_alone(
        self, build: Callable[..., BaseEngine], other_folder: Path, batch: DataProto
    ) -> None:
        reference = build(optim=None, path=other_folder)
        engine = _compared(build, reference)
        before = {name: tensor.clone() for name, tensor in reference.get_per_tensor_param()}
        with _registered(), engine.train_mode():
            engine.train_batch(batch, _kl_loss, ForwardSettings(vocabulary_kl=_NAME))
        for name, tensor in reference.get_per_tensor_param():
            _require(torch.equal(tensor, before[name]), f"{name} of the reference is as it was")
        with engine.eval_mode():
            plain = engine.infer_batch(batch, ForwardSettings())[0]
        _require("vocabulary_kl" not in plain, "no vocabulary_kl unless asked for")

    def test_kl_over_the_vocabulary_needs_a_reference(self, build: Callable[..., BaseEngine], batch: DataProto) -> None:
        engine = build()
        with _registered(), pytest.raises(CapabilityError), engine.eval_mode():
            if not engine.capabilities.vocabulary_kl:
                engine.set_reference(build(optim=None))
            engine.infer_batch(batch, ForwardSettings(vocabulary_kl=_NAME))


def _compared(build: Callable[..., BaseEngine], reference: BaseEngine) -> BaseEngine:
    engine = build()
    if not engine.capabilities.vocabulary_kl:
        pytest.skip("the engine gives no KL penalty over the vocabulary")
    engine.set_reference(reference)
    return engine


@contextmanager
def _registered() -> Iterator[None]:
    kl_penalties.register(_NAME, _exact_kl)
    try:
        yield
    finally:
        kl_penalties.unregister(_NAME)


def _plain_kl(policy: Any, reference: Any, batch: DataProto, temperature: float) -> Tensor:
    """Return the divergences ``[B, T]``, zero where masked, computed row by row without padding."""
    mask, rows = batch["response_mask"], []
    for row, present in enumerate(batch["attention_mask"] > 0):
        tokens = batch["input_ids"][row][present].unsqueeze(0)
        length = int(present[-mask.size(1) :].sum())
        logits = [model(input_ids=tokens).logits[0, -length - 1 : -1].float() for model in (policy, reference)]
        kl = _exact_kl(logits[0][None] / temperature, logits[1][None].detach() / temperature)[0]
        rows.append(torch.nn.functional.pad(kl, (0, mask.size(1) - length)) * mask[row])
    return torch.stack(rows)


def _require(condition: bool, law: str) -> None:
    __tracebackhide__ = True
    if not condition:
        raise AssertionError(f"failed check: {law}")
