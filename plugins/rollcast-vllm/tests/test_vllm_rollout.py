"""One engine for all of these."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_tools import LONG, SHORT, TOLERANCE, FolderBuckets, gap_to, require_versions, under_way

from rollcast.contracts.rollout import RolloutRequest, SamplingParams
from rollcast.contracts.weights import AdapterWeights
from rollcast.errors import CapabilityError, RequestError, RolloutError, WeightSyncError
from rollcast_serving.in_flight import hold_requests
from rollcast_testing.rollout_tools import (
    GREEDY,
    all_tokens,
    generate_all,
    greedy_tokens,
    make_prompts,
    only_sequence,
    run_prompts,
)
from rollcast_vllm.rollout import VllmRollout

pytest.importorskip("vllm")

#: Longer than a block of vLLM's cache, so that it can be used again.
LONG_PROMPT = torch.randint(4, 80, (300,), generator=torch.Generator().manual_seed(1)).tolist()


def named(model: Any) -> list[tuple[str, torch.Tensor]]:
    return list(model.named_parameters())


def check_greedy(rollout: VllmRollout, model: Any, prompts: list[list[int]] | None = None) -> None:
    prompts = prompts or make_prompts(6)
    assert all_tokens(run_prompts(rollout, prompts, GREEDY)) == [greedy_tokens(model, p, 12) for p in prompts]


def unfinished(rollout: VllmRollout) -> int:
    count: int = rollout._llm.output_processor.get_num_unfinished_requests()
    return count


@pytest.mark.parametrize("clear", [True, False], ids=["as-it-is", "without-the-reset"])
def test_no_keys_and_values_of_old_weights(
    rollout: VllmRollout, models: list[Any], monkeypatch: pytest.MonkeyPatch, clear: bool
) -> None:
    """Running requests and cached prompts are computed anew; without that, both checks see stale keys and values."""
    require_versions(rollout)
    pause = rollout._llm.pause_generation
    monkeypatch.setattr(
        rollout._llm, "pause_generation", lambda mode, clear_cache: pause(mode=mode, clear_cache=clear and clear_cache)
    )
    prompts = make_prompts(4)

    async def update_meanwhile() -> list[Any]:
        await rollout.generate(RolloutRequest("fills the cache", LONG_PROMPT, GREEDY))
        tasks = await under_way(rollout, prompts)
        await rollout.update_weights([named(models[1])], 1)
        again = await rollout.generate(RolloutRequest("finds it", LONG_PROMPT, SamplingParams(max_tokens=8)))
        return [*await asyncio.gather(*tasks), again]

    *running, cached = (only_sequence(output) for output in asyncio.run(update_meanwhile()))
    versions = dict(enumerate(models))
    assert any(len(set(sequence.weight_versions)) == 2 for sequence in running)
    running_gap = max(gap_to(versions, prompt, each) for prompt, each in zip(prompts, running, strict=True))
    cached_gap = gap_to(versions, LONG_PROMPT, cached)
    assert set(cached.weight_versions) == {1}
    if clear:
        assert max(running_gap, cached_gap) <= TOLERANCE
    else:
        assert min(running_gap, cached_gap) > 100 * TOLERANCE


def test_a_vllm_that_states_no_versions_gets_updates_between_requests(
    rollout: VllmRollout, models: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vLLM before 0.32 gets."""
    monkeypatch.setattr(rollout, "capabilities", replace(rollout.capabilities, update_in_flight=False))
    held, prompts = hold_requests(rollout, "continue"), make_prompts(4)

    async def update_meanwhile() -> list[Any]:
        tasks = await under_way(held, prompts)
        update = asyncio.ensure_future(held.update_weights([named(models[1])], 1))
        await asyncio.sleep(0.05)
        late = asyncio.ensure_future(held.generate(RolloutRequest("late", prompts[0], GREEDY)))
        found = [*await asyncio.gather(*tasks), await late]
        await update
        return found

    *running, late = (only_sequence(output) for output in asyncio.run(update_meanwhile()))
    versions = dict(enumerate(models))
    for prompt, sequence in zip([*prompts, prompts[0]], [*running, late], strict=True):
        assert set(sequence.weight_versions) == {int(sequence is late)}
        assert gap_to(versions, prompt, sequence) <= TOLERANCE


def test_vllm_alone_keeps_a_tied_head(rollout: VllmRollout, models: list[Any], folders: list[Path]) -> None:
    """What the update has to repair: vLLM's own reload leaves the head with the old embedding."""

    async def reload() -> None:
        llm = rollout._llm
        await llm.pause_generation(mode="keep", clear_cache=True)
        await llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folders[1])})
        await llm.resume_generation()

    asyncio.run(rollout._engine.run(reload()))
    prompts = make_prompts(6)
    wrong = all_tokens(run_prompts(rollout, prompts, GREEDY))
    assert wrong != [greedy_tokens(models[1], prompt, 12) for prompt in prompts]
    asyncio.run(rollout.update_weights([named(models[1])], 2))
    check_greedy(rollout, models[1])


