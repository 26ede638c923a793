"""Micro-batches on their way to the device: one copy each, ahead of the computation, and nothing that waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsdp_scenarios as scenarios
import pytest
import torch
from fake_streams import RecordingStream
from torch.utils._python_dispatch import TorchDispatchMode

from rollcast.contracts.engine import ForwardSettings
from rollcast_engine.batching import BatchPlan, dummy_micro_batch, plan_batch
from rollcast_engine.transfer import move, prefetched
from rollcast_fsdp.engine import FsdpEngine
from rollcast_fsdp.passes import Passes
from rollcast_fsdp.step import TokenForward
from rollcast_testing.tiny import jagged_batch, random_batch

ALONE = scenarios.ALONE
#: Operators that make the host wait for the device, because a shape or a number depends on values.
WAITS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::equal",
    "aten::is_nonzero",
    "aten::repeat_interleave",
}


class Waits(TorchDispatchMode):
    """Finds operators that wait inside :meth:`Passes.run`, except where micro-batches are made, which is host work."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.host = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        masks = name == "aten::index" and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if not self.host and (name in WAITS or masks):
            self.found.append(name)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def work(self, host: bool) -> Iterator[None]:
        before, self.host = self.host, host
        try:
            yield
        finally:
            self.host = before

    def around(self, patch: pytest.MonkeyPatch, owner: type, name: str, host: bool) -> None:
        """Make the calls of a method host work, or not."""
        method = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            with self.work(host):
                return method(*args, **options)

        patch.setattr(owner, name, call)


def find_waits(engine: FsdpEngine, micro_batches: int, value_model: bool, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that wait in an update and in a pass without gradients with that many micro-batches."""
    waits, tolist = Waits(), torch.Tensor.tolist

    def counted(self: torch.Tensor) -> Any:
        if not waits.host:
            waits.found.append("tolist")
        return tolist(self)

    batch = jagged_batch(random_batch(2 * micro_batches, 6, 8, seed=5))
    loss = scenarios.value_loss if value_model else scenarios.nll
    settings = ForwardSettings(micro_batch_size_per_gpu=2, calculate_entropy=not value_model)
    with monkeypatch.context() as patch:
        waits.around(patch, Passes, "run", False)
        waits.around(patch, TokenForward, "prepare", True)
        waits.around(patch, BatchPlan, "cut", True)
        patch.setattr(torch.Tensor, "tolist", counted)
        with waits:
            with engine.train_mode():
                engine.train_batch(batch, loss, settings)
            with engine.eval_mode():
                engine.infer_batch(batch, settings)
    return waits.found


@pytest.mark.parametrize("keys", [{}, {"use_fused_kernels": True}, {"enable_gradient_checkpointing": True}])
@pytest.mark.parametrize("value_model", [False, True])
def test_no_micro_batch_waits_for_the_device(
    model_folder: Path, keys: dict[str, Any], value_model: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = "value_model" if value_model else "language_model"
    engine = scenarios.build(ALONE, model_folder, kind, use_remove_padding=True, **keys)  # type: ignore[arg-type]
    assert find_waits(engine, 4, value_model, monkeypatch) == []


def test_a_micro_batch_is_copied_at_once_and_one_ahead() -> None:
    batch = jagged_batch(random_batch(6, 5, 7, seed=3)).with_columns({"weight": torch.arange(6.0)})
    plan = plan_batch(batch, ForwardSettings(micro_batch_size_per_gpu=2))
    stream = RecordingStream()
    computed = []
    for index, micro in enumerate(prefetched(plan.cut, len(plan), stream)):
        stream.events.append(("compute", index))
        computed.append(micro)
    order = [(name, value) for name, value in stream.events if name in ("mark", "compute waits", "compute")]
    assert order == [
        ("mark", 1),
        ("mark", 2),
        ("compute waits", 1),
        ("compute", 0),
        ("mark", 3),
        ("compute waits", 2),
        ("compute", 1),
        ("compute waits", 3),
        ("compute", 2),
    ]
    assert sum(name == "to device" for name, _ in stream.events) == len(plan)
    assert stream.default_copies == 0
    for index, micro in enumerate(computed):
        expected = plan.cut(index)
        assert torch.equal(micro.rows, expected.rows)
        assert torch.equal(micro.trained, expected.trained)
        assert micro.columns["responses"] is micro.responses  # once, though it has two names
        for name, column in expected.columns.items():
            assert micro.columns[name].dtype == column.dtype
            assert torch.equal(micro.columns[name], column), name


def test_a_dummy_has_nothing_to_copy_that_is_lost() -> None:
    dummy = move(dummy_micro_batch(), torch.device("cpu"))
    assert dummy.is_dummy
    stream = RecordingStream()
    (moved,) = prefetched(lambda _: dummy, 1, stream)
    assert moved.trained.shape == (0,)
    assert torch.equal(moved.model_inputs["input_ids"], dummy.model_inputs["input_ids"])
    assert list(prefetched(lambda _: dummy, 0, stream)) == []
