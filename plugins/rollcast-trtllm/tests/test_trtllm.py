"""The rollout against a recorded server: TensorRT-LLM's HTTP interface on a CPU, with a transformers model behind it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from omegaconf import OmegaConf

import rollcast_trtllm.conf
from rollcast.contracts.rollout import RolloutRequest, RolloutSetup, SamplingParams
from rollcast.errors import CapabilityError, ConfigError, PluginLoadError, RolloutError, WeightSyncError
from rollcast_serving.engines.http_client import RefusedError
from rollcast_testing.rollout import RolloutSuite
from rollcast_testing.rollout_tools import (
    GREEDY,
    generate_all,
    make_prompts,
    only_sequence,
    run_prompts,
    write_model,
)
from rollcast_testing.tiny import tiny_model_folder
from rollcast_trtllm.arguments import build_arguments, server_environment
from rollcast_trtllm.rollout import TrtllmRollout
from rollcast_trtllm.schemas import TrtllmRolloutConfig
from rollcast_trtllm.server.__main__ import control_arguments

STAND_IN = Path(__file__).parent / "stand_in"


@pytest.fixture(scope="module", autouse=True)
def recorded_server() -> Iterator[None]:
    """Puts the stand-in where TensorRT-LLM would be, for this process and its children."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(STAND_IN))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def kill_server(rollout: Any) -> None:
    os.kill(rollout.server.pid, signal.SIGKILL)


class TestTrtllm(RolloutSuite):
    name = "trtllm"
    rollout_config: ClassVar = {"dtype": "float32"}
    shared = True
    kill_engine = kill_server
    mixtures = False  # the stand-in computes dense models

    @pytest.mark.parametrize(
        "sampling",
        [
            SamplingParams(max_tokens=8),
            SamplingParams(temperature=0.7),
            SamplingParams(top_p=0.9),
            SamplingParams(top_k=5),
        ],
        ids=["plain", "temperature", "top_p", "top_k"],
    )
    def test_log_probs_are_those_of_the_sampled_distribution(
        self, rollout: Any, reference: Any, sampling: SamplingParams
    ) -> None:
        """The server's log-probs are those of the plain softmax, so any other distribution is refused."""
        if sampling == SamplingParams(max_tokens=8):
            super().test_log_probs_are_those_of_the_sampled_distribution(rollout, reference, sampling)
            return
        with pytest.raises(CapabilityError, match=r"request '.*TensorRT-LLM's server returns log-probs before"):
            run_prompts(rollout, make_prompts(1), sampling)

    def test_requests_under_way_during_a_weight_update(self, rollout: Any, reference: Any, tmp_path: Path) -> None:
        """The server does not say which weights drew a token: requests in flight end first, and later ones wait."""
        other = [(name, weight.detach() + 1) for name, weight in reference.named_parameters()]
        long = SamplingParams(max_tokens=40, ignore_eos=True)

        async def main() -> list[Any]:
            before = [asyncio.ensure_future(rollout.generate(RolloutRequest(f"b{i}", [5, 6], long))) for i in range(3)]
            await asyncio.sleep(0.05)
            update = asyncio.ensure_future(rollout.update_weights([other], 9))
            await asyncio.sleep(0)
            after = asyncio.ensure_future(rollout.generate(RolloutRequest("a", [5, 6], long)))
            await update
            assert all(task.done() for task in before)
            return [await task for task in [*before, after]]

        *before, after = (only_sequence(output) for output in asyncio.run(main()))
        assert {version for sequence in before for version in sequence.weight_versions} == {0}
        assert set(after.weight_versions) == {9}

    def test_release_and_resume(self, rollout: Any, reference: Any) -> None:
        """The weights' memory is not kept: nothing is generated until an update."""
        prompts = make_prompts(3)
        before = run_prompts(rollout, prompts, GREEDY)

        async def release_and_resume() -> None:
            await rollout.release()
            await rollout.release()
            await rollout.resume()

        asyncio.run(release_and_resume())
        with pytest.raises(WeightSyncError, match="dropped when their memory was released"):
            run_prompts(rollout, prompts, GREEDY)
        asyncio.run(rollout.update_weights([list(reference.named_parameters())], 0))
        after = run_prompts(rollout, prompts, GREEDY)
        assert [only_sequence(each).token_ids for each in after] == [only_sequence(each).token_ids for each in before]

    def test_stop_ids_and_seeds_reach_the_server(self, rollout: Any) -> None:
        sampling = SamplingParams(max_tokens=6, n=3, ignore_eos=True)
        first, second = (generate_all(rollout, [RolloutRequest("r", [5], sampling, seed=4)])[0] for _ in range(2))
        assert first.sequences == second.sequences
        assert len({tuple(each.token_ids) for each in first.sequences}) > 1

    def test_a_control_call_without_the_signature_is_refused(self, rollout: Any) -> None:
        async def forge() -> None:
            await rollout.check_health()
            await rollout._client.post("/update_weights", {"weights": {}})

        with pytest.raises(RefusedError, match="authentication"):
            asyncio.run(forge())

    def test_a_field_that_the_server_does_not_know_is_refused(self, rollout: Any) -> None:
        async def send() -> None:
            await rollout.check_health()
            async for _ in rollout._client.stream("/v1/completions", {"prompt": [5], "min_q": 1}):
                pass

        with pytest.raises(RefusedError, match="extra inputs are not permitted"):
            asyncio.run(send())


