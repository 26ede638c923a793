"""The conformance suite of rollouts. Needs transformers, with which it compares; runs on a CPU.

Example, in a plugin's tests::

    from rollcast.testing.rollout import RolloutSuite

    class TestHf(RolloutSuite):
        name = "hf"
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from rollcast.contracts.rollout import (
    BaseRollout,
    RolloutMode,
    RolloutOutput,
    RolloutRequest,
    RolloutSequence,
    RolloutSetup,
    SamplingParams,
    rollouts,
)
from rollcast.errors import CapabilityError, RollcastError
from rollcast.testing.tiny import tiny_model_folder

__all__ = ["RolloutSuite"]

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PAD, EOS = 0, 2


class RolloutSuite:
    """What every rollout has to do; subclass it, and name the rollout.

    Attributes:
        name: the rollout, as it is announced in ``rollcast.rollouts``.
        rollout_config: keys of its ``rollout`` section that differ from its schema's defaults.
        tolerance: how far a log-prob may be from the one that transformers computes in float32.
    """

    name: ClassVar[str] = ""
    rollout_config: ClassVar[Mapping[str, Any]] = {}
    tolerance: ClassVar[float] = 1e-4

    @pytest.fixture
    def model_folder(self, tmp_path: Path) -> Path:
        """A tiny random model."""
        return _write_model(tmp_path / "tiny", seed=0)

    @pytest.fixture
    def reference(self, model_folder: Path) -> Any:
        """The same model in transformers."""
        return _load(model_folder)

    @pytest.fixture
    def rollout(self, model_folder: Path) -> Iterator[BaseRollout]:
        """The rollout under test, alone, with the weights of the folder."""
        rollout_class = rollouts.get(self.name)
        config = rollout_class.config_schema(**self.rollout_config)
        rollout = rollout_class(RolloutSetup(config, str(model_folder), seed=11, pad_token_id=PAD, eos_token_id=EOS))
        yield rollout
        rollout.close()

    def test_suite_is_filled_in(self) -> None:
        """There is something to test."""
        assert self.name, f"{type(self).__name__}.name has to name a rollout"

    def test_capabilities(self) -> None:
        """A rollout runs somewhere, and in the trainer's process only if it is hybrid."""
        capabilities = rollouts.get(self.name).capabilities
        assert capabilities.modes, "capabilities.modes is empty"
        assert not capabilities.in_process or RolloutMode.HYBRID in capabilities.modes

    def test_greedy_is_that_of_transformers(self, rollout: BaseRollout, reference: Any) -> None:
        """Temperature 0: the same tokens, and log-probs under the plain softmax."""
        prompts = _prompts(12)
        for prompt, output in zip(prompts, _run(rollout, prompts, GREEDY), strict=True):
            sequence = _only(output)
            assert list(sequence.token_ids) == _greedy(reference, prompt, GREEDY.max_tokens)
            self._check_log_probs(reference, prompt, sequence, replace(GREEDY, temperature=1.0))

    @pytest.mark.parametrize(
        "sampling",
        [
            SamplingParams(max_tokens=8),
            SamplingParams(temperature=0.7, max_tokens=8),
            SamplingParams(top_p=0.9, max_tokens=8),
            SamplingParams(top_k=5, max_tokens=8),
            SamplingParams(temperature=0.7, top_p=0.8, top_k=20, max_tokens=8),
        ],
        ids=["plain", "temperature", "top_p", "top_k", "all"],
    )
    def test_log_probs_are_those_of_the_sampled_distribution(
        self, rollout: BaseRollout, reference: Any, sampling: SamplingParams
    ) -> None:
        """Log-probs are taken after temperature, top-k and top-p, and the output says which."""
        prompts = _prompts(8)
        for prompt, output in zip(prompts, _run(rollout, prompts, sampling), strict=True):
            assert output.sampling == sampling
            self._check_log_probs(reference, prompt, _only(output), sampling)

    def test_n(self, rollout: BaseRollout) -> None:
        """``n`` sequences for one prompt, drawn independently."""
        (output,) = _run(rollout, _prompts(1), SamplingParams(n=4, max_tokens=8, ignore_eos=True))
        assert len(output.sequences) == 4
        assert len({tuple(sequence.token_ids) for sequence in output.sequences}) > 1

    def test_length(self, rollout: BaseRollout) -> None:
        """Without a stop there are ``max_tokens`` tokens, each with a log-prob and a version."""
        (output,) = _run(rollout, _prompts(1), SamplingParams(max_tokens=9, ignore_eos=True))
        sequence = _only(output)
        assert sequence.finish_reason == "length"
        assert len(sequence.token_ids) == len(sequence.log_probs) == len(sequence.weight_versions) == 9

    def test_stop_token(self, rollout: BaseRollout, reference: Any) -> None:
        """Generation ends after the first stop token, which stays in the output."""
        prompt = _prompts(1)[0]
        expected = _greedy(reference, prompt, GREEDY.max_tokens)
        stop = expected[min(2, len(expected) - 1)]
        (output,) = _run(rollout, [prompt], replace(GREEDY, stop_token_ids=(stop,)))
        assert list(_only(output).token_ids) == expected[: expected.index(stop) + 1]
        assert _only(output).finish_reason == "stop"

    def test_many_at_once(self, rollout: BaseRollout, reference: Any) -> None:
        """64 requests with their own lengths under way together: each gets its own answer."""
        prompts = _prompts(64)
        requests = [
            RolloutRequest(f"r{i}", prompt, replace(GREEDY, max_tokens=1 + i % 7)) for i, prompt in enumerate(prompts)
        ]
        for request, output in zip(requests, _generate(rollout, requests), strict=True):
            assert output.request_id == request.request_id
            expected = _greedy(reference, request.prompt_ids, request.sampling.max_tokens)
            assert list(_only(output).token_ids) == expected

    @pytest.mark.parametrize(
        ("prompt", "change"),
        [
            ([], {}),
            ([5, 10_000], {}),
            ([5, -1], {}),
            ([5] * 500, {"max_tokens": 100}),
            ([5], {"max_tokens": 0}),
            ([5], {"n": 0}),
            ([5], {"temperature": -0.5}),
            ([5], {"top_p": 0.0}),
            ([5], {"top_p": 1.5}),
        ],
        ids=["empty", "unknown-id", "negative-id", "no-room", "max_tokens", "n", "temperature", "top_p-0", "top_p-2"],
    )
    def test_bad_request(self, rollout: BaseRollout, prompt: list[int], change: dict[str, Any]) -> None:
        """What cannot be served is refused, and harms no request beside it."""
        good = RolloutRequest("good", [5, 6, 7], GREEDY)
        bad = RolloutRequest("bad", prompt, replace(GREEDY, **change))

        async def both() -> list[RolloutOutput | BaseException]:
            return await asyncio.gather(*map(rollout.generate, [good, bad]), return_exceptions=True)

        answer, error = asyncio.run(both())
        assert isinstance(error, RollcastError), f"a bad request gave {error!r}"
        assert isinstance(answer, RolloutOutput), f"the request beside it gave {answer!r}"

    def test_weight_update(self, rollout: BaseRollout, tmp_path: Path) -> None:
        """After an update the answers are the new model's, and so are the versions."""
        prompts = _prompts(6)
        before = [list(_only(output).token_ids) for output in _run(rollout, prompts, GREEDY)]
        other = _load(_write_model(tmp_path / "other", seed=1))
        named = list(other.named_parameters())
        report = asyncio.run(rollout.update_weights([named[:3], named[3:]], version=7))
        assert report.version == 7
        assert report.tensors == len(named)
        assert report.bytes > 0
        outputs = _run(rollout, prompts, GREEDY)
        after = [list(_only(output).token_ids) for output in outputs]
        assert after == [_greedy(other, prompt, GREEDY.max_tokens) for prompt in prompts]
        assert after != before
        assert {version for output in outputs for version in _only(output).weight_versions} == {7}

    def test_weight_update_names_a_wrong_tensor(self, rollout: BaseRollout, reference: Any) -> None:
        """An unknown name is an error that says the name."""
        bucket = [*reference.named_parameters(), ("model.no_such.weight", torch.zeros(2))]
        with pytest.raises(RollcastError, match=r"no_such\.weight"):
            asyncio.run(rollout.update_weights([bucket], version=1))

    def test_abort(self, rollout: BaseRollout) -> None:
        """An aborted request comes back with what it has; the others are left alone."""
        if not rollout.capabilities.abort:
            with pytest.raises(CapabilityError):
                asyncio.run(rollout.abort())
            return
        long = SamplingParams(max_tokens=480, ignore_eos=True)

        async def abort_one() -> list[RolloutOutput]:
            requests = [
                RolloutRequest("gone", [5, 6], long),
                RolloutRequest("stays", [5, 6], replace(long, max_tokens=30)),
            ]
            tasks = [asyncio.create_task(rollout.generate(request)) for request in requests]
            await asyncio.sleep(0.02)
            await rollout.abort(["gone"])
            return list(await asyncio.gather(*tasks))

        gone, stays = (_only(output) for output in asyncio.run(abort_one()))
        assert gone.finish_reason == "abort"
        assert len(gone.token_ids) == len(gone.log_probs) == len(gone.weight_versions) < 480
        assert stays.finish_reason == "length"
        assert len(stays.token_ids) == 30

    def test_release_and_resume(self, rollout: BaseRollout) -> None:
        """After memory was given back and taken again the answers are the same."""
        prompts = _prompts(3)
        before = _run(rollout, prompts, GREEDY)

        async def release_and_resume() -> None:
            await rollout.release()
            await rollout.resume()

        asyncio.run(release_and_resume())
        after = _run(rollout, prompts, GREEDY)
        assert [_only(each).token_ids for each in after] == [_only(each).token_ids for each in before]

    def test_state_brings_the_samples_back(self, rollout: BaseRollout) -> None:
        """From the same state the same requests get the same tokens; a second run goes on instead."""
        prompts, sampling = _prompts(8), SamplingParams(max_tokens=12, ignore_eos=True)
        _run(rollout, prompts, sampling)
        state = rollout.state_dict()
        if not state:
            pytest.skip(f"{self.name} keeps no state")
        first, second = (_tokens(_run(rollout, prompts, sampling)) for _ in range(2))
        rollout.load_state_dict(state)
        again = _tokens(_run(rollout, prompts, sampling))
        assert again == first
        assert second != first

    def test_a_seed_decides_the_tokens(self, rollout: BaseRollout) -> None:
        """Alone, or among others in another order: a request with a seed gets the same sequences."""
        if not rollout.capabilities.seeds:
            pytest.skip(f"{self.name} takes no seeds")
        sampling = SamplingParams(max_tokens=12, n=2, ignore_eos=True)
        requests = [RolloutRequest(f"r{i}", prompt, sampling, seed=i) for i, prompt in enumerate(_prompts(6))]
        together = _generate(rollout, requests)
        without = RolloutRequest("other", [5, 6], SamplingParams(max_tokens=3))
        reordered = _generate(rollout, [requests[4], without, requests[1], requests[0]])
        assert _tokens([reordered[0], *reordered[2:]]) == _tokens([together[4], together[1], together[0]])
        assert _tokens(_generate(rollout, [requests[3]])) == _tokens([together[3]])
        with pytest.raises(RollcastError, match="seed"):
            _generate(rollout, [replace(requests[3], seed=-1)])
        again = _tokens(_generate(rollout, [replace(requests[3], seed=99)]))
        assert again != _tokens([together[3]])
        assert again[0] != again[1]

    def _check_log_probs(
        self, reference: Any, prompt: Sequence[int], sequence: RolloutSequence, sampling: SamplingParams
    ) -> None:
        expected = _log_probs(reference, prompt, sequence.token_ids, sampling)
        assert len(sequence.log_probs) == len(expected)
        gap = max(abs(got - want) for got, want in zip(sequence.log_probs, expected, strict=True))
        assert gap <= self.tolerance, f"a log-prob is {gap} away from the sampled distribution's"


