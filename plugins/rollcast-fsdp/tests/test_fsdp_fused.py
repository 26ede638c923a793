"""Log-probs without full logits: values, gradients and memory."""

from __future__ import annotations

import itertools
from pathlib import Path

import fsdp_scenarios as scenarios
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rollcast.contracts.engine import ForwardSettings
from rollcast.errors import ConfigError
from rollcast_fsdp.fused import linear_stats
from rollcast_fsdp.head import VocabularyHead
from rollcast_fsdp.logprobs import sum_pi_squared, token_entropy
from rollcast_testing.tiny import random_batch

ALONE = scenarios.ALONE


def plain_stats(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, temperature: float
) -> list[Tensor]:
    scores = (nn.functional.linear(hidden, weight, bias) / temperature).log_softmax(-1)
    chosen = scores.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return [chosen, -(scores.exp() * scores).sum(1), (2 * scores).exp().sum(1)]


@given(
    positions=st.integers(0, 9),
    chunk=st.integers(1, 10),
    with_bias=st.booleans(),
    temperature=st.sampled_from([0.6, 1.0, 1.7]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_values_and_gradients_in_chunks(
    positions: int, chunk: int, with_bias: bool, temperature: float, seed: int
) -> None:
    """Against the plain formula in double precision, however the positions are cut."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(positions, 8, generator=generator, requires_grad=True)
    weight = torch.randn(37, 8, generator=generator, requires_grad=True)
    bias = torch.randn(37, generator=generator, requires_grad=True) if with_bias else None
    tokens = torch.randint(37, (positions,), generator=generator)
    inputs = [hidden, weight, *([] if bias is None else [bias])]
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    stats = linear_stats(hidden, weight, bias, tokens, temperature, chunk_size=chunk)
    ours = [stats.log_probs, stats.entropy, stats.sum_pi_squared]
    theirs = plain_stats(doubles[0], doubles[1], doubles[2] if with_bias else None, tokens, temperature)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), other, rtol=2e-6, atol=5e-6)
    shares = [torch.randn(positions, generator=generator) for _ in ours]
    for mine, other in zip(
        torch.autograd.grad(ours, inputs, shares),
        torch.autograd.grad(theirs, doubles, [share.double() for share in shares]),
        strict=True,
    ):
        torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=1e-4)


def test_what_is_not_asked_for_has_no_part_in_the_gradient() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(37, 8, requires_grad=True)
    tokens = torch.randint(37, (5,))
    stats = linear_stats(hidden, weight, None, tokens, entropy=False, sum_pi_squared=False)
    assert not stats.entropy.any()
    assert not stats.sum_pi_squared.any()
    total = stats.log_probs.sum() + stats.entropy.sum() + stats.sum_pi_squared.sum()
    expected = plain_stats(hidden, weight, None, tokens, 1.0)[0].sum()
    for mine, other in zip(*(torch.autograd.grad(each, [hidden, weight]) for each in (total, expected)), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_bf16_heads_get_bf16_gradients() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(64, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(300, 16, dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.randint(300, (64,))
    stats = linear_stats(hidden, weight, None, tokens, chunk_size=9)
    plain = plain_stats(hidden.detach().float(), weight.detach().float(), None, tokens, 1.0)
    assert stats.log_probs.dtype == torch.float32
    torch.testing.assert_close(stats.log_probs, plain[0], rtol=0.02, atol=0.1)
    gradients = torch.autograd.grad(stats.log_probs.sum(), [hidden, weight])
    assert {gradient.dtype for gradient in gradients} == {torch.bfloat16}


class LargestTensor(TorchDispatchMode):
    """Remembers the largest result of any operation inside, in numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor):
                self.numbers = max(self.numbers, each.numel())
        return result


def test_no_tensor_is_as_large_as_the_logits() -> None:
    hidden, weight = torch.randn(128, 4, requires_grad=True), torch.randn(9000, 4, requires_grad=True)
    tokens = torch.randint(9000, (128,))
    for entropy, squares in itertools.product((False, True), repeat=2):
        with LargestTensor() as largest:
            stats = linear_stats(hidden, weight, None, tokens, 0.7, entropy, squares, chunk_size=16)
            (stats.log_probs.sum() + stats.entropy.sum() + stats.sum_pi_squared.sum()).backward()
        assert largest.numbers == 16 * 9000  # a chunk's logits


@pytest.mark.parametrize("packs", [False, True])
def test_engines_hold_no_full_logits(tmp_path: Path, packs: bool) -> None:
    from rollcast_testing.tiny import tiny_model_folder

    folder = tiny_model_folder(tmp_path / "m", vocab=40_000, hidden=16)
    batch = random_batch(16, 4, 20)
    keys = {"use_fused_kernels": True, "log_probs_chunk_size": 32, "use_remove_padding": packs}
    engine = scenarios.build(ALONE, folder, **keys)
    with engine.train_mode(), LargestTensor() as largest:
        engine.train_batch(batch, scenarios.nll, ForwardSettings(calculate_entropy=True))
    assert largest.numbers == 32 * 40_000
    assert int(batch["response_mask"].sum()) > 4 * 32


def test_the_exact_kl_is_the_same_from_hidden_states(model_folder: Path, untied_folder: Path) -> None:
    options = {"folder": model_folder, "other": untied_folder, "splits": [3]}
    plain = scenarios.compare(ALONE, **options)
    for keys in ({"use_fused_kernels": True}, {"use_fused_kernels": True, "use_remove_padding": True}):
        fused = scenarios.compare(ALONE, **options, keys=keys)
        for expected, step in zip(plain["history"], fused["history"], strict=True):
            assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
            assert step.metrics == pytest.approx(expected.metrics, rel=1e-5)
        torch.testing.assert_close(
            fused["output"]["vocabulary_kl"], plain["output"]["vocabulary_kl"], rtol=1e-5, atol=1e-6
        )


def test_a_head_that_is_no_plain_layer_is_refused() -> None:
    class Model(nn.Module):
        def get_output_embeddings(self) -> nn.Module:
            return nn.Sequential(nn.Linear(2, 3))

    with pytest.raises(ConfigError, match="vocabulary head of Model is Sequential, not a plain linear layer"):
        VocabularyHead(Model())


def test_quantities_of_large_logits_are_exact() -> None:
    """Logits of a pretrained model: a vocabulary of thousands of words, and a largest logit of 40."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(16, 50_000, generator=generator) + 25
    logits[:, 7] = torch.linspace(30, 50, 16)
    exact = logits.double().log_softmax(-1)
    assert torch.allclose(token_entropy(logits).double(), -(exact.exp() * exact).sum(-1), rtol=0, atol=5e-5)
    assert torch.allclose(sum_pi_squared(logits).double(), (2 * exact).exp().sum(-1), rtol=2e-6, atol=0)