def make_setup(folder: Path | str = "nowhere", **keys: Any) -> RolloutSetup:
    return RolloutSetup(TrtllmRolloutConfig(**keys), str(folder), seed=3, pad_token_id=0, eos_token_id=2)


def test_a_folder_without_weights_waits_for_them(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "bare", weights=False)
    rollout = TrtllmRollout(make_setup(folder))
    try:
        with pytest.raises(WeightSyncError, match="has no weights"):
            run_prompts(rollout, [[5]], GREEDY)
    finally:
        rollout.close()
    with pytest.raises(RolloutError, match="closed"):
        run_prompts(rollout, [[5]], GREEDY)


def test_an_argument_that_the_engine_does_not_know_is_told_with_the_log(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny", seed=0)
    rollout = TrtllmRollout(make_setup(folder, engine_kwargs={"shedule": 1}))
    try:
        with pytest.raises(RolloutError, match=r"(?s)did not start.*extra inputs are not permitted: \['shedule'\]"):
            asyncio.run(rollout.check_health())
    finally:
        rollout.close()


def test_arguments() -> None:
    setup = make_setup(max_num_seqs=7, enforce_eager=True)
    arguments = build_arguments(replace(setup, trust_remote_code=True), 512)
    assert arguments["max_batch_size"] == 7
    assert arguments["max_seq_len"] == 512
    assert arguments["cuda_graph_config"] is None
    assert arguments["trust_remote_code"]
    assert "cuda_graph_config" not in build_arguments(make_setup(), 512)
    with pytest.raises(ConfigError, match=r"engine_kwargs\.max_batch_size: set rollout\.max_num_seqs instead"):
        build_arguments(make_setup(engine_kwargs={"max_batch_size": 3}), 512)
    with pytest.raises(ConfigError, match=r"engine_kwargs\.trust_remote_code: set model\.trust_remote_code instead"):
        build_arguments(make_setup(engine_kwargs={"trust_remote_code": True}), 512)
    assert server_environment({"RAY_ADDRESS": "10.0.0.1:6379"})["RAY_ADDRESS"] == "local"


def test_control_is_switched_on_where_it_is_off() -> None:
    class Old:
        def __init__(self, generator: Any, model: str) -> None: ...

    class New(Old):
        def __init__(self, generator: Any, enable_rl_control_endpoints: bool, rl_control_api_key: str) -> None: ...

    assert control_arguments(Old, "key") == {}
    assert control_arguments(New, "key") == {"enable_rl_control_endpoints": True, "rl_control_api_key": "key"}


def test_without_tensorrt_llm_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PluginLoadError, match=r"pip install .*rollout\.replica\.python"):
        TrtllmRollout(make_setup(tmp_path))


def test_config() -> None:
    text = (Path(rollcast_trtllm.conf.__file__).parent / "rollout" / "trtllm.yaml").read_text()
    assert OmegaConf.to_object(OmegaConf.create(text)) == {"name": TrtllmRolloutConfig().name}
    (schema,) = rollcast_trtllm.conf.SCHEMAS
    assert (schema.schema, schema.group, schema.option) == (TrtllmRolloutConfig, "rollout", "trtllm")
    code = "import sys, rollcast_trtllm.conf; sys.exit(bool({'torch', 'aiohttp', 'tensorrt_llm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
