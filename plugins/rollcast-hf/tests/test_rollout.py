from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_tools import EOS, ModuleEngine, make_prompts, roughen, run_all, tokens_of
from transformers import GPT2Config, GPT2LMHeadModel

from rollcast.contracts.rollout import RolloutOutput, RolloutRequest, SamplingParams
from rollcast.errors import CapabilityError, CheckpointError, ConfigError, RequestError
from rollcast.protocol import DataProto, Jagged
from rollcast_data.tokenizer import load_tokenizer, read_stop_token_ids
from rollcast_hf.errors import GenerationError
from rollcast_hf.rollout import HfRollout
from rollcast_serving.generation import generate_sequences

GREEDY = SamplingParams(temperature=0.0, max_tokens=10)
FREE = SamplingParams(max_tokens=10, ignore_eos=True)


def generate_with_transformers(model: Any, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    full = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=max_tokens, pad_token_id=0)
    rows = full[:, width:].tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


def test_greedy_is_that_of_transformers(rollout: HfRollout, model: Any) -> None:
    prompts = make_prompts(64)
    rows = tokens_of(run_all(rollout, prompts, GREEDY))
    assert rows == generate_with_transformers(model, prompts, 10)
    assert len({token for row in rows for token in row}) > 30


def test_learned_positions_and_rows_of_all_lengths(make_rollout: Callable[..., HfRollout]) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=90, n_positions=32, n_embd=32, n_layer=2, n_head=2, eos_token_id=EOS)
    module: Any = GPT2LMHeadModel(config)
    module.eval()
    roughen(module)
    rollout = make_rollout()
    rollout.bind_engine(ModuleEngine(module), 1)  # type: ignore[arg-type]
    prompts = make_prompts(9, longest=12)
    limits = [32 - len(prompt) if i % 2 else 3 for i, prompt in enumerate(prompts)]
    outputs = run_all(rollout, prompts, [replace(GREEDY, max_tokens=limit) for limit in limits])
    for prompt, limit, tokens in zip(prompts, limits, tokens_of(outputs), strict=True):
        assert tokens == generate_with_transformers(module, [prompt], limit)[0]


def test_bfloat16(rollout: HfRollout, model: Any) -> None:
    model.bfloat16()
    (output,) = run_all(rollout, [[5, 6]], FREE)
    assert all(value < 0 for value in output.sequences[0].log_probs)


def test_rows_end_at_their_own_limits_and_stops(rollout: HfRollout) -> None:
    prompts = make_prompts(40)
    free = tokens_of(run_all(rollout, prompts, replace(GREEDY, max_tokens=24, ignore_eos=True)))
    stops = [(row[i % 5],) if i % 2 else (row[3], row[1]) for i, row in enumerate(free)]
    sampling = [
        replace(GREEDY, max_tokens=1 + i % 24, stop_token_ids=stop, ignore_eos=True) for i, stop in enumerate(stops)
    ]
    for i, output in enumerate(run_all(rollout, prompts, sampling)):
        first_stop = min(free[i].index(stop) for stop in stops[i])
        expected = free[i][: min(first_stop + 1, 1 + i % 24)]
        assert list(output.sequences[0].token_ids) == expected
        assert output.sequences[0].finish_reason == ("stop" if first_stop < 1 + i % 24 else "length")


def test_eos_stops_unless_ignored(make_rollout: Callable[..., HfRollout], rollout: HfRollout, engine: Any) -> None:
    prompt = [7, 8, 9]
    (tokens,) = tokens_of(run_all(rollout, [prompt], replace(GREEDY, ignore_eos=True)))
    other = make_rollout()
    other.setup = replace(other.setup, eos_token_id=tokens[2])
    other.bind_engine(engine, 1)
    both = run_all(other, [prompt] * 2, [GREEDY, replace(GREEDY, ignore_eos=True)])
    assert tokens_of(both) == [tokens[: tokens.index(tokens[2]) + 1], tokens]
    assert [output.sequences[0].finish_reason for output in both] == ["stop", "length"]


