from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcast.contracts.rollout import RolloutRequest, RolloutSetup, SamplingParams
from rollcast.errors import RolloutError
from rollcast_serving.engines.job import derive_seed
from rollcast_sglang.requests import Adapter, Job, Row, build_batch, read_sequence
from rollcast_sglang.server.sampling import filter_probs, pick_tokens, uniform_numbers

SETUP = RolloutSetup(None, "", seed=0, pad_token_id=0, eos_token_id=2, stop_token_ids=(2, 9))


@settings(max_examples=80, deadline=None)
@given(top_k=st.integers(1, 25), top_p=st.floats(0.01, 1), seed=st.integers(0, 1000))
def test_filters_one_after_the_other(top_k: int, top_p: float, seed: int) -> None:
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(seed))
    probs = logits.double().softmax(-1)
    expected = []
    for row in probs.tolist():
        order = sorted(range(20), key=lambda index: -row[index])[:top_k]
        total = sum(row[index] for index in order)
        kept, mass = [], 0.0
        for index in order:
            if mass >= top_p * total:
                break
            kept.append(index)
            mass += row[index]
        expected.append([row[index] / mass if index in kept else 0.0 for index in range(20)])
    want = torch.tensor(expected, dtype=torch.float64)
    want[3] = probs[3]
    untouched = torch.tensor([False, False, False, True])
    filter_probs(probs, torch.full((4,), top_k), torch.full((4,), top_p, dtype=torch.float64), untouched)
    torch.testing.assert_close(probs, want)


def test_tokens_come_as_often_as_they_should() -> None:
    count = 20_000
    probs = torch.tensor([0.5, 0.0, 0.2, 0.0, 0.3, 0.0])
    numbers = uniform_numbers(torch.arange(count) * 7919, torch.full((count,), 5))
    tokens = pick_tokens(probs.expand(count, -1), numbers)
    counts = torch.bincount(tokens, minlength=6).double()
    assert counts[probs == 0].sum() == 0
    kept = probs > 0
    expected = probs[kept].double() * count
    chi_square = ((counts[kept] - expected) ** 2 / expected).sum()
    assert chi_square < 20  # two degrees of freedom: once in 20,000


def test_numbers_are_uniform_over_positions_and_at_their_edges() -> None:
    numbers = uniform_numbers(torch.full((20_000,), 2**62 - 1), torch.arange(20_000))
    assert numbers.dtype == torch.float64
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    counts = torch.histc(numbers.float(), 20, 0, 1).double()
    assert ((counts - 1000) ** 2 / 1000).sum() < 60  # 19 degrees of freedom
    probs = torch.tensor([[0.0, 0.25, 0.75, 0.0]]).expand(2, -1)
    assert pick_tokens(probs, torch.tensor([0.0, 1 - 2**-52], dtype=torch.float64)).tolist() == [1, 2]


def make_row(sampling: SamplingParams, adapter: Adapter | None = None) -> Row:
    from array import array

    request = RolloutRequest("r", [5, 6], sampling)
    job = Job(request, None, array("q", [5, 6]), adapter=adapter)  # type: ignore[arg-type]
    return Row(job, "00", 7)


def event(finish: dict[str, object] | None, tokens: list[int], **meta: object) -> dict[str, object]:
    log_probs = [[-0.5, token, None] for token in tokens]
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": len(tokens)}]
    meta = {"finish_reason": finish, "output_token_logprobs": log_probs, "weight_versions": spans, **meta}
    return {"output_ids": tokens, "meta_info": meta}


def test_events_become_sequences() -> None:
    row = make_row(SamplingParams())
    assert read_sequence(row, event(None, [5])) is None
    sequence = read_sequence(row, event({"type": "length"}, [5, 6, 7]))
    assert sequence is not None
    assert list(sequence.token_ids) == [5, 6, 7]
    assert list(sequence.log_probs) == [-0.5] * 3
    assert list(sequence.weight_versions) == [3, 4, 4]
    with pytest.raises(RolloutError, match="2 tokens, 1 log-probs"):
        read_sequence(row, event({"type": "stop"}, [5, 6], output_token_logprobs=[[-1, 5, None]]))
    failed = {"type": "abort", "message": "too long", "status_code": 400}
    with pytest.raises(RolloutError, match="too long"):
        read_sequence(row, event(failed, [5]))


def test_one_candidate_is_certain_and_greedy_is_not() -> None:
    certain = read_sequence(make_row(SamplingParams(top_k=1)), event({"type": "length"}, [5, 6]))
    greedy = read_sequence(make_row(SamplingParams(temperature=0, top_k=1)), event({"type": "length"}, [5, 6]))
    assert certain is not None
    assert greedy is not None
    assert list(certain.log_probs) == [0.0, 0.0]
    assert list(greedy.log_probs) == [-0.5, -0.5]


def test_an_adapter_gives_its_version() -> None:
    row = make_row(SamplingParams(), Adapter("a", 9))
    sequence = read_sequence(row, event({"type": "length"}, [5, 6]))
    assert sequence is not None
    assert list(sequence.weight_versions) == [9, 9]
    plain = make_row(SamplingParams())
    body = build_batch([row, plain], SETUP)
    assert body["lora_path"] == ["a", None]
    assert "lora_path" not in build_batch([plain], SETUP)


def test_what_ends_a_sequence() -> None:
    stops = [
        build_batch([make_row(SamplingParams(stop_token_ids=(8,), ignore_eos=ignore))], SETUP)["sampling_params"][0]
        for ignore in (False, True)
    ]
    assert [each["stop_token_ids"] for each in stops] == [[8, 2, 9], [8]]


def test_seeds_differ() -> None:
    seeds = {derive_seed(seed, number) for seed in range(30) for number in range(30)}
    assert len(seeds) == 900
    assert all(0 <= seed < 2**62 for seed in seeds)


def test_a_bias_goes_by_the_id_s_text() -> None:
    biased, plain = (
        build_batch([make_row(SamplingParams(logit_bias=bias))], SETUP)["sampling_params"][0]
        for bias in (((7, 1.5), (9, -100.0)), ())
    )
    assert biased["logit_bias"] == {"7": 1.5, "9": -100.0}
    assert "logit_bias" not in plain
