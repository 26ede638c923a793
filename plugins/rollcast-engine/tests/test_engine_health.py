"""Health checks of torch, of extensions compiled against it, and of model folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rollcast.contracts.health import Finding, HealthSetup
from rollcast_engine import health
from rollcast_engine.health import ModelCheck, TorchCheck, check_extensions
from rollcast_testing import HealthCheckSuite


class TestTorch(HealthCheckSuite):
    name = "torch"


class TestModel(HealthCheckSuite):
    name = "model"
    faults = (({"model": {"path": "/nowhere"}}, "folder"),)
    configs = ({"model": {"path": "made/later"}, "data": {"preprocess": "task"}},)


def test_a_distribution_for_another_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "tp_kernels-1.0.dist-info"
    info.mkdir()
    text = "Metadata-Version: 2.1\nName: tp-kernels\nVersion: 1.0\nRequires-Dist: torch==1.2\n"
    (info / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    (found,) = [each for each in check_extensions(str(torch.__version__)) if each.name == "tp-kernels"]
    assert found.state == "problem"
    assert "built for torch==1.2" in found.message
    assert "pip install --upgrade tp-kernels" in found.fix


def test_a_library_with_symbols_of_another_abi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "tp_abi-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tp-abi\nVersion: 1.0\nRequires-Dist: torch\n")
    (info / "RECORD").write_text("tp_abi.so,,\ntp_fine.so,,\n")
    for name in ("tp_abi.so", "tp_fine.so"):
        (tmp_path / name).touch()
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(path: str, mode: int) -> None:
        if path.endswith("tp_abi.so"):
            raise OSError(f"{path}: undefined symbol: _ZN3c106ivalue")
        raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(health.ctypes, "CDLL", load)
    (found,) = [each for each in check_extensions(str(torch.__version__)) if each.name == "tp-abi"]
    assert "undefined symbol" in found.message
    assert "--no-cache-dir tp-abi" in found.fix


def named(check: Any, config: Any = None) -> dict[str, Finding]:
    return {each.name: each for each in check.run(HealthSetup(config))}


def test_a_missing_device() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a device")
    found = named(TorchCheck(), {"placement": {"device": "cuda"}})["devices"]
    assert found.state == "problem"
    assert "placement.device" in found.fix


def test_gloo_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no interface\nmore")

    monkeypatch.setattr(torch.distributed, "init_process_group", fail)
    found = named(TorchCheck())["gloo"]
    assert found.state == "problem"
    assert found.message.endswith("no interface")
    assert "GLOO_SOCKET_IFNAME" in found.fix


def test_a_model_folder(tmp_path: Path) -> None:
    config = {"model": {"path": str(tmp_path)}}
    assert named(ModelCheck(), config)["config.json"].state == "problem"
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["TinyForCausalLM"]}))
    found = named(ModelCheck(), config)
    assert found["config.json"].state == "ok"
    assert (found["weights"].state, found["tokenizer"].state) == ("problem", "problem")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-1.safetensors").touch()
    assert "lacks 1 of its weight files, such as model-2.safetensors" in named(ModelCheck(), config)["weights"].message
    (tmp_path / "model-2.safetensors").touch()
    (tmp_path / "tokenizer.json").touch()
    assert {each.state for each in named(ModelCheck(), config).values()} == {"ok"}
