"""The conformance suite of rollouts. Needs transformers, with which it compares; runs on a CPU.

Example, in a plugin's tests::

    from rollcast_testing.rollout import RolloutSuite

    class TestHf(RolloutSuite):
        name = "hf"
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollcast.contracts.rollout import (
    BaseRollout,
    RolloutMode,
    RolloutOutput,
    RolloutRequest,
    SamplingParams,
    rollouts,
)
from rollcast.errors import CapabilityError, RollcastError
from rollcast_testing.rollout_tools import (
    GREEDY,
    all_tokens,
    generate_all,
    greedy_tokens,
    make_prompts,
    only_sequence,
    run_prompts,
    token_logits,
)
from rollcast_testing.rollout_updates import RolloutUpdates

__all__ = ["RolloutSuite"]


class RolloutSuite(RolloutUpdates):
    """What every rollout has to do; subclass it, and name the rollout.

    Attributes:
        name: the rollout, as it is announced in ``rollcast.rollouts``.
        rollout_config: keys of its ``rollout`` section that differ from its schema's defaults.
        lora_config: further keys with which it takes adapters of rank 4.
        kill_engine: kills the engine of a rollout from outside, as a fault would; None where there is no
            process to kill.
        shared: one rollout serves all tests of the class, and gets the folder's weights again before each;
            for engines that take long to start.
        tolerance: how far a log-prob may be from the one that transformers computes in float32.
    """

    def test_suite_is_filled_in(self) -> None:
        """There is something to test."""
        assert self.name, f"{type(self).__name__}.name has to name a rollout"

    def test_capabilities(self) -> None:
        """A rollout runs somewhere, and in the trainer's process only if it is hybrid."""
        capabilities = rollouts.get(self.name).capabilities
        assert capabilities.modes, "capabilities.modes is empty"
        assert not capabilities.in_process or RolloutMode.HYBRID in capabilities.modes

    def test_weight_dtype(self, model_folder: Path) -> None:
        """The dtype of the weights is torch's name of one that floats have, or not known."""
        rollout_class = rollouts.get(self.name)
        config = rollout_class.config_schema(**self.rollout_config)
        dtype = rollout_class.weight_dtype(config, str(model_folder), "cpu")
        assert dtype is None or getattr(torch, dtype).is_floating_point

    def test_greedy_is_that_of_transformers(self, rollout: BaseRollout, reference: Any) -> None:
        """Temperature 0: the same tokens for 64 prompts of 64, and log-probs under the plain softmax."""
        prompts = make_prompts(64)
        for prompt, output in zip(prompts, run_prompts(rollout, prompts, GREEDY), strict=True):
            sequence = only_sequence(output)
            assert list(sequence.token_ids) == greedy_tokens(reference, prompt, GREEDY.max_tokens)
            self.check_log_probs(reference, prompt, sequence, replace(GREEDY, temperature=1.0))

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
        prompts = make_prompts(8)
        for prompt, output in zip(prompts, run_prompts(rollout, prompts, sampling), strict=True):
            assert output.sampling == sampling
            self.check_log_probs(reference, prompt, only_sequence(output), sampling)

    @pytest.mark.parametrize(
        "change",
        [{"min_p": 0.3}, {"repetition_penalty": 1.7}, {"logit_bias": ((7, 4.0), (11, -100.0))}],
        ids=["min_p", "repetition_penalty", "logit_bias"],
    )
    @pytest.mark.parametrize("temperature", [0.7, 0.0], ids=["sampled", "greedy"])
    def test_optional_sampling(
        self, rollout: BaseRollout, reference: Any, change: dict[str, Any], temperature: float
    ) -> None:
        """A parameter of ``capabilities.sampling`` shapes the distribution; any other is refused by name."""
        prompts, (name,) = make_prompts(8), change
        sampling = SamplingParams(temperature=temperature, max_tokens=10, ignore_eos=True, **change)
        if name not in rollout.capabilities.sampling:
            with pytest.raises(CapabilityError, match=name):
                run_prompts(rollout, prompts, sampling)
            return
        for prompt, output in zip(prompts, run_prompts(rollout, prompts, sampling), strict=True):
            sequence = only_sequence(output)
            if temperature:
                self.check_log_probs(reference, prompt, sequence, sampling)
                continue
            self.check_log_probs(reference, prompt, sequence, replace(sampling, temperature=1.0, min_p=0.0))
            best = token_logits(reference, prompt, sequence.token_ids, sampling).argmax(-1)
            assert list(sequence.token_ids) == best.tolist()

    def test_load(self, rollout: BaseRollout) -> None:
        """A rollout says how many sequences it computes at once."""
        run_prompts(rollout, make_prompts(4), GREEDY)
        load = asyncio.run(rollout.report_load())
        assert load.limit >= 1
        assert load.running >= 0
        assert load.waiting == 0
        assert 0 <= load.kv_cache_usage <= 1

    def test_n(self, rollout: BaseRollout) -> None:
        """``n`` sequences for one prompt, drawn independently."""
        (output,) = run_prompts(rollout, make_prompts(1), SamplingParams(n=4, max_tokens=8, ignore_eos=True))
        assert len(output.sequences) == 4
        assert len({tuple(sequence.token_ids) for sequence in output.sequences}) > 1

    def test_length(self, rollout: BaseRollout) -> None:
        """Without a stop there are ``max_tokens`` tokens, each with a log-prob and a version."""
        (output,) = run_prompts(rollout, make_prompts(1), SamplingParams(max_tokens=9, ignore_eos=True))
        sequence = only_sequence(output)
        assert sequence.finish_reason == "length"
        assert len(sequence.token_ids) == len(sequence.log_probs) == len(sequence.weight_versions) == 9

    def test_stop_token(self, rollout: BaseRollout, reference: Any) -> None:
        """Generation ends after the first stop token, which stays in the output."""
        prompt = make_prompts(1)[0]
        expected = greedy_tokens(reference, prompt, GREEDY.max_tokens)
        stop = expected[min(2, len(expected) - 1)]
        (output,) = run_prompts(rollout, [prompt], replace(GREEDY, stop_token_ids=(stop,)))
        assert list(only_sequence(output).token_ids) == expected[: expected.index(stop) + 1]
        assert only_sequence(output).finish_reason == "stop"

    def test_stop_string(self, rollout: BaseRollout, reference: Any, model_folder: Path) -> None:
        """Generation ends at the token that completes a stop string, which stays whole; other sequences go on."""
        from transformers import AutoTokenizer

        prompt = make_prompts(1)[0]
        expected = greedy_tokens(reference, prompt, GREEDY.max_tokens)
        tokenizer = AutoTokenizer.from_pretrained(model_folder)
        texts = [str(tokenizer.decode(expected[:end], skip_special_tokens=False)) for end in range(len(expected) + 1)]
        # From the middle of one token's text to the middle of the next one's, if they have that many characters.
        stop = texts[4][(len(texts[2]) + len(texts[3])) // 2 : -1] or texts[4][len(texts[3]) :]
        count = next(end for end, text in enumerate(texts) if stop in text)
        requests = [
            RolloutRequest("stops", prompt, replace(GREEDY, stop=("no such text", stop))),
            RolloutRequest("goes on", prompt, replace(GREEDY, stop=("no such text",))),
        ]
        stopped, whole = (only_sequence(output) for output in generate_all(rollout, requests))
        assert list(stopped.token_ids) == expected[:count]
        assert len(stopped.log_probs) == len(stopped.weight_versions) == count
        assert stopped.finish_reason == "stop"
        assert list(whole.token_ids) == expected

    def test_many_at_once(self, rollout: BaseRollout, reference: Any) -> None:
        """64 requests with their own lengths under way together: each gets its own answer."""
        prompts = make_prompts(64)
        requests = [
            RolloutRequest(f"r{i}", prompt, replace(GREEDY, max_tokens=1 + i % 7)) for i, prompt in enumerate(prompts)
        ]
        for request, output in zip(requests, generate_all(rollout, requests), strict=True):
            assert output.request_id == request.request_id
            expected = greedy_tokens(reference, request.prompt_ids, request.sampling.max_tokens)
            assert list(only_sequence(output).token_ids) == expected

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

    def test_multi_modal_data_is_taken_or_refused(self, rollout: BaseRollout) -> None:
        """Data beside the tokens is never dropped silently; a refusal names the request."""
        if rollout.capabilities.multi_modal:
            pytest.skip("capabilities.multi_modal is True")
        prompt = make_prompts(1)[0]
        request = RolloutRequest("seen", prompt, GREEDY, multi_modal_data={"image": [b"..."]})
        with pytest.raises(CapabilityError, match=r"request 'seen' carries multi_modal_data \(image\)"):
            generate_all(rollout, [request])
        (output,) = run_prompts(rollout, [prompt], GREEDY)
        assert only_sequence(output).token_ids

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

        gone, stays = (only_sequence(output) for output in asyncio.run(abort_one()))
        assert gone.finish_reason == "abort"
        assert len(gone.token_ids) == len(gone.log_probs) == len(gone.weight_versions) < 480
        assert stays.finish_reason == "length"
        assert len(stays.token_ids) == 30

    def test_release_and_resume(self, rollout: BaseRollout) -> None:
        """After memory was given back and taken again the answers are the same."""
        prompts = make_prompts(3)
        before = run_prompts(rollout, prompts, GREEDY)

        async def release_and_resume() -> None:
            await rollout.release()
            await rollout.resume()

        asyncio.run(release_and_resume())
        after = run_prompts(rollout, prompts, GREEDY)
        assert [only_sequence(each).token_ids for each in after] == [only_sequence(each).token_ids for each in before]

    def test_state_brings_the_samples_back(self, rollout: BaseRollout) -> None:
        """From the same state the same requests get the same tokens; a second run goes on instead."""
        prompts, sampling = make_prompts(8), SamplingParams(max_tokens=12, ignore_eos=True)
        run_prompts(rollout, prompts, sampling)
        state = rollout.state_dict()
        if not state:
            pytest.skip(f"{self.name} keeps no state")
        first, second = (all_tokens(run_prompts(rollout, prompts, sampling)) for _ in range(2))
        rollout.load_state_dict(state)
        again = all_tokens(run_prompts(rollout, prompts, sampling))
        assert again == first
        assert second != first

    def test_a_seed_decides_the_tokens(self, rollout: BaseRollout) -> None:
        """Alone, or among others in another order: a request with a seed gets the same sequences."""
        if not rollout.capabilities.seeds:
            pytest.skip(f"{self.name} takes no seeds")
        sampling = SamplingParams(max_tokens=12, n=2, ignore_eos=True)
        requests = [RolloutRequest(f"r{i}", prompt, sampling, seed=i) for i, prompt in enumerate(make_prompts(6))]
        together = generate_all(rollout, requests)
        without = RolloutRequest("other", [5, 6], SamplingParams(max_tokens=3))
        reordered = generate_all(rollout, [requests[4], without, requests[1], requests[0]])
        assert all_tokens([reordered[0], *reordered[2:]]) == all_tokens([together[4], together[1], together[0]])
        assert all_tokens(generate_all(rollout, [requests[3]])) == all_tokens([together[3]])
        with pytest.raises(RollcastError, match="seed"):
            generate_all(rollout, [replace(requests[3], seed=-1)])
        again = all_tokens(generate_all(rollout, [replace(requests[3], seed=99)]))
        assert again != all_tokens([together[3]])
        assert again[0] != again[1]
