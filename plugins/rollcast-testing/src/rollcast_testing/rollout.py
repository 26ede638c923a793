"""The conformance suite of rollouts, which compares with transformers on a CPU.

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
from rollcast_data.tokenizer import read_tokenizer
from rollcast_testing.rollout_images import RolloutImages
from rollcast_testing.rollout_mixture import RolloutMixtures
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


class RolloutSuite(RolloutUpdates, RolloutMixtures, RolloutImages):
    """Conformance tests of one rollout; subclass it and set the name.

    Attributes:
        name: name of the rollout in ``rollcast.rollouts``.
        rollout_config: keys of the ``rollout`` section that differ from the schema's defaults.
        lora_config: further keys that enable adapters of rank 4.
        quantized_config: further keys for weights in the precisions of ``capabilities.quantization``.
        mixtures: False for a rollout that runs dense models only.
        routing_config: further keys with which the experts of a mixture are recorded; None if the machine of the tests
            cannot record them.
        kill_engine: function that kills the rollout's engine from outside, as a fault would; None if there is no
            process to kill.
        shared: True to share one rollout between all tests of the class and reload the folder's weights before each
            test, for engines that start slowly.
        long_tokens: tokens of the requests that an update, an adapter or a fault meets under way; fewer for an engine
            that takes long for them.
        tolerance: largest difference between a log-prob and that of transformers in float32.
    """

    def test_suite_is_filled_in(self) -> None:
        """Check that the suite names a rollout."""
        assert self.name, f"{type(self).__name__}.name has to name a rollout"

    def test_capabilities(self) -> None:
        """Check that the rollout supports a mode, and runs in the trainer's process only if it supports ``hybrid``."""
        capabilities = rollouts.get(self.name).capabilities
        assert capabilities.modes, "capabilities.modes is empty"
        assert not capabilities.in_process or RolloutMode.HYBRID in capabilities.modes

    def test_weight_dtype(self, model_folder: Path) -> None:
        """Check that the dtype of the weights is torch's name of a float dtype, or None."""
        rollout_class = rollouts.get(self.name)
        config = rollout_class.config_schema(**self.rollout_config)
        dtype = rollout_class.weight_dtype(config, str(model_folder), "cpu")
        assert dtype is None or getattr(torch, dtype).is_floating_point

    def test_greedy_is_that_of_transformers(self, rollout: BaseRollout, reference: Any) -> None:
        """Check that temperature 0 generates the tokens and log-probs of transformers for 64 of 64 prompts."""
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
        """Check that log-probs are computed after temperature, top-k and top-p, and that the output names these."""
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
        """Check that parameters in ``capabilities.sampling`` are applied and others are refused by name."""
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
        """Check that the rollout reports how many sequences it can compute at once."""
        run_prompts(rollout, make_prompts(4), GREEDY)
        load = asyncio.run(rollout.report_load())
        assert load.limit >= 1
        assert load.running >= 0
        assert load.waiting == 0
        assert 0 <= load.kv_cache_usage <= 1

    def test_n(self, rollout: BaseRollout) -> None:
        """Check that ``n`` sequences of a prompt are drawn independently."""
        (output,) = run_prompts(rollout, make_prompts(1), SamplingParams(n=4, max_tokens=8, ignore_eos=True))
        assert len(output.sequences) == 4
        assert len({tuple(sequence.token_ids) for sequence in output.sequences}) > 1

    def test_length(self, rollout: BaseRollout) -> None:
        """Check that without a stop there are ``max_tokens`` tokens, each with a log-prob and a version."""
        (output,) = run_prompts(rollout, make_prompts(1), SamplingParams(max_tokens=9, ignore_eos=True))
        sequence = only_sequence(output)
        assert sequence.finish_reason == "length"
        assert len(sequence.token_ids) == len(sequence.log_probs) == len(sequence.weight_versions) == 9

    def test_stop_token(self, rollout: BaseRollout, reference: Any) -> None:
        """Check that generation ends after the first stop token, which stays in the output."""
        prompt = make_prompts(1)[0]
        expected = greedy_tokens(reference, prompt, GREEDY.max_tokens)
        stop = expected[min(2, len(expected) - 1)]
        (output,) = run_prompts(rollout, [prompt], replace(GREEDY, stop_token_ids=(stop,)))
        assert list(only_sequence(output).token_ids) == expected[: expected.index(stop) + 1]
        assert only_sequence(output).finish_reason == "stop"

    def test_stop_string(self, rollout: BaseRollout, reference: Any, model_folder: Path) -> None:
        """Check that generation ends at the token that completes a stop text, and that other sequences continue."""
        prompt = make_prompts(1)[0]
        expected = greedy_tokens(reference, prompt, GREEDY.max_tokens)
        tokenizer = read_tokenizer(model_folder)
        texts = [str(tokenizer.decode(expected[:end], skip_special_tokens=False)) for end in range(len(expected) + 1)]
        # The stop text spans from the middle of one token's text to the middle of the next one's, if long enough.
        stop = texts[4][(len(texts[2]) + len(texts[3])) // 2 : -1] or texts[4][len(texts[3]) :]
        count = next(end for end, text in enumerate(texts) if stop in text)
        # A stop text that takes many tokens, with which the response begins.
        long = texts[min(8, len(expected))]
        requests = [
            RolloutRequest("stops", prompt, replace(GREEDY, stop=("no such text", stop))),
            RolloutRequest("long", prompt, replace(GREEDY, stop=(long,))),
            RolloutRequest("goes on", prompt, replace(GREEDY, stop=("no such text",))),
        ]
        stopped, begins, whole = (only_sequence(output) for output in generate_all(rollout, requests))
        assert list(stopped.token_ids) == expected[:count]
        assert len(stopped.log_probs) == len(stopped.weight_versions) == count
        assert stopped.finish_reason == "stop"
        assert list(begins.token_ids) == expected[: texts.index(long)]
        assert list(whole.token_ids) == expected

    def test_many_at_once(self, rollout: BaseRollout, reference: Any) -> None:
        """Check that each of 64 concurrent requests of different lengths gets its own answer."""
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
        """Check that an invalid request is refused without affecting a concurrent request."""
        good = RolloutRequest("good", [5, 6, 7], GREEDY)
        bad = RolloutRequest("bad", prompt, replace(GREEDY, **change))

        async def both() -> list[RolloutOutput | BaseException]:
            return await asyncio.gather(*map(rollout.generate, [good, bad]), return_exceptions=True)

        answer, error = asyncio.run(both())
        assert isinstance(error, RollcastError), f"a bad request gave {error!r}"
        assert isinstance(answer, RolloutOutput), f"the request beside it gave {answer!r}"

    def test_multi_modal_data_is_taken_or_refused(self, rollout: BaseRollout) -> None:
        """Check that multi-modal data is never dropped silently; a refusal names the request."""
        if rollout.capabilities.multi_modal:
            pytest.skip("capabilities.multi_modal is True")
        prompt = make_prompts(1)[0]
        request = RolloutRequest("seen", prompt, GREEDY, multi_modal_data={"image": [b"..."]})
        with pytest.raises(CapabilityError, match=r"request 'seen' carries multi_modal_data \(image\)"):
            generate_all(rollout, [request])
        (output,) = run_prompts(rollout, [prompt], GREEDY)
        assert only_sequence(output).token_ids

    def test_abort(self, rollout: BaseRollout) -> None:
        """Check that an aborted request returns its tokens so far, and that other requests are not affected."""
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
        """Check that the answers are the same after memory was released and resumed."""
        prompts = make_prompts(3)
        before = run_prompts(rollout, prompts, GREEDY)

        async def release_and_resume() -> None:
            await rollout.release()
            await rollout.resume()

        asyncio.run(release_and_resume())
        after = run_prompts(rollout, prompts, GREEDY)
        assert [only_sequence(result).token_ids for result in after] == [
            only_sequence(result).token_ids for result in before
        ]

    def test_state_brings_the_samples_back(self, rollout: BaseRollout) -> None:
        """Check that the same requests get the same tokens after the state is restored, and others without."""
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
        """Check that a request with a seed gets the same sequences alone and among others in any order."""
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