def test_prefix_caching_changes_no_answer(rollout: VllmRollout, models: list[Any]) -> None:
    prompts = [[*LONG_PROMPT[:280], 5 + i] for i in range(4)]
    first = run_prompts(rollout, prompts, GREEDY)
    second = run_prompts(rollout, prompts, GREEDY)
    check_greedy(rollout, models[0], prompts)
    for one, two in zip(first, second, strict=True):
        assert only_sequence(one).log_probs == pytest.approx(only_sequence(two).log_probs, abs=TOLERANCE)


def test_buckets_that_can_be_pickled_are_read_by_the_engine(
    rollout: VllmRollout, models: list[Any], folders: list[Path]
) -> None:
    report = asyncio.run(rollout.update_weights(FolderBuckets(folders[1]), 4))
    assert (report.version, report.tensors) == (4, len(named(models[1])))
    assert report.bytes == sum(tensor.nbytes for _, tensor in named(models[1]))
    assert len(report.checksums) == -(-report.tensors // 5)
    assert 0 < report.load_seconds <= report.seconds
    check_greedy(rollout, models[1])


def test_a_changed_tensor_is_found_in_the_engine(rollout: VllmRollout, models: list[Any], folders: list[Path]) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(WeightSyncError, match="is corrupt") as caught:
        asyncio.run(rollout.update_weights(FolderBuckets(folders[1], spoil=name), 4))
    assert caught.value.tensor == name
    with pytest.raises(WeightSyncError, match=r"update .* version 4 failed.*generation is blocked"):
        generate_all(rollout, [SHORT])
    asyncio.run(rollout.update_weights(FolderBuckets(folders[1]), 5))
    check_greedy(rollout, models[1])


def test_a_bucket_may_lie_where_the_one_before_lay(rollout: VllmRollout, models: list[Any]) -> None:
    """A layer's tensors come in several buckets, and vLLM keeps the first until it has the last."""
    report = asyncio.run(rollout.update_weights(([each] for each in named(models[1])), 2))
    assert len(report.checksums) == report.tensors == len(named(models[1]))
    check_greedy(rollout, models[1])


def test_both_ways_report_the_same(rollout: VllmRollout, folders: list[Path]) -> None:
    from safetensors.torch import load_file

    tensors = list(load_file(folders[0] / "model.safetensors").items())
    parts = [tensors[start : start + 5] for start in range(0, len(tensors), 5)]
    pickled, sent = (asyncio.run(rollout.update_weights(each, 1)) for each in (FolderBuckets(folders[0]), parts))
    assert replace(pickled, seconds=0, load_seconds=0) == replace(sent, seconds=0, load_seconds=0)


def test_a_failing_source_fails_the_update_and_the_requests_under_way(rollout: VllmRollout, models: list[Any]) -> None:
    require_versions(rollout)

    def source() -> Any:
        yield named(models[1])[:7]
        raise OSError("the sender is gone")

    async def fail_meanwhile() -> list[Any]:
        tasks = await under_way(rollout, make_prompts(3))
        with pytest.raises(WeightSyncError, match="the sender is gone"):
            await rollout.update_weights(source(), 1)
        return await asyncio.gather(*tasks, return_exceptions=True)

    answers = asyncio.run(fail_meanwhile())
    assert all(isinstance(answer, WeightSyncError) for answer in answers), answers
    assert unfinished(rollout) == 0
    asyncio.run(rollout.update_weights([named(models[0])], 2))
    check_greedy(rollout, models[0])


def test_tied_weights_with_different_values_are_refused(rollout: VllmRollout, models: list[Any]) -> None:
    head = ("lm_head.weight", models[0].lm_head.weight.detach() + 1)
    with pytest.raises(WeightSyncError, match=r"embed_tokens.*lm_head\.weight.*different values"):
        asyncio.run(rollout.update_weights([named(models[0]), [head]], 1))
    only_head = [(name if "embed" not in name else "lm_head.weight", value) for name, value in named(models[0])]
    asyncio.run(rollout.update_weights([only_head], 2))
    check_greedy(rollout, models[0])


def test_abort_comes_back_with_what_there_is(rollout: VllmRollout, models: list[Any]) -> None:
    async def abort_all() -> list[Any]:
        tasks = await under_way(rollout, make_prompts(3))
        several = asyncio.create_task(rollout.generate(RolloutRequest("n", [5, 6], replace(LONG, n=3))))
        await rollout.generate(SHORT)
        fresh = asyncio.create_task(rollout.generate(RolloutRequest("fresh", [5], LONG)))
        await asyncio.sleep(0)
        await rollout.abort()
        return await asyncio.gather(*tasks, several, fresh)

    outputs = asyncio.run(abort_all())
    for output in outputs:
        for sequence in output.sequences:
            assert sequence.finish_reason == "abort"
            assert len(sequence.token_ids) == len(sequence.log_probs) == len(sequence.weight_versions) < 400
    assert len(outputs[3].sequences) == 3
    assert all(len(only_sequence(output).token_ids) > 0 for output in outputs[:3])
    first = only_sequence(outputs[0])
    assert gap_to({0: models[0]}, make_prompts(3)[0], first) <= TOLERANCE
    assert unfinished(rollout) == 0


def test_a_cancelled_caller_takes_its_request_back(rollout: VllmRollout) -> None:
    async def cancel() -> int:
        tasks = await under_way(rollout, make_prompts(4))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await rollout.generate(SHORT)
        return unfinished(rollout)

    assert asyncio.run(cancel()) == 0


def test_two_requests_may_have_one_id(rollout: VllmRollout, models: list[Any]) -> None:
    prompts = make_prompts(2)
    outputs = generate_all(rollout, [RolloutRequest("same", prompt, GREEDY) for prompt in prompts])
    assert all_tokens(outputs) == [greedy_tokens(models[0], prompt, 12) for prompt in prompts]


def test_a_temperature_that_vllm_would_change_is_refused(rollout: VllmRollout) -> None:
    with pytest.raises(RequestError, match=r"0\.001.*0\.01"):
        generate_all(rollout, [RolloutRequest("r", [5], SamplingParams(temperature=0.001))])


def test_greedy_beside_sampled_requests_has_plain_log_probs(rollout: VllmRollout, models: list[Any]) -> None:
    """One step computes both: the others' temperature, top-k and top-p are not the greedy one's."""
    sampled = SamplingParams(temperature=0.7, top_k=5, top_p=0.8, max_tokens=12)
    prompts = make_prompts(8)
    requests = [RolloutRequest(f"r{i}", p, GREEDY if i % 2 else sampled) for i, p in enumerate(prompts)]
    for request, output in zip(requests, generate_all(rollout, requests), strict=True):
        if request.sampling is GREEDY:
            assert gap_to({0: models[0]}, request.prompt_ids, only_sequence(output)) <= TOLERANCE


def test_seeds_hold_when_prompts_fill_several_steps(rollout: VllmRollout) -> None:
    """A step takes 2048 tokens by default. A prompt that is cut up costs a seeded request a random number too many."""
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    requests = [RolloutRequest(f"r{i}", [*LONG_PROMPT[i:], 4 + i], sampling, seed=i) for i in range(24)]
    together = all_tokens(generate_all(rollout, requests))
    assert together == [all_tokens(generate_all(rollout, [request]))[0] for request in requests]


def test_a_stopped_engine_is_reported(rollout: VllmRollout) -> None:
    for pid in rollout.process_ids:
        os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(RolloutError, match="has not answered for 2 s"):
            asyncio.run(rollout.check_health())
    finally:
        for pid in rollout.process_ids:
            os.kill(pid, signal.SIGCONT)
    generate_all(rollout, [SHORT])
    asyncio.run(rollout.check_health())


def test_release_on_a_cpu_is_honest(rollout: VllmRollout, models: list[Any]) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU has memory to give back")
    assert not rollout.capabilities.releases_memory
    for _ in range(2):
        asyncio.run(rollout.release(("kv_cache",)))
    for _ in range(2):
        asyncio.run(rollout.resume())
    check_greedy(rollout, models[0])
    with pytest.raises(CapabilityError, match="unknown memory tag 'weigths'"):
        asyncio.run(rollout.release(("weigths",)))


def test_adapters_need_their_keys(rollout: VllmRollout, models: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither refusal changes anything."""
    adapter = AdapterWeights({"r": 32}, {"a": torch.zeros(1)})
    with pytest.raises(CapabilityError, match=r"rollout\.enable_lora=true"):
        asyncio.run(rollout.update_adapter(adapter, 1))
    monkeypatch.setattr(rollout, "_config", replace(rollout._config, enable_lora=True))
    with pytest.raises(CapabilityError, match=r"rank 32.*rollout\.max_lora_rank is 16"):
        asyncio.run(rollout.update_adapter(adapter, 1))
    check_greedy(rollout, models[0])


def test_the_scheduler_s_figures_are_the_load(rollout: VllmRollout, monkeypatch: pytest.MonkeyPatch) -> None:
    loads, record = [], rollout._load.record
    before = asyncio.run(rollout.report_load()).preemptions  # of the tests that had this engine earlier

    def keep(*statistics: Any) -> None:
        record(*statistics)
        loads.append(rollout._load.report(1))

    monkeypatch.setattr(rollout._load, "record", keep)
    run_prompts(rollout, make_prompts(3), LONG)
    assert max(load.running for load in loads) == 3
    assert max(load.kv_cache_usage for load in loads) > 0
    load = asyncio.run(rollout.report_load())
    assert (load.limit, load.waiting, load.preemptions) == (256, 0, before)