def test_every_stop_token_of_generation_config_finishes_a_response(
    make_rollout: Callable[..., HfRollout], model_folder: Path, model: Any, tmp_path: Path
) -> None:
    prompts = make_prompts(12, longest=12)
    free = tokens_of(run_all(make_rollout(), prompts, replace(GREEDY, ignore_eos=True)))
    second = next(row[2] for row in free if row[2] not in (EOS, *row[:2]))
    folder = tmp_path / "chat"
    shutil.copytree(model_folder, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, second], "temperature": 0.1}))
    ids = read_stop_token_ids(folder, load_tokenizer(folder))
    rollout = make_rollout(path=folder)
    rollout.setup = replace(rollout.setup, stop_token_ids=ids)
    rows = torch.nested.nested_tensor([torch.tensor(prompt) for prompt in prompts], layout=torch.jagged)
    out = asyncio.run(generate_sequences(rollout, DataProto.from_dict({"prompts": rows}), GREEDY))
    ends = [min((row.index(each) + 1 for each in (EOS, second) if each in row), default=None) for row in free]
    assert Jagged.of(out["response_mask"]).sums().tolist() == [end or GREEDY.max_tokens for end in ends]
    assert out["finished"].tolist() == [end is not None for end in ends]
    assert set(ends) > {None, 3}


def test_n_equals_repeated_requests(make_rollout: Callable[..., HfRollout], engine: Any) -> None:
    prompts = make_prompts(5)
    first, second = make_rollout(), make_rollout()
    first.bind_engine(engine, 1)
    second.bind_engine(engine, 1)
    grouped = tokens_of(run_all(first, prompts, replace(FREE, n=3)))
    single = tokens_of(run_all(second, [prompt for prompt in prompts for _ in range(3)], FREE))
    assert grouped == single
    assert len({tuple(row) for row in grouped}) == 15


def test_concurrent_requests_are_one_batch(rollout: HfRollout, engine: ModuleEngine) -> None:
    entered = engine.entered
    outputs = run_all(rollout, make_prompts(512), replace(FREE, max_tokens=2))
    assert engine.entered == entered + 1
    assert [output.request_id for output in outputs] == [f"r{i}" for i in range(512)]


def test_batches_keep_to_their_size(make_rollout: Callable[..., HfRollout], engine: ModuleEngine) -> None:
    small = make_rollout(max_batch_size=4)
    small.bind_engine(engine, 1)  # type: ignore[arg-type]
    prompts = make_prompts(3)
    calls: list[int] = []
    engine.module.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    sampling = [replace(GREEDY, n=n, max_tokens=3, ignore_eos=True) for n in (3, 2, 9)]
    outputs = run_all(small, prompts, sampling)
    assert [len(output.sequences) for output in outputs] == [3, 2, 9]
    assert max(calls) <= 4
    assert all(len(sequence.token_ids) == 3 for output in outputs for sequence in output.sequences)


def test_state_dict_and_seed(make_rollout: Callable[..., HfRollout], engine: Any) -> None:
    prompts = make_prompts(6)
    first, other_seed, restored = make_rollout(seed=3), make_rollout(seed=4), make_rollout(seed=9)
    for each in (first, other_seed, restored):
        each.bind_engine(engine, 5)
    assert tokens_of(run_all(first, prompts, FREE)) != tokens_of(run_all(other_seed, prompts, FREE))
    state = first.state_dict()
    assert state["generator"].dtype == torch.uint8
    assert state["version"] == 5
    torch.manual_seed(1)
    expected = tokens_of(run_all(first, prompts, FREE))
    torch.manual_seed(2)
    restored.load_state_dict(state)
    assert tokens_of(run_all(restored, prompts, FREE)) == expected
    with pytest.raises(CheckpointError):
        restored.load_state_dict({"generator": torch.zeros(3, dtype=torch.uint8), "version": 0})
    with pytest.raises(CheckpointError):
        restored.load_state_dict({})


