from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcast.contracts.rollout import SamplingParams
from rollcast_hf.sampling import Recipe, TokenSampler, choose_tokens, draw_uniforms, make_streams


def processed(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Probabilities ``[V]`` after temperature, top-k and top-p, one candidate after the other."""
    scores = (logits / sampling.temperature).tolist()
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    probs = torch.tensor([scores[index] for index in order], dtype=torch.float64).softmax(0).tolist()
    kept, mass = [], 0.0
    for index, prob in zip(order, probs, strict=True):
        if mass >= sampling.top_p:
            break
        kept.append(index)
        mass += prob
    result = torch.zeros(len(scores), dtype=torch.float64)
    result[kept] = torch.tensor([scores[index] for index in kept], dtype=torch.float64).softmax(0)
    return result


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=5),
        SamplingParams(temperature=1.4, top_p=0.8, top_k=9),
    ],
)
def test_frequencies_are_the_probabilities(sampling: SamplingParams) -> None:
    count = 4000
    logits = torch.linspace(-2, 2, 12)[torch.randperm(12, generator=torch.Generator().manual_seed(1))]
    expected = processed(logits, sampling)
    uniforms = draw_uniforms(make_streams(torch.arange(count), torch.zeros(count, dtype=torch.int64)), 0)
    tokens, log_probs = choose_tokens(logits.expand(count, -1), Recipe.of(sampling, 12), uniforms)
    counts = torch.bincount(tokens, minlength=12).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_square = ((counts - count * expected)[possible] ** 2 / (count * expected[possible])).sum()
    freedom = int(possible.sum()) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5
    torch.testing.assert_close(log_probs.double(), expected.log()[tokens], atol=1e-5, rtol=0)


@settings(max_examples=60, deadline=None)
@given(
    temperature=st.floats(0.05, 3),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(-1, 25),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1000),
)
def test_log_probs_of_any_recipe(temperature: float, top_p: float, top_k: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 20, generator=generator).to(dtype)
    sampling = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)
    uniforms = torch.rand(6, dtype=torch.float64, generator=generator)
    tokens, log_probs = choose_tokens(logits, Recipe.of(sampling, 20), uniforms)
    assert log_probs.dtype == torch.float32
    assert bool((log_probs <= 0).all())
    assert bool(log_probs.isfinite().all())
    if top_k in (-1, 0) or top_k >= 20:
        below = logits.float() / temperature
        before = below.softmax(-1)
        larger = (before * (before > before.gather(-1, tokens[:, None]))).sum(-1)
        assert bool((larger < top_p + 1e-5).all())


def test_greedy_ignores_the_draw_and_the_other_keys() -> None:
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(2))
    recipe = Recipe.of(SamplingParams(temperature=0, top_k=3, top_p=0.5), 9)
    tokens, log_probs = choose_tokens(logits, recipe, torch.full((5,), 0.99, dtype=torch.float64))
    assert tokens.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(log_probs, logits.log_softmax(-1).max(-1).values)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-53])
def test_a_token_without_probability_is_never_drawn(uniform: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.1, -torch.inf]])
    tokens, log_probs = choose_tokens(logits, Recipe(1.0, 1.0, 0), torch.tensor([uniform], dtype=torch.float64))
    assert tokens.tolist() == [1 if uniform == 0 else 3]
    assert bool(log_probs.isfinite().all())


def test_streams_are_uniform_and_their_own() -> None:
    """Neighbouring seeds, sequences and positions have nothing in common."""
    seeds = torch.arange(200).repeat_interleave(4)
    streams = make_streams(seeds, torch.arange(4).repeat(200))
    drawn = torch.stack([draw_uniforms(streams, position) for position in range(50)])
    assert len(drawn.unique()) == drawn.numel()
    assert 0 <= float(drawn.min()) < 1e-3
    assert 1 - 1e-3 < float(drawn.max()) < 1
    counts = torch.histc(drawn.float(), bins=20, min=0, max=1)
    assert float((counts - 2000).square().sum() / 2000) < 19 + 4 * 38**0.5
    flat = torch.stack([drawn[0, :-1], drawn[0, 1:], drawn[1, :-1]])
    assert float(torch.corrcoef(flat).triu(1).abs().max()) < 0.12
    alone = make_streams(torch.tensor([17]), torch.tensor([2]))
    assert draw_uniforms(alone, 30).item() == drawn[30, 17 * 4 + 2].item()


def test_rows_with_their_own_recipes() -> None:
    logits = torch.randn(40, 30, generator=torch.Generator().manual_seed(3))
    recipes = [SamplingParams(temperature=0), SamplingParams(top_k=1), SamplingParams(top_k=4), SamplingParams()]
    params = [recipes[row % 4] for row in range(40)]
    sampler = TokenSampler(params, 30, torch.arange(40))
    tokens, log_probs = sampler(logits)
    assert tokens[0::4].tolist() == logits[0::4].argmax(-1).tolist()
    assert tokens[1::4].tolist() == logits[1::4].argmax(-1).tolist()
    assert log_probs[1::4].tolist() == [0.0] * 10
    assert all(int(tokens[row]) in logits[row].topk(4).indices.tolist() for row in range(2, 40, 4))
    sampler.keep(torch.tensor([1, 4, 5]))
    tokens, _ = sampler(logits[[1, 4, 5]])
    assert tokens.tolist() == logits[[1, 4, 5]].argmax(-1).tolist()


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    TokenSampler([SamplingParams(top_p=0.9)] * 3, 7, torch.arange(3))(torch.zeros(3, 7))
    assert torch.equal(torch.get_rng_state(), before)
