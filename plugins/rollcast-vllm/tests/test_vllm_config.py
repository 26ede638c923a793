from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

import rollcast_vllm.conf
from rollcast import build_section
from rollcast.contracts.rollout import EngineNode, RolloutSetup
from rollcast.errors import ConfigError, PluginLoadError
from rollcast_serving.engines.arguments import starts_without_weights
from rollcast_testing.tiny import tiny_model_folder
from rollcast_vllm import engine_args, environment, rollout
from rollcast_vllm.rollout import VllmRollout
from rollcast_vllm.schemas import VllmRolloutConfig

#: Folder of the distributions, of which some have recipes.
RECIPES = Path(__file__).resolve().parents[2]
YAML = Path(rollcast_vllm.conf.__file__).parent / "rollout" / "vllm.yaml"


def make_setup(path: Path | str = "nowhere", **keys: object) -> RolloutSetup:
    return RolloutSetup(VllmRolloutConfig(**keys), str(path), seed=1, pad_token_id=0, eos_token_id=2)  # type: ignore[arg-type]


def test_yaml_holds_the_name_alone() -> None:
    text = YAML.read_text()
    assert text.startswith("# @package rollout\n")
    assert OmegaConf.to_object(OmegaConf.create(text)) == {"name": VllmRolloutConfig().name}


def test_schema_is_announced() -> None:
    (schema,) = rollcast_vllm.conf.SCHEMAS
    assert (schema.path, schema.group, schema.option) == ("rollout", "rollout", "vllm")
    assert schema.schema is VllmRolloutConfig


@pytest.mark.parametrize(
    ("module", "heavy"),
    [("conf", ["torch", "vllm", "transformers"]), ("rollout", ["vllm", "transformers"])],
)
def test_imports_are_light(module: str, heavy: list[str]) -> None:
    code = f"import sys, rollcast_vllm.{module}; sys.exit(', '.join(set({heavy}) & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_vllm_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(PluginLoadError, match=r"pip install .*rollout\.replica\.python"):
        VllmRollout(make_setup())


