from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import rollcast_sglang.conf
from rollcast.contracts.rollout import EngineNode, RolloutSetup
from rollcast.errors import ConfigError, PluginLoadError
from rollcast_sglang import environment, server_args
from rollcast_sglang.schemas import SglangRolloutConfig
from rollcast_testing.tiny import tiny_model_folder


def test_yaml_holds_the_name_alone() -> None:
    text = (Path(rollcast_sglang.conf.__file__).parent / "rollout" / "sglang.yaml").read_text()
    assert text.startswith("# @package rollout\n")
    assert OmegaConf.to_object(OmegaConf.create(text)) == {"name": SglangRolloutConfig().name}


def test_schema_is_announced() -> None:
    (schema,) = rollcast_sglang.conf.SCHEMAS
    assert (schema.path, schema.group, schema.option) == ("rollout", "rollout", "sglang")
    assert schema.schema is SglangRolloutConfig


def test_config_imports_no_engine() -> None:
    code = "import sys, rollcast_sglang.conf; sys.exit(bool({'torch', 'aiohttp', 'sglang'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that has what is read of SGLang's package."""
    fields = tmp_path / "sglang" / "srt" / "arg_groups" / "field_order.py"
    fields.parent.mkdir(parents=True)
    fields.write_text('NAMES = (\n    "model_path",\n    "chunked_prefill_size",\n    "dtype",\n    "tp_size",\n)\n')
    monkeypatch.setattr(server_args, "find_sglang", lambda: tmp_path / "sglang")
    return fields


def build(tmp_path: Path, gpu: bool = False, **keys: Any) -> dict[str, Any]:
    folder = tiny_model_folder(tmp_path / "model", weights=False)
    setup = RolloutSetup(SglangRolloutConfig(**keys), str(folder), seed=3, pad_token_id=0, eos_token_id=2)
    return server_args.build_server_args(setup, 512, gpu)


@pytest.mark.usefixtures("sglang")
def test_engine_kwargs(tmp_path: Path) -> None:
    assert build(tmp_path, engine_kwargs={"chunked_prefill_size": 8})["chunked_prefill_size"] == 8
    with pytest.raises(ConfigError, match=r"engine_kwargs\.chunk_prefill_size .*did you mean chunked_prefill_size"):
        build(tmp_path, engine_kwargs={"chunk_prefill_size": 8})
    with pytest.raises(ConfigError, match=r"set rollout\.dtype instead"):
        build(tmp_path, engine_kwargs={"dtype": "float16"})
    with pytest.raises(ConfigError, match=r"set rollout\.tensor_model_parallel_size instead"):
        build(tmp_path, engine_kwargs={"tp_size": 2})
    with pytest.raises(ConfigError, match="depends on its value"):
        build(tmp_path, engine_kwargs={"skip_tokenizer_init": False})


@pytest.mark.usefixtures("sglang")
def test_devices_differ_where_they_have_to(tmp_path: Path) -> None:
    cpu, gpu = build(tmp_path), build(tmp_path, gpu=True)
    assert (cpu["device"], cpu["dtype"], cpu["attention_backend"]) == ("cpu", "float32", "torch_native")
    assert "device" not in gpu
    assert (gpu["dtype"], gpu["attention_backend"], gpu["max_total_tokens"]) == ("auto", None, None)
    assert gpu["enable_memory_saver"]
    assert not cpu["enable_memory_saver"]
    assert cpu["load_format"] == gpu["load_format"] == "dummy"  # the folder has no weights


@pytest.mark.usefixtures("sglang")
def test_quantization_loads_and_updates_by_the_same_loader(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "weights")

    def arguments(path: Path, gpu: bool = True, **keys: Any) -> dict[str, Any]:
        config = SglangRolloutConfig(quantization="fp8", **keys)
        return server_args.build_server_args(RolloutSetup(config, str(path), 3, 0, 2), 512, gpu)

    args = arguments(folder)
    assert (args["quantization"], args["load_format"]) == ("fp8", "flash_rl")
    assert "quantization" not in build(tmp_path, gpu=True)
    with pytest.raises(ConfigError, match=r"rollout\.quantization is fp8, but SGLang has no such kernels for a CPU"):
        arguments(folder, gpu=False)
    with pytest.raises(ConfigError, match=r"rollout\.load_format is dummy, .*; set rollout\.load_format to auto"):
        arguments(folder, load_format="dummy")
    with pytest.raises(ConfigError, match=r"model\.path=.*model has none; save the model there"):
        arguments(tmp_path / "model")


