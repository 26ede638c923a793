"""Which device a process computes on, for every combination of variables, switches and ids."""

from __future__ import annotations

import pytest
import torch

from rollcast.contracts import device
from rollcast.contracts.worker import WorkerContext
from rollcast.errors import ResourceError
from rollcast_ray.devices import NOSET_SWITCHES, local_device_index, ray_noset_visible_devices, visible_devices

CUDA, HIP, ROCR, ASCEND = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
)
NOSET = {f"RAY_EXPERIMENTAL_NOSET_{name}": "1" for name in (CUDA, HIP, ROCR, ASCEND)}


@pytest.mark.parametrize(
    ("env", "assigned", "local_rank", "kind", "index"),
    [
        # Ray hides all devices but the process's own.
        ({CUDA: "2"}, ["2"], 2, "GPU", 0),
        ({HIP: "2"}, ["2"], 2, "GPU", 0),
        ({ROCR: "2"}, ["2"], 2, "GPU", 0),
        ({HIP: "2", CUDA: "2"}, ["2"], 2, "GPU", 0),
        ({ASCEND: "5"}, ["5"], 1, "NPU", 0),
        ({"TPU_VISIBLE_CHIPS": "3"}, ["3"], 3, "TPU", 0),
        ({CUDA: "3", ASCEND: "5"}, ["5"], 1, "NPU", 0),
        ({CUDA: "GPU-aa"}, ["GPU-aa"], 2, "GPU", 0),
        # Two devices of its own: the first.
        ({CUDA: "2,3"}, ["2", "3"], 1, "GPU", 0),
        ({CUDA: "2"}, [2], 2, "GPU", 0),
        # Under a switch nothing is hidden, and the id is the number.
        (NOSET, ["3"], 1, "GPU", 3),
        (NOSET, ["6"], 1, "NPU", 6),
        ({}, ["3"], 1, "GPU", 3),
        # ... unless the whole node is restricted; then its place in the list is.
        ({**NOSET, CUDA: "4,5,6,7"}, ["6"], 0, "GPU", 2),
        ({**NOSET, HIP: "4,5,6,7"}, ["7"], 0, "GPU", 3),
        ({**NOSET, ROCR: "4,5"}, ["5"], 0, "GPU", 1),
        ({**NOSET, ASCEND: "7, 1"}, ["1"], 0, "NPU", 1),
        ({**NOSET, CUDA: "GPU-aa,GPU-bb"}, ["GPU-bb"], 0, "GPU", 1),
        # ... or the user chooses other devices.
        ({**NOSET, CUDA: "0,1"}, ["5"], 1, "GPU", 1),
        ({**NOSET, CUDA: "0,1"}, ["5"], 3, "GPU", 1),
        # Without an assignment the local rank decides.
        ({}, [], 3, "GPU", 3),
        ({CUDA: "4,5"}, [], 1, "GPU", 1),
        ({CUDA: "4,5"}, [], 2, "GPU", 0),
        # What hides everything.
        ({CUDA: ""}, ["0"], 0, "GPU", None),
        ({CUDA: "-1"}, [], 0, "GPU", None),
        ({HIP: "NoDevFiles"}, ["0"], 0, "GPU", None),
        ({CUDA: "", HIP: "", ROCR: "0"}, ["0"], 0, "GPU", None),
        ({CUDA: "", HIP: "0"}, ["0"], 0, "GPU", None),
        ({ASCEND: ""}, [], 0, "NPU", None),
    ],
)
def test_the_number_of_the_device(env, assigned, local_rank, kind, index) -> None:
    assert local_device_index(env, assigned, local_rank, kind) == index


@pytest.mark.parametrize(
    ("env", "assigned", "message"),
    [
        ({HIP: "0", CUDA: "1"}, ["0"], "HIP_VISIBLE_DEVICES=0 and CUDA_VISIBLE_DEVICES=1 contradict each other"),
        ({ROCR: "0,1", HIP: "0"}, ["0"], "ROCR_VISIBLE_DEVICES=0,1 renumbers .* HIP_VISIBLE_DEVICES=0"),
        ({ROCR: "0", CUDA: "0"}, ["0"], "CUDA_VISIBLE_DEVICES=0"),
        ({CUDA: "7"}, ["2"], "gave the process device 2, but its environment shows only 7"),
        ({CUDA: "0,-1,2"}, ["2"], "shows only 0;"),  # a driver stops at what it does not know
        ({}, ["GPU-aa"], "GPU-aa, and no variable says which number"),
        # A switch for another kind of device says nothing of this one.
        ({CUDA: "7", f"RAY_EXPERIMENTAL_NOSET_{ASCEND}": "1"}, ["2"], "gave the process device 2"),
    ],
)
def test_contradictions_are_told(env, assigned, message) -> None:
    with pytest.raises(ResourceError, match=message):
        local_device_index(env, assigned)


def test_all_devices_are_visible_where_nothing_is_said() -> None:
    assert visible_devices({}) is None
    assert visible_devices({}, "NPU") is None
    assert visible_devices({CUDA: "1,0"}) == ["1", "0"]
    assert visible_devices({CUDA: "1"}, "unknown kind") is None


@pytest.mark.parametrize("switch", NOSET_SWITCHES)
def test_each_switch_counts(switch) -> None:
    assert ray_noset_visible_devices({switch: "1"})
    assert ray_noset_visible_devices({switch: "True"})
    assert not ray_noset_visible_devices({switch: "0"})
    assert not ray_noset_visible_devices({switch: ""})


def test_switches_are_those_that_ray_reads() -> None:
    kinds = {"CUDA", "HIP", "ROCR", "ASCEND_RT", "HABANA", "NEURON_RT", "TPU", "ONEAPI"}
    assert len(NOSET_SWITCHES) == len(kinds)
    assert all(any(kind in switch for switch in NOSET_SWITCHES) for kind in kinds)


def test_torch_distributed_finds_its_variables() -> None:
    context = WorkerContext(3, 4, 1, 2, "10.0.0.1", 29500)
    assert context.environment() == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }


class _Ascend:
    """What torch_npu adds to torch."""

    emptied = waited = 0

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 4

    def synchronize(self) -> None:
        self.waited += 1

    def empty_cache(self) -> None:
        self.emptied += 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has another accelerator")
def test_an_ascend_device_is_used_like_any_other(monkeypatch) -> None:
    assert device.device_name() == "cpu"
    assert device.local_device(1) == torch.device("cpu")
    module = _Ascend()
    monkeypatch.setattr(torch, "npu", module, raising=False)
    monkeypatch.setattr(torch, "device", lambda name, index=0: f"{name}:{index}")
    monkeypatch.setattr(device, "_chosen", None)
    assert (device.device_name(), device.device_count()) == ("npu", 4)
    assert device.collective_backend() == "cpu:gloo,npu:hccl"
    assert device.local_device(5) == "npu:1"
    device.use_device(3)
    assert device.local_device(0) == "npu:3"
    device.use_device(None)
    assert device.local_device(2) == "npu:2"
    device.synchronize()
    device.empty_cache()
    assert (module.waited, module.emptied) == (1, 1)
