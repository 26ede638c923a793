from __future__ import annotations

import asyncio
import os
import signal
from collections import UserList
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from rollcast.contracts.rollout import RolloutRequest, SamplingParams
from rollcast.errors import RequestError, WeightSyncError
from rollcast_serving.in_flight import hold_requests
from rollcast_testing.rollout import RolloutSuite
from rollcast_testing.rollout_tools import (
    GREEDY,
    all_tokens,
    greedy_tokens,
    load_model,
    make_prompts,
    only_sequence,
    run_prompts,
    write_model,
)

psutil = pytest.importorskip("psutil")
pytest.importorskip("sglang")


def kill_scheduler(rollout: Any) -> None:
    """Kill the process that computes, which is not the one that answers HTTP."""
    (scheduler,) = [each for each in psutil.Process(rollout.server.pid).children() if "scheduler" in each.name()]
    os.kill(scheduler.pid, signal.SIGKILL)


class TestSglang(RolloutSuite):
    name = "sglang"
    rollout_config: ClassVar = {"max_running_requests": 64}
    lora_config: ClassVar = {"enable_lora": True, "max_lora_rank": 4}
    shared = True
    kill_engine = kill_scheduler

    def check_greedy(self, rollout: Any, model: Any, prompts: list[list[int]]) -> None:
        for prompt, output in zip(prompts, run_prompts(rollout, prompts, GREEDY), strict=True):
            sequence = only_sequence(output)
            assert list(sequence.token_ids) == greedy_tokens(model, prompt, GREEDY.max_tokens)
            self.check_log_probs(model, prompt, sequence, replace(GREEDY, temperature=1.0))

    def test_interrupted_requests_go_on_with_the_new_weights(
        self, rollout: Any, reference: Any, tmp_path: Path
    ) -> None:
        held = hold_requests(rollout, "interrupt")
        self.test_requests_under_way_during_a_weight_update(held, reference, tmp_path)

    def test_an_update_forgets_cached_prompts(self, rollout: Any, reference: Any, tmp_path: Path) -> None:
        """The same long prompt before and after: its keys and values are not those of the old weights."""
        generator = torch.Generator().manual_seed(0)
        prompts = [torch.randint(4, 80, (200,), generator=generator).tolist()]
        self.check_greedy(rollout, reference, prompts)
        self.check_greedy(rollout, reference, prompts)
        other = load_model(write_model(tmp_path / "other", seed=1))
        asyncio.run(rollout.update_weights([list(other.named_parameters())], 1))
        self.check_greedy(rollout, other, prompts)

    def test_a_tied_weight_may_come_by_the_head_s_name_alone(self, rollout: Any, tmp_path: Path) -> None:
        """SGLang passes over a tied head, so that the embedding would stay the old one."""
        other = load_model(write_model(tmp_path / "other", seed=1))
        named = [
            ("lm_head.weight" if name == "model.embed_tokens.weight" else name, weight)
            for name, weight in other.named_parameters()
        ]
        assert "lm_head.weight" in dict(named)
        asyncio.run(rollout.update_weights([named], 1))
        self.check_greedy(rollout, other, make_prompts(4))

    def test_tied_weights_have_to_be_equal(self, rollout: Any, reference: Any) -> None:
        named = [*reference.named_parameters(), ("lm_head.weight", reference.lm_head.weight + 1)]
        with pytest.raises(WeightSyncError, match=r"embed_tokens.*lm_head"):
            asyncio.run(rollout.update_weights([named], 1))

    def test_buckets_that_can_be_pickled_are_read_by_the_scheduler(self, rollout: Any, tmp_path: Path) -> None:
        other = load_model(write_model(tmp_path / "other", seed=1))
        named = [(name, weight.detach()) for name, weight in other.named_parameters()]
        report = asyncio.run(rollout.update_weights(UserList([named[:3], named[3:]]), 5))
        assert (report.version, report.tensors, sorted(report.checksums)) == (5, len(named), ["0", "1"])
        self.check_greedy(rollout, other, make_prompts(4))

    def test_a_source_that_fails_half_way(self, rollout: Any, reference: Any) -> None:
        named = list(reference.named_parameters())

        def source() -> Iterator[list[tuple[str, torch.Tensor]]]:
            yield named[:3]
            raise OSError("the sender went away")

        with pytest.raises(WeightSyncError, match="the sender went away"):
            asyncio.run(rollout.update_weights(source(), 1))
        with pytest.raises(WeightSyncError, match="version 1 failed"):
            run_prompts(rollout, [[5]], GREEDY)
        asyncio.run(rollout.update_weights([named], 2))
        self.check_greedy(rollout, reference, make_prompts(2))

    def test_release_and_resume_in_any_order(self, rollout: Any) -> None:
        """What is released twice or resumed without a release harms nothing; requests wait meanwhile."""
        prompts = make_prompts(2)
        before = all_tokens(run_prompts(rollout, prompts, GREEDY))

        async def juggle() -> list[int]:
            await rollout.resume()
            await rollout.release(["kv_cache"])
            await rollout.release()
            await rollout.check_health()
            task = asyncio.create_task(rollout.generate(RolloutRequest("waits", prompts[0], GREEDY)))
            await rollout.resume(["weights"])
            await asyncio.sleep(0.3)
            assert not task.done()
            await rollout.resume()
            await rollout.resume()
            return list(only_sequence(await task).token_ids)

        assert asyncio.run(juggle()) == before[0]
        assert all_tokens(run_prompts(rollout, prompts, GREEDY)) == before

    def test_a_cancelled_caller_takes_the_request_back(self, rollout: Any) -> None:
        sampling = SamplingParams(max_tokens=490, ignore_eos=True)

        async def cancel() -> list[Any]:
            task = asyncio.create_task(rollout.generate(RolloutRequest("gone", [5], sampling)))
            await rollout.generate(RolloutRequest("beside", [5], replace(sampling, max_tokens=3)))
            (job,) = rollout._jobs
            task.cancel()
            while not job.rows[0].is_over:
                await asyncio.sleep(0.01)
            return [task.cancelled(), job.rows[0].sequence.finish_reason]

        assert asyncio.run(cancel()) == [True, "abort"]

    def test_all_positions_can_be_used(self, rollout: Any) -> None:
        """SGLang would cut the last tokens off a sequence as long as its context, and say nothing."""
        sampling = SamplingParams(max_tokens=500, ignore_eos=True)
        (output,) = run_prompts(rollout, [[5] * 12], sampling)
        assert len(only_sequence(output).token_ids) == 500
        with pytest.raises(RequestError, match="max_position_embeddings"):
            run_prompts(rollout, [[5] * 13], sampling)

    def test_stop_tokens_count_without_eos(self, rollout: Any, reference: Any) -> None:
        """SGLang's ``ignore_eos`` would ignore them too."""
        (prompt,) = make_prompts(1)
        expected = greedy_tokens(reference, prompt, GREEDY.max_tokens)
        sampling = replace(GREEDY, stop_token_ids=(expected[3],), ignore_eos=True)
        (output,) = run_prompts(rollout, [prompt], sampling)
        assert list(only_sequence(output).token_ids) == expected[: expected.index(expected[3]) + 1]

    def test_two_ranks(self, model_folder: Path, reference: Any, tmp_path: Path) -> None:
        """Tensor parallel, in bfloat16, which is what SGLang's CPU communication has; also after an update."""
        rollout: Any = self.build_rollout(model_folder, tensor_model_parallel_size=2, dtype="bfloat16")
        other = load_model(write_model(tmp_path / "other", seed=1))
        try:
            for model in (reference, other):
                if model is other:
                    asyncio.run(rollout.update_weights([list(other.named_parameters())], 1))
                agreeing = 0
                for prompt, output in zip(
                    make_prompts(12), run_prompts(rollout, make_prompts(12), GREEDY), strict=True
                ):
                    got = list(only_sequence(output).token_ids)
                    agreeing += got[0] == greedy_tokens(model, prompt, 1)[0]
                assert agreeing >= 10
        finally:
            rollout.close()

    def test_the_scheduler_s_limit_is_the_load_s(self, rollout: Any) -> None:
        run_prompts(rollout, make_prompts(3), GREEDY)
        assert asyncio.run(rollout.report_load()).limit == 64
