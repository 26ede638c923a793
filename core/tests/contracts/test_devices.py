"""Kinds of devices: those of the core, and one of another distribution."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch

from rollcast.contracts import device
from rollcast.errors import ConfigError


def test_the_core_knows_four_devices() -> None:
    assert device.devices.names() == ("cpu", "cuda", "npu", "xpu")
    backends = {name: device.devices.get(name).collective for name in device.devices}
    assert backends == {"cpu": "gloo", "cuda": "nccl", "npu": "hccl", "xpu": "xccl"}
    resources = {name: device.devices.get(name).resource for name in device.devices}
    assert resources == {"cpu": "", "cuda": "GPU", "npu": "NPU", "xpu": "GPU"}


def test_an_unknown_device_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"placement\.device is 'tpu'; valid: auto, cpu, cuda, npu, xpu"):
        device.find_device("tpu")
    assert device.find_device("npu") is device.NPU


def test_a_process_on_the_cpu_sees_no_accelerator() -> None:
    assert device.hide_accelerators() == {
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
        "ASCEND_RT_VISIBLE_DEVICES": "",
        "ONEAPI_DEVICE_SELECTOR": "*:cpu",
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has another accelerator")
def test_a_device_of_another_distribution_is_used_like_any_other(make_dist, monkeypatch) -> None:
    source = """
        from rollcast.contracts.device import Device

        DEVICE = Device("abacus", "tp_abacus_torch.beads", "beads", "BEADS", ("BEADS_VISIBLE",), {"BEADS_VISIBLE": ""})
    """
    beads = """
        class beads:
            waited = 0
            is_available = staticmethod(lambda: True)
            device_count = staticmethod(lambda: 2)

            @classmethod
            def synchronize(cls):
                cls.waited += 1
    """
    files = {"tp_abacus.py": source, "tp_abacus_torch.py": beads}
    make_dist("abacus", {"rollcast.devices": {"abacus": "tp_abacus:DEVICE"}}, files)
    assert (device.device_name(), device.device_count()) == ("abacus", 2)
    assert device.find_device("auto").resource == "BEADS"
    assert device.configured_device("auto") == "abacus"
    assert device.collective_backend() == "cpu:gloo,abacus:beads"
    assert device.hide_accelerators()["BEADS_VISIBLE"] == ""
    device.synchronize()
    import tp_abacus_torch

    assert tp_abacus_torch.beads.waited == 1


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no device files")
def test_a_machine_without_device_files_is_known_without_torch(tmp_path) -> None:
    none, some = (dataclasses.replace(device.CUDA, files=(str(tmp_path / name),)) for name in ("bead*", "*"))
    (tmp_path / "node0").touch()
    assert (none.may_exist(), some.may_exist()) == (False, True)
    assert dataclasses.replace(none, files=()).may_exist()


def test_an_unknown_device_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"placement.device is 'abacuss'; valid: auto, "):
        device.configured_device("abacuss")
