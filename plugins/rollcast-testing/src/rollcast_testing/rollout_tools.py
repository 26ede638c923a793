"""Fixtures of the conformance suite of rollouts: models, bulk requests, and reference answers of transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from rollcast.contracts.rollout import (
    BaseRollout,
    RolloutOutput,
    RolloutRequest,
    RolloutSequence,
    RolloutSetup,
    SamplingParams,
    rollouts,
)
from rollcast.errors import RollcastError
from rollcast_testing.tiny import tiny_model_folder

__all__ = [
    "EOS",
    "GREEDY",
    "PAD",
    "RolloutFixtures",
    "all_tokens",
    "generate_all",
    "greedy_tokens",
    "load_model",
    "make_prompts",
    "only_sequence",
    "run_prompts",
    "token_log_probs",
    "token_logits",
    "write_model",
]

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PAD, EOS = 0, 2


class RolloutFixtures:
    """Fixtures with models and rollouts; for attributes see :class:`~rollcast_testing.rollout.RolloutSuite`."""

    name: ClassVar[str] = ""
    rollout_config: ClassVar[Mapping[str, Any]] = {}
    lora_config: ClassVar[Mapping[str, Any]] = {}
    quantized_config: ClassVar[Mapping[str, Any]] = {}
    shared: ClassVar[bool] = False
    tolerance: ClassVar[float] = 1e-4

    def build_rollout(self, folder: Path, **config: Any) -> BaseRollout:
        """Build a rollout for a model folder, with keys in addition to :attr:`rollout_config`; the caller closes it."""
        rollout_class = rollouts.get(self.name)
        section = rollout_class.config_schema(**{**self.rollout_config, **config})
        return rollout_class(RolloutSetup(section, str(folder), seed=11, pad_token_id=PAD, eos_token_id=EOS))

    @pytest.fixture
    def model_folder(self, tmp_path: Path) -> Path:
        """Write a tiny random model, the same in every test."""
        return write_model(tmp_path / "tiny", seed=0)

    @pytest.fixture
    def reference(self, model_folder: Path) -> Any:
        """Load the same model with transformers."""
        return load_model(model_folder)

    @pytest.fixture(scope="class")
    @classmethod
    def shared_rollouts(cls) -> Iterator[list[BaseRollout]]:
        """Yield the list with the rollout that the tests of a class share, if they share one."""
        started: list[BaseRollout] = []
        yield started
        for rollout in started:
            rollout.close()

    @pytest.fixture
    def rollout(self, model_folder: Path, reference: Any, shared_rollouts: list[BaseRollout]) -> Iterator[BaseRollout]:
        """Yield the rollout under test, with the weights of the folder."""
        if not self.shared:
            rollout = self.build_rollout(model_folder)
            yield rollout
            rollout.close()
            return
        if shared_rollouts:
            asyncio.run(shared_rollouts[0].update_weights([list(reference.named_parameters())], 0))
        else:
            shared_rollouts.append(self.build_rollout(model_folder))
        yield shared_rollouts[0]
        try:
            asyncio.run(shared_rollouts[0].check_health())
        except RollcastError:
            shared_rollouts.pop().close()

    def check_log_probs(
        self, reference: Any, prompt: Sequence[int], sequence: RolloutSequence, sampling: SamplingParams
    ) -> None:
        """Check that a sequence's log-probs are those of transformers for the sampled distribution."""
        expected = token_log_probs(reference, prompt, sequence.token_ids, sampling)
        assert len(sequence.log_probs) == len(expected)
        gap = max(abs(got - want) for got, want in zip(sequence.log_probs, expected, strict=True))
        assert gap <= self.tolerance, f"a log-prob is {gap} away from the sampled distribution's"


def write_model(folder: Path, seed: int, tied: bool = True, experts: int = 0) -> Path:
    """Write a tiny model with large random weights, because a freshly initialised one only repeats its last token."""
    tiny_model_folder(folder, seed=seed, tied=tied, head_dim=32, experts=experts)
    model = load_model(folder)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    model.save_pretrained(folder)
    return folder


def load_model(folder: Path) -> Any:
    """Load the folder's model with transformers in float32."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    return model.float().eval()


def make_prompts(count: int) -> list[list[int]]:
    """Return prompts of 1 to 12 tokens without special tokens."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 13, (count,), generator=generator).tolist()
    return [torch.randint(4, 80, (length,), generator=generator).tolist() for length in lengths]


def generate_all(rollout: BaseRollout, requests: Sequence[RolloutRequest]) -> list[RolloutOutput]:
    """Run all requests concurrently."""

    async def gather() -> list[RolloutOutput]:
        return list(await asyncio.gather(*(rollout.generate(request) for request in requests)))

    return asyncio.run(gather())


def run_prompts(
    rollout: BaseRollout, prompts: Sequence[Sequence[int]], sampling: SamplingParams
) -> list[RolloutOutput]:
    """Run all prompts concurrently with the same sampling parameters."""
    return generate_all(rollout, [RolloutRequest(f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts)])


def only_sequence(output: RolloutOutput) -> RolloutSequence:
    """Return the only sequence of an output."""
    assert len(output.sequences) == 1, f"{len(output.sequences)} sequences came for n=1"
    return output.sequences[0]


def all_tokens(outputs: Sequence[RolloutOutput]) -> list[list[int]]:
    """Return the tokens of every sequence."""
    return [list(sequence.token_ids) for output in outputs for sequence in output.sequences]


def greedy_tokens(model: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Generate greedily with transformers and return the new tokens."""
    with torch.no_grad():
        ids = torch.tensor([list(prompt)])
        full = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, pad_token_id=PAD
        )
    new: list[int] = full[0, len(prompt) :].tolist()
    return new


def token_logits(model: Any, prompt: Sequence[int], tokens: Sequence[int], sampling: SamplingParams) -> torch.Tensor:
    """Return the logits ``[T, V]`` before each token, with bias and repetition penalty, from one forward pass."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
    for token, bias in sampling.logit_bias:
        logits[:, token] += bias
    for place, row in enumerate(logits):
        for token in {*prompt, *tokens[:place]}:
            penalty = sampling.repetition_penalty
            row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    return logits


def token_log_probs(model: Any, prompt: Sequence[int], tokens: Sequence[int], sampling: SamplingParams) -> list[float]:
    """Return the log-probs of ``tokens``, computed in one forward pass without a cache."""
    scores = token_logits(model, prompt, tokens, sampling) / sampling.temperature
    if sampling.min_p:
        probs = scores.softmax(-1)
        scores = scores.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    if sampling.top_k > 0:
        smallest = scores.topk(sampling.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < smallest, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = scores.softmax(-1).sort(dim=-1, descending=True)
        outside = ordered.cumsum(-1) - ordered >= sampling.top_p
        scores = scores.masked_fill(outside.gather(-1, order.argsort(-1)), -torch.inf)
    picked: list[float] = scores.log_softmax(-1).gather(-1, torch.tensor(list(tokens))[:, None])[:, 0].tolist()
    return picked