def test_in_place_changes_of_the_module_are_seen(rollout: HfRollout, model: Any) -> None:
    prompts = make_prompts(8)
    before = tokens_of(run_all(rollout, prompts, GREEDY))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4)), alpha=0.1)
    outputs = run_all(rollout, prompts, GREEDY)
    assert tokens_of(outputs) == generate_with_transformers(model, prompts, 10)
    assert tokens_of(outputs) != before
    assert {version for output in outputs for version in output.sequences[0].weight_versions} == {1}


def test_the_module_trains_on_afterwards(rollout: HfRollout, model: Any) -> None:
    model.train()
    model.model.layers[0].eval()
    before = {name: part.training for name, part in model.named_modules()}
    run_all(rollout, make_prompts(2), FREE)
    assert {name: part.training for name, part in model.named_modules()} == before
    assert not any(buffer.is_inference() for buffer in model.buffers())
    model(torch.tensor([[5, 6, 7]])).logits.sum().backward()


def test_bad_requests_say_what_is_wrong(rollout: HfRollout) -> None:
    for prompt, change, words in [
        ([], {}, "empty"),
        ([4, 999], {}, "999 at prompt position 1"),
        ([4, 0.5], {}, "not token ids"),
        ([4], {"max_tokens": 600}, "601 positions"),
        ([4], {"temperature": float("nan")}, "temperature"),
        ([4], {"top_k": -3}, "top_k"),
        ([4], {"n": 0}, "n is 0"),
    ]:
        with pytest.raises(RequestError, match=f"'r0': .*{words}"):
            run_all(rollout, [prompt], replace(FREE, **change))  # type: ignore[arg-type, list-item]


def test_a_failing_model_reaches_every_request(rollout: HfRollout, model: Any) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("out of memory")

    async def gather() -> list[RolloutOutput | BaseException]:
        requests = [RolloutRequest(f"r{i}", [5], FREE) for i in range(3)]
        return await asyncio.gather(*map(rollout.generate, requests), return_exceptions=True)

    handle = model.register_forward_pre_hook(broken)
    model.train()
    errors = asyncio.run(gather())
    assert len({id(error) for error in errors}) == 3
    assert all(isinstance(error, GenerationError) and "out of memory" in str(error) for error in errors)
    assert isinstance(errors[0], GenerationError)
    assert isinstance(errors[0].__cause__, RuntimeError)
    assert model.training
    handle.remove()
    assert len(run_all(rollout, [[5]], FREE)) == 1
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(GenerationError, match="request 'r0': the model's logits are not finite at new token 0"):
        run_all(rollout, [[5]], FREE)


def test_abort_queued_and_running(make_rollout: Callable[..., HfRollout], engine: Any) -> None:
    rollout = make_rollout(max_batch_size=2)
    rollout.bind_engine(engine, 1)
    long = replace(FREE, max_tokens=400)

    async def main() -> list[RolloutOutput]:
        requests = [RolloutRequest(str(i), [5, 6], replace(long, n=5 if i == 3 else 1)) for i in range(5)]
        tasks = [asyncio.create_task(rollout.generate(request)) for request in requests]
        for _ in range(8):
            await asyncio.sleep(0)
        await rollout.abort(["2", "0"])
        await rollout.abort(["1"])
        while not tasks[1].done():
            await asyncio.sleep(0)
        for _ in range(8):
            await asyncio.sleep(0)
        await rollout.abort()
        return list(await asyncio.gather(*tasks))

    sequences = [output.sequences for output in asyncio.run(main())]
    assert {sequence.finish_reason for each in sequences for sequence in each} == {"abort"}
    assert 0 < len(sequences[0][0].token_ids) < 20
    assert [len(sequences[2][0].token_ids), len(sequences[3])] == [0, 5]
    assert len(sequences[3][0].token_ids) > 0
    assert len(sequences[3][4].token_ids) == 0