def _write_model(folder: Path, seed: int) -> Path:
    """A tiny model with large random weights: a freshly initialised one only repeats its last token."""
    tiny_model_folder(folder, seed=seed, head_dim=32)
    model = _load(folder)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    model.save_pretrained(folder)
    return folder


def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    return model.float().eval()


def _prompts(count: int) -> list[list[int]]:
    """Prompts of 1 to 12 tokens, none of them a special token."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 13, (count,), generator=generator).tolist()
    return [torch.randint(4, 80, (length,), generator=generator).tolist() for length in lengths]


def _generate(rollout: BaseRollout, requests: Sequence[RolloutRequest]) -> list[RolloutOutput]:
    async def gather() -> list[RolloutOutput]:
        return list(await asyncio.gather(*(rollout.generate(request) for request in requests)))

    return asyncio.run(gather())


def _run(rollout: BaseRollout, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[RolloutOutput]:
    return _generate(rollout, [RolloutRequest(f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts)])


def _only(output: RolloutOutput) -> RolloutSequence:
    assert len(output.sequences) == 1, f"{len(output.sequences)} sequences came for n=1"
    return output.sequences[0]


def _tokens(outputs: Sequence[RolloutOutput]) -> list[list[int]]:
    return [list(sequence.token_ids) for output in outputs for sequence in output.sequences]


def _greedy(model: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    with torch.no_grad():
        ids = torch.tensor([list(prompt)])
        full = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, pad_token_id=PAD
        )
    new: list[int] = full[0, len(prompt) :].tolist()
    return new


def _log_probs(model: Any, prompt: Sequence[int], tokens: Sequence[int], sampling: SamplingParams) -> list[float]:
    """Log-probs of ``tokens``, computed in one forward pass without a cache, the plain way."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
    scores = logits / sampling.temperature
    if sampling.top_k > 0:
        smallest = scores.topk(sampling.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < smallest, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = scores.softmax(-1).sort(dim=-1, descending=True)
        outside = ordered.cumsum(-1) - ordered >= sampling.top_p
        scores = scores.masked_fill(outside.gather(-1, order.argsort(-1)), -torch.inf)
    picked: list[float] = scores.log_softmax(-1).gather(-1, torch.tensor(list(tokens))[:, None])[:, 0].tolist()
    return picked
