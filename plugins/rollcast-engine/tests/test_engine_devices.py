"""An engine's device and random state on an accelerator that is neither CUDA nor known to rollcast."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rollcast.contracts import device as device_contract
from rollcast.contracts.device import Device, devices
from rollcast.contracts.engine import EngineSetup
from rollcast.contracts.worker import WorkerContext
from rollcast_engine.base import TorchEngine
from rollcast_engine.rng import capture_rng, restore_rng


class Accelerator(ModuleType):
    """A module such as ``torch.npu``, with two devices."""

    def __init__(self) -> None:
        super().__init__("tp_accelerator")
        self.selected: Any = None
        self.state = torch.zeros(4, dtype=torch.uint8)

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def set_device(self, device: Any) -> None:
        self.selected = device

    def get_rng_state(self) -> torch.Tensor:
        return self.state.clone()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.state = state.clone()


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    module = Accelerator()
    parent = ModuleType("tp_torch")
    parent.xla = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tp_torch", parent)
    kind = Device("xla", "tp_torch.xla", resource="TPU")
    get, names = devices.get, devices.names
    monkeypatch.setattr(devices, "names", lambda: ["xla", *names()])
    monkeypatch.setattr(devices, "get", lambda name, *rest, **more: kind if name == "xla" else get(name, *rest, **more))
    return module


def test_the_random_state_of_any_accelerator(accelerator: Accelerator) -> None:
    accelerator.state = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    state = capture_rng()
    drawn = torch.rand(3)
    accelerator.state = torch.zeros(4, dtype=torch.uint8)
    restore_rng(state)
    assert accelerator.state.tolist() == [1, 2, 3, 4]
    assert torch.equal(torch.rand(3), drawn)
    del state["xla"]  # saved on another kind of device
    accelerator.state = torch.zeros(4, dtype=torch.uint8)
    restore_rng(state)
    assert accelerator.state.tolist() == [0, 0, 0, 0]


def test_a_rank_computes_on_its_own_device(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_contract, "_chosen", None)
    setup = EngineSetup("language_model", cast("Any", None), None, None, WorkerContext(local_rank=1))
    engine = SimpleNamespace(setup=setup, device=None)
    TorchEngine.use_local_device(cast("Any", engine))
    assert accelerator.selected == torch.device("xla", 1)
    assert engine.device == torch.device("xla", 1)
