"""Compiled layers compute what the others do; kernels that cannot run here are refused with the reason."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsdp_scenarios as scenarios
import loading_scenarios as loading
import pytest
import torch
import torch._dynamo.utils
from torch import nn

from rollcast.contracts.engine import EngineSetup, ForwardSettings, ModelConfig
from rollcast.errors import ConfigError
from rollcast_fsdp.engine import FsdpEngine
from rollcast_fsdp.kernels import apply_liger, compile_layers
from rollcast_fsdp.schemas import FsdpConfig
from rollcast_testing.tiny import random_batch

ALONE = scenarios.ALONE


def test_compiled_layers_compute_the_same(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a backend that generates no code, which would take minutes; graphs are captured all the same."""
    compile_module, compiled = nn.Module.compile, []

    def without_code(self: nn.Module, *args: Any, **options: Any) -> None:
        compiled.append(type(self).__name__)
        compile_module(self, *args, backend="aot_eager", **options)

    monkeypatch.setattr(nn.Module, "compile", without_code)
    engine = scenarios.build(ALONE, model_folder, use_torch_compile=True)
    plain = scenarios.build(ALONE, model_folder)
    assert compiled == ["Qwen2DecoderLayer"] * 2
    for given, expected in zip(loading.steps(engine, ALONE, 2), loading.steps(plain, ALONE, 2), strict=True):
        assert given == pytest.approx(expected, rel=1e-5)
    prompt = torch.tensor([[5, 6, 7]])
    with engine.in_process_module() as module, plain.in_process_module() as other:
        ours, theirs = (
            each.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False)  # type: ignore[operator]
            for each in (module, other)
        )
    assert torch.equal(ours, theirs)


def test_packs_of_any_length_and_number_of_rows_are_compiled_once(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compile_module(self, backend="eager", **options))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    engine = scenarios.build(ALONE, model_folder, use_torch_compile=True, use_remove_padding=True)
    graphs = []
    for step in range(6):
        batch = random_batch(2 + step, 5 + 2 * step, 7 + 3 * step, seed=step)
        with engine.train_mode():
            engine.train_batch(batch, scenarios.nll, ForwardSettings())
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    # The first length may happen to be that of another dimension, which makes a second set of graphs.
    assert len(set(graphs[1:])) == 1, f"graphs after each batch: {graphs}"


def test_compiling_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"use_torch_compile is true, but .* needs a C\+\+ compiler"):
        compile_layers([], torch.device("cpu"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs Triton, which is not installed"):
        compile_layers([], torch.device("cuda"))


def test_compiling_and_shared_prompts_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"share_prompts is true, and so is actor\.engine\.use_torch_compile"):
        FsdpConfig(use_torch_compile=True, share_prompts=True).check(1)


def test_liger_needs_a_gpu_and_liger(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelConfig(path=str(model_folder), use_liger=True)
    engine = FsdpEngine(EngineSetup("language_model", model, FsdpConfig(), None, ALONE))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"model\.use_liger is true, but .* need a CUDA device, and this is cpu"):
            engine.initialize()
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ConfigError, match=r"Liger cannot be imported .*pip install 'rollcast-fsdp\[liger\]'"):
        apply_liger(nn.Module(), torch.device("cuda"))


def test_liger_computes_the_same() -> None:
    """Its kernels run in Triton's interpreter; that they compile for a device, the dry run shows."""
    pytest.importorskip("triton")
    pytest.importorskip("liger_kernel")
    script = Path(__file__).with_name("liger_interpreted.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(script), "qwen2", "qwen3", "llama"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = {"rms_norm_forward", "rms_norm_backward", "swiglu_forward", "swiglu_backward", "triton_rope"}
    for model in json.loads(done.stdout.splitlines()[-1]).values():
        assert {name.strip("_").removesuffix("_kernel") for name in model["kernels"]} == kernels
        assert model["logits"] < 1e-5
        assert model["gradients"] < 1e-5