def test_sglang_is_missed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(PluginLoadError, match=r"rollout\.replica\.python"):
        environment.find_sglang()


def test_stand_ins_are_for_cpus_without_the_real_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = RolloutSetup(SglangRolloutConfig(), "/model", seed=0, pad_token_id=0, eos_token_id=2)
    base = {"PYTHONPATH": "/mine", "OMP_NUM_THREADS": "3"}
    monkeypatch.setattr(environment, "_is_installed", lambda _: False)
    on_gpu = environment.server_environment(setup, base, gpu=True)
    assert on_gpu["PYTHONPATH"] == "/mine"
    assert "SGLANG_USE_CPU_ENGINE" not in on_gpu
    assert on_gpu["NCCL_CUMEM_ENABLE"] == "-2"
    users = {**base, "NCCL_CUMEM_ENABLE": "1"}
    assert environment.server_environment(setup, users, gpu=True)["NCCL_CUMEM_ENABLE"] == "1"
    on_cpu = environment.server_environment(setup, base, gpu=False)
    *folders, last = on_cpu["PYTHONPATH"].split(os.pathsep)
    assert sorted(path.name for folder in folders for path in Path(folder).iterdir() if path.name[0] != "_") == [
        "sgl_kernel",
        "torchvision",
    ]
    assert last == "/mine"
    assert on_cpu["OMP_NUM_THREADS"] == "3"
    monkeypatch.setattr(environment, "_is_installed", lambda _: True)
    assert environment.server_environment(setup, base, gpu=False)["PYTHONPATH"] == "/mine"


def test_stand_ins_can_be_imported_and_not_called() -> None:
    code = """
from sgl_kernel import silu_and_mul
from sgl_kernel.mamba import causal_conv1d
from torchvision.transforms import InterpolationMode, functional
import torchvision.transforms.v2.functional as v2
table = {InterpolationMode.NEAREST_EXACT: 1}
for name in (silu_and_mul, causal_conv1d, functional.resize, v2.resize):
    try:
        name(1)
    except NotImplementedError as error:
        assert "stand-in" in str(error)
    else:
        raise SystemExit(f"{name} was called")
"""
    folders = [str(environment._STAND_INS / name) for name in ("sgl_kernel", "torchvision")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])}
    result = subprocess.run([sys.executable, "-c", code], env=env, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("keys", "node"),
    [
        ({}, EngineNode()),
        ({"dtype": "bfloat16", "tensor_model_parallel_size": 4, "mem_fraction_static": 0.6}, EngineNode()),
        ({"free_cache_engine": False, "enforce_eager": True, "enable_prefix_caching": False}, EngineNode()),
        ({"enable_weights_cpu_backup": False, "attention_backend": "fa3"}, EngineNode()),
        ({"enable_lora": True, "max_lora_rank": 32}, EngineNode()),
        ({"quantization": "fp8", "max_total_tokens": 4096}, EngineNode()),
        ({"enable_rollout_routing_replay": True}, EngineNode()),
        ({"tensor_model_parallel_size": 16}, EngineNode(1, 2, "h", "a", 5)),
    ],
)
def test_the_installed_sglang_knows_what_it_is_given_on_a_device(
    keys: dict[str, Any], node: EngineNode, tmp_path: Path
) -> None:
    pytest.importorskip("sglang")
    known = server_args._known_arguments(environment.find_sglang())
    assert known
    folder = tiny_model_folder(tmp_path / "model")
    setup = RolloutSetup(SglangRolloutConfig(**keys), str(folder), seed=3, pad_token_id=0, eos_token_id=2, node=node)
    assert set(server_args.build_server_args(setup, 512, gpu=True)) <= set(known)