@pytest.mark.parametrize(
    "keys", [{"sleep_level": 3}, {"max_num_seqs": 0}, {"tensor_model_parallel_size": 0}, {"health_timeout_s": 0}]
)
def test_values_out_of_range_are_refused(keys: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.{next(iter(keys))}"):
        build_section(VllmRolloutConfig, OmegaConf.create(keys), "rollout")


def test_environment_of_a_launcher() -> None:
    variables = VllmRollout.environment(VllmRolloutConfig())
    assert variables["OMP_NUM_THREADS"] == "1"
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "TORCHDYNAMO_DISABLE" not in variables  # on a GPU it would turn compilation off


@pytest.mark.parametrize(
    ("dtype", "on_cpu", "on_gpu"),
    [("auto", "float32", None), ("float", "float32", "float32"), ("bfloat16", "bfloat16", "bfloat16")],
)
def test_dtype_of_the_weights(dtype: Any, on_cpu: str, on_gpu: str | None) -> None:
    config = VllmRolloutConfig(dtype=dtype)
    assert VllmRollout.weight_dtype(config, "", "cpu") == on_cpu
    assert VllmRollout.weight_dtype(config, "", "cuda") == on_gpu


def test_each_tensor_parallel_rank_gets_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 2, 7}, raising=False)
    two = environment.process_environment(VllmRolloutConfig(tensor_model_parallel_size=2))
    assert two["VLLM_CPU_OMP_THREADS_BIND"] == "2|5"
    four = environment.process_environment(VllmRolloutConfig(tensor_model_parallel_size=4))
    assert four["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_only_what_is_unset_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "3"})
    monkeypatch.setattr(environment, "has_gpu", lambda: False)
    environment.prepare_environment(VllmRolloutConfig(), EngineNode())
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
    assert os.environ["VLLM_LOGGING_LEVEL"] == "WARNING"


def test_a_gpu_keeps_its_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(environment, "has_gpu", lambda: True)
    environment.prepare_environment(VllmRolloutConfig(), EngineNode())
    assert "TORCHDYNAMO_DISABLE" not in os.environ


def test_a_folder_without_weights_waits_for_them(tmp_path: Path) -> None:
    bare = tiny_model_folder(tmp_path / "bare", weights=False)
    full = tiny_model_folder(tmp_path / "full")
    assert starts_without_weights(make_setup(bare))
    assert not starts_without_weights(make_setup(Path("some-hub/name")))
    assert not starts_without_weights(make_setup(full))
    assert starts_without_weights(make_setup(full, load_format="dummy"))


def test_capabilities_are_known_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert rollout.VllmRollout.capabilities.lora
    assert rollout.VllmRollout.capabilities.releases_memory


@dataclasses.dataclass
class EngineArgs:
    """vLLM's argument of the key, and any other that rollcast gives."""

    quantization: str | None = None


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments that a stand-in of vLLM is given last."""
    given: dict[str, Any] = {}
    library = ModuleType("vllm")
    library.AsyncEngineArgs = EngineArgs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", library)
    monkeypatch.setattr(EngineArgs, "__init__", lambda self, **values: given.update(values))
    return given


def test_quantization_goes_to_vllm_by_its_own_name(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model_folder(tmp_path / "model")
    monkeypatch.setattr(engine_args, "has_gpu", lambda: True)
    engine_args.build_engine_args(make_setup(folder, quantization="fp8"))
    assert given["quantization"] == "fp8"
    given.clear()
    engine_args.build_engine_args(make_setup(folder))
    assert "quantization" not in given
    engine_args.build_engine_args(make_setup(folder, engine_kwargs={"quantization": "awq"}))  # of a judge, say
    assert given["quantization"] == "awq"
    with pytest.raises(ConfigError, match=r"rollout\.engine_kwargs\.quantization: set rollout\.quantization instead"):
        engine_args.build_engine_args(make_setup(folder, quantization="fp8", engine_kwargs={"quantization": "awq"}))
    monkeypatch.setattr(engine_args, "has_gpu", lambda: False)
    with pytest.raises(ConfigError, match=r"rollout\.quantization is fp8, but vLLM has no such kernels for a CPU"):
        engine_args.build_engine_args(make_setup(folder, quantization="fp8"))


def test_recording_of_experts_goes_to_vllm_by_its_own_name(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model_folder(tmp_path / "model")
    monkeypatch.setattr(engine_args, "has_gpu", lambda: True)
    for asked in (True, False):
        engine_args.build_engine_args(make_setup(folder, enable_rollout_routing_replay=asked))
        assert given["enable_return_routed_experts"] is asked
    monkeypatch.setattr(engine_args, "has_gpu", lambda: False)
    with pytest.raises(ConfigError, match=r"rollout\.enable_rollout_routing_replay is true, but vLLM .* on a GPU only"):
        engine_args.build_engine_args(make_setup(folder, enable_rollout_routing_replay=True))


def test_other_quantizations_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.quantization must be fp8 or null, got 'awq'"):
        build_section(VllmRolloutConfig, OmegaConf.create({"quantization": "awq"}), "rollout")
    assert VllmRollout.capabilities.quantization == {"fp8"}


def test_a_cpus_cache_holds_the_longest_sequence(given: dict[str, Any], tmp_path: Path) -> None:
    def size(**keys: Any) -> int:
        engine_args.build_engine_args(make_setup(tmp_path, **keys))
        return int(given["kv_cache_memory_bytes"])

    least = engine_args.CPU_KV_CACHE_BYTES
    # SmolLM2-135M, of which vLLM wants 0.35 GiB.
    config: dict[str, Any] = {
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
    }
    config["model_type"] = "llama"
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    assert 2 * 4 * 30 * 3 * 64 * 8192 < size() < 1.2 * 2 * 4 * 30 * 3 * 64 * 8192
    assert size(max_model_len=1024) == least
    assert size(kv_cache_memory_bytes=1 << 20) == 1 << 20


@pytest.fixture(scope="module")
def built_on_cuda() -> Callable[[Sequence[dict[str, Any]]], list[dict[str, Any]]]:
    """Return a function that builds vLLM's configuration as on an H100."""
    if find_spec("vllm") is None:
        pytest.skip("vllm is not installed")

    def build(settings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        script = str(Path(__file__).with_name("vllm_on_cuda.py"))
        done = subprocess.run(
            [sys.executable, script], check=False, capture_output=True, text=True, input=json.dumps(settings)
        )
        assert done.returncode == 0, done.stderr[-3000:]
        answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
        return answers

    return build


def test_vllm_builds_its_configuration_for_a_device(built_on_cuda: Any) -> None:
    """In one process, because it takes long to start."""
    recipes = sorted(RECIPES.glob("*/src/*/conf/recipe/*.yaml"))
    rollouts = {path.stem: yaml.safe_load(path.read_text()).get("rollout", {}) for path in recipes}
    keys = {field.name for field in dataclasses.fields(VllmRolloutConfig)}
    # Of a recipe for another rollout, what vLLM would be given if it were chosen.
    of_recipes = [{key: value for key, value in rollout.items() if key in keys} for rollout in rollouts.values()]
    plain, eager, adapters, fp8, two_nodes, *chosen = built_on_cuda(
        [
            {},
            {"free_cache_engine": False, "enforce_eager": True},
            {"enable_lora": True, "max_lora_rank": 32},
            {"quantization": "fp8", "kv_cache_memory_bytes": 1 << 30},
            {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2, "node": [1, 2, "h", "a", 5]},
            *of_recipes,
        ]
    )
    assert plain == {
        "worker": "vllm.v1.worker.gpu_worker.Worker",
        "world_size": 1,
        "nodes": 1,
        "sleeps": True,
        "dtype": "bfloat16",
        "share": VllmRolloutConfig().gpu_memory_utilization,
        "graphs": "FULL_AND_PIECEWISE",
        "cache_bytes": None,
        "max_lora_rank": None,
        "extension": "rollcast_vllm.worker.WeightsExtension",
    }
    assert (eager["sleeps"], eager["graphs"]) == (False, "NONE")
    assert adapters["max_lora_rank"] == 32
    assert fp8["cache_bytes"] == 1 << 30
    assert (two_nodes["nodes"], two_nodes["world_size"]) == (2, 8)
    for name, given_keys, built in zip(rollouts, of_recipes, chosen, strict=True):
        assert built["world_size"] == given_keys.get("tensor_model_parallel_size", 1), name
        assert built["share"] == given_keys.get("gpu_memory_utilization", plain["share"]), name
        assert built["dtype"] == given_keys.get("dtype", "bfloat16"), name


@pytest.mark.parametrize(
    ("keys", "node"),
    [
        ({}, EngineNode()),
        ({"dtype": "bfloat16", "tensor_model_parallel_size": 4, "gpu_memory_utilization": 0.6}, EngineNode()),
        ({"free_cache_engine": False, "enforce_eager": True, "use_request_seeds": False}, EngineNode()),
        ({"enable_lora": True, "max_lora_rank": 32}, EngineNode()),
        ({"quantization": "fp8", "kv_cache_memory_bytes": 1 << 30}, EngineNode()),
        ({"enable_rollout_routing_replay": True}, EngineNode()),
        ({"tensor_model_parallel_size": 2, "data_parallel_size": 2, "expert_parallel_size": 4}, EngineNode()),
        ({"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 2}, EngineNode(1, 2, "h", "a", 5)),
        ({"tensor_model_parallel_size": 8, "data_parallel_size": 2}, EngineNode(0, 2, "h", "a", 5)),
    ],
)
def test_the_installed_vllm_takes_what_it_is_given_on_a_device(
    keys: dict[str, Any], node: EngineNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = pytest.importorskip("vllm")
    monkeypatch.setattr(engine_args, "has_gpu", lambda: True)
    setup = dataclasses.replace(make_setup(tiny_model_folder(tmp_path / "model"), **keys), node=node)
    for takes_images in (False, True):
        built = engine_args.build_engine_args(setup, takes_images)  # a dataclass, which takes no unknown argument
        assert isinstance(built, vllm.AsyncEngineArgs)
        assert built.enable_sleep_mode is keys.get("free_cache_engine", True)
        assert built.enforce_eager is keys.get("enforce_eager", False)
        assert built.tensor_parallel_size == keys.get("tensor_model_parallel_size", 1)