def test_a_cancelled_request_frees_its_place(rollout: HfRollout) -> None:
    async def main() -> RolloutOutput:
        gone = asyncio.create_task(rollout.generate(RolloutRequest("gone", [5], replace(FREE, max_tokens=400))))
        stays = asyncio.create_task(rollout.generate(RolloutRequest("stays", [5], FREE)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        gone.cancel()
        return await stays

    assert len(asyncio.run(main()).sequences[0].token_ids) == 10

    async def leave() -> None:
        task = asyncio.create_task(rollout.generate(RolloutRequest("left", [5], replace(FREE, max_tokens=400))))
        await asyncio.sleep(0.01)
        assert not task.done()

    asyncio.run(leave())  # closes its loop with a batch under way
    assert len(run_all(rollout, [[5]], FREE)) == 1


def test_versions_are_those_of_each_token(rollout: HfRollout, engine: Any) -> None:
    async def main() -> RolloutOutput:
        task = asyncio.create_task(rollout.generate(RolloutRequest("r", [5], replace(FREE, max_tokens=40))))
        for _ in range(10):
            await asyncio.sleep(0)
        rollout.bind_engine(engine, 2)
        return await task

    versions = list(asyncio.run(main()).sequences[0].weight_versions)
    assert set(versions) == {1, 2}
    assert versions == sorted(versions)


def test_config_is_checked(make_rollout: Callable[..., HfRollout]) -> None:
    with pytest.raises(ConfigError, match="max_batch_size"):
        make_rollout(max_batch_size=0)


def test_close_and_missing_folder(rollout: HfRollout, make_rollout: Callable[..., HfRollout], tmp_path: Any) -> None:
    rollout.close()
    with pytest.raises(GenerationError, match="closed"):
        run_all(rollout, [[5]], FREE)
    with pytest.raises(CheckpointError, match="config"):
        run_all(make_rollout(path=tmp_path / "nothing"), [[5]], FREE)


def test_updates_are_refused_while_an_engine_is_bound(rollout: HfRollout) -> None:
    with pytest.raises(CapabilityError, match="engine"):
        asyncio.run(rollout.update_weights([], 2))


def test_a_long_prompt_is_refused_or_its_response_clamped(make_rollout: Callable[..., HfRollout]) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=90, n_positions=32, n_embd=32, n_layer=2, n_head=2, eos_token_id=EOS)
    module: Any = GPT2LMHeadModel(config)
    module.eval()
    asked = replace(FREE, max_tokens=20)
    for key, lengths in (("refuse", None), ("clamp", [20, 12, 1])):
        rollout = make_rollout(on_long_prompt=key)
        rollout.bind_engine(ModuleEngine(module), 1)  # type: ignore[arg-type]
        prompts = [[5] * 10, [5] * 20, [5] * 31]
        if lengths is None:
            with pytest.raises(RequestError, match="on_long_prompt=clamp"):
                run_all(rollout, prompts, asked)
            continue
        assert [len(tokens) for tokens in tokens_of(run_all(rollout, prompts, asked))] == lengths
        with pytest.raises(RequestError, match="a prompt of 32 tokens"):
            run_all(rollout, [[5] * 32], asked)


def test_rows_with_and_without_penalty_go_together(rollout: HfRollout) -> None:
    """A batch of requests with parameters of their own answers as each would alone."""
    prompts = make_prompts(4)
    kinds = [GREEDY, replace(GREEDY, repetition_penalty=1.8), replace(GREEDY, logit_bias=((7, 9.0),)), GREEDY]
    lengths = [replace(kind, max_tokens=2 + 3 * place, ignore_eos=True) for place, kind in enumerate(kinds)]
    together = tokens_of(run_all(rollout, prompts, lengths))
    alone = [tokens_of(run_all(rollout, [prompt], kind))[0] for prompt, kind in zip(prompts, lengths, strict=True)]
    assert together == alone
    plain = [
        tokens_of(run_all(rollout, [prompt], replace(kind, repetition_penalty=1.0, logit_bias=())))[0]
        for prompt, kind in zip(prompts, lengths, strict=True)
    ]
    assert [row == other for row, other in zip(together, plain, strict=True)] == [True, False, False, True]
