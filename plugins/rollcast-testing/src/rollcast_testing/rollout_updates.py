"""Conformance tests of rollouts for weight updates, adapters and dead engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from rollcast.contracts.rollout import BaseRollout, RolloutOutput, RolloutRequest, SamplingParams, rollouts
from rollcast.contracts.weights import AdapterWeights, WeightBucket, WeightReport
from rollcast.errors import CapabilityError, RollcastError, RolloutError, WeightSyncError
from rollcast.protocol import tensor_checksum
from rollcast_testing.rollout_tools import (
    GREEDY,
    RolloutFixtures,
    all_tokens,
    greedy_tokens,
    load_model,
    make_prompts,
    only_sequence,
    run_prompts,
    token_log_probs,
    write_model,
)

__all__ = ["RolloutUpdates"]

#: Sent beside long requests: when it is answered, they are under way.
SHORT = RolloutRequest("short", [7, 8], SamplingParams(max_tokens=8, ignore_eos=True))
#: A dead engine's requests hang if they are not answered by then.
LIMIT_S = 300.0

Named = list[tuple[str, Tensor]]


class RolloutUpdates(RolloutFixtures):
    """Tests of weight updates, adapters and failures; part of :class:`~rollcast_testing.rollout.RolloutSuite`."""

    long_tokens: ClassVar[int] = 400
    kill_engine: ClassVar[Callable[[BaseRollout], None] | None] = None

    def test_weight_update(self, rollout: BaseRollout, tmp_path: Path) -> None:
        """Check that answers and versions after an update are those of the new model."""
        before = all_tokens(run_prompts(rollout, make_prompts(6), GREEDY))
        other = load_model(write_model(tmp_path / "other", seed=1))
        self._check_update(rollout, other, 7)
        assert all_tokens(run_prompts(rollout, make_prompts(6), GREEDY)) != before

    def test_weight_updates_of_an_untied_model(self, tmp_path: Path) -> None:
        """Check that an untied model receives both its embedding and its head."""
        rollout = self.build_rollout(write_model(tmp_path / "untied", seed=2, tied=False))
        try:
            for seed in (3, 4):
                folder = write_model(tmp_path / f"other{seed}", seed=seed, tied=False)
                self._check_update(rollout, load_model(folder), seed)
        finally:
            rollout.close()

    def test_a_tied_weight_may_come_by_both_names(self, rollout: BaseRollout, tmp_path: Path) -> None:
        """Check that a tied weight may be sent under both names, as in the state of a module with a tied head."""
        other = load_model(write_model(tmp_path / "other", seed=1))
        self._check_update(rollout, other, 5, list(other.state_dict().items()))

    @pytest.mark.parametrize("fault", ["unknown", "shape", "missing", "changed"])
    def test_weight_update_names_a_wrong_tensor(self, rollout: BaseRollout, reference: Any, fault: str) -> None:
        """Check that a corrupt tensor is rejected by name and that generation is blocked until a valid update."""
        named: Named = [(name, tensor.detach()) for name, tensor in reference.named_parameters()]
        bucket, wrong = _spoil(named, fault)
        with pytest.raises(WeightSyncError, match=wrong.replace(".", r"\.")) as caught:
            asyncio.run(rollout.update_weights([named[:4], bucket], version=1))
        assert caught.value.tensor == wrong
        with pytest.raises(WeightSyncError):
            run_prompts(rollout, [[5, 6]], GREEDY)
        self._check_update(rollout, reference, 2)

    def test_requests_under_way_during_a_weight_update(
        self, rollout: BaseRollout, reference: Any, tmp_path: Path
    ) -> None:
        """Check that each token is drawn from the weights whose version it carries, given all tokens before it.

        Without ``capabilities.update_in_flight`` the update follows the requests, as the framework then has it.
        """
        other = load_model(write_model(tmp_path / "other", seed=1))

        async def update() -> None:
            await rollout.update_weights([list(other.named_parameters())], 9)

        old = self._version(rollout)
        seen = self._check_meanwhile(rollout, update, {old: reference, 9: other})
        assert seen <= {(old,), (old, 9), (9,)}
        if not rollout.capabilities.update_in_flight:
            assert seen == {(old,)}
        elif rollout.capabilities.continuous_batching:
            assert (old, 9) in seen, "no request was under way during the update"

    def test_quantized_weights(self, tmp_path: Path) -> None:
        """Check that quantized weights follow updates: log-probs differ from the full weights' by rounding alone."""
        precisions = sorted(rollouts.get(self.name).capabilities.quantization)
        if not precisions or not torch.cuda.is_available():
            pytest.skip("capabilities.quantization is empty" if not precisions else "needs a CUDA device")
        folders = [write_model(tmp_path / f"model{seed}", seed=seed) for seed in (0, 1)]
        models = [load_model(folder) for folder in folders]
        for precision in precisions:
            rollout = self.build_rollout(folders[0], **self.quantized_config, quantization=precision)
            try:
                _check_rounding(rollout, *models)
                asyncio.run(rollout.update_weights([list(models[1].named_parameters())], 1))
                _check_rounding(rollout, *models[::-1])
            finally:
                rollout.close()

    def test_adapter(self, model_folder: Path, reference: Any) -> None:
        """Check that an adapter changes the answers, that a second one replaces it, and that full weights remove it."""
        rollout = self.build_rollout(model_folder, **self.lora_config)
        try:
            if not rollout.capabilities.lora:
                with pytest.raises(CapabilityError):
                    asyncio.run(rollout.update_adapter(_make_adapter(reference, 1), 1))
                return
            self._check_answers(rollout, reference)
            models = {self._version(rollout): reference}
            for version in (3, 4):
                adapter = _make_adapter(reference, version)
                models[version] = _merge(model_folder, adapter)
                self._check_adapter_update(rollout, adapter, version, models)
                self._check_answers(rollout, models[version], version)
            self._check_wrong_adapter(rollout, reference)
            self._check_update(rollout, reference, 6)
        finally:
            rollout.close()

    def test_a_dead_engine(self, model_folder: Path) -> None:
        """Check that requests in flight, later requests and the health check raise and do not hang."""
        kill = type(self).kill_engine
        if kill is None:
            pytest.skip(f"{self.name} has no engine to kill")
        rollout = self.build_rollout(model_folder)

        async def die_meanwhile() -> list[Any]:
            await rollout.check_health()
            sampling = SamplingParams(max_tokens=self.long_tokens, ignore_eos=True)
            tasks = [asyncio.create_task(rollout.generate(RolloutRequest(f"r{i}", [5], sampling))) for i in range(4)]
            await rollout.generate(SHORT)
            kill(rollout)
            return [
                *await asyncio.gather(*tasks, return_exceptions=True),
                *await asyncio.gather(rollout.generate(SHORT), rollout.check_health(), return_exceptions=True),
            ]

        try:
            answers = asyncio.run(asyncio.wait_for(die_meanwhile(), LIMIT_S))
        finally:
            rollout.close()
        assert len(answers) == 6
        assert all(isinstance(answer, RolloutError) for answer in answers), answers

    def _version(self, rollout: BaseRollout) -> int:
        (output,) = run_prompts(rollout, [[5]], GREEDY)
        return only_sequence(output).weight_versions[0]

    def _check_meanwhile(
        self, rollout: BaseRollout, update: Callable[[], Awaitable[None]], models: Mapping[int, Any]
    ) -> set[tuple[int, ...]]:
        """Update the weights while long requests run, or after them; compare each token with the model of its version.

        Returns:
            The distinct sequences of versions.
        """
        prompts = make_prompts(6)
        # An update that follows the requests meets none under way, however long they are.
        tokens = self.long_tokens if rollout.capabilities.update_in_flight else 32
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)

        async def update_meanwhile() -> list[RolloutOutput]:
            long = [RolloutRequest(f"long{i}", prompt, sampling) for i, prompt in enumerate(prompts)]
            tasks = [asyncio.create_task(rollout.generate(request)) for request in long]
            await rollout.generate(SHORT)
            if not rollout.capabilities.update_in_flight:
                await asyncio.gather(*tasks)
            await update()
            after = await rollout.generate(SHORT)
            return [after, *await asyncio.gather(*tasks)]

        after, *outputs = asyncio.run(update_meanwhile())
        assert set(only_sequence(after).weight_versions) == {max(models)}
        for prompt, output in zip(prompts, outputs, strict=True):
            sequence = only_sequence(output)
            assert sequence.finish_reason == "length"
            assert len(sequence.token_ids) == len(sequence.weight_versions) == sampling.max_tokens
            expected = {
                version: token_log_probs(model, prompt, sequence.token_ids, sampling)
                for version, model in models.items()
            }
            for place, (version, log_prob) in enumerate(zip(sequence.weight_versions, sequence.log_probs, strict=True)):
                gap = abs(expected[version][place] - log_prob)
                assert gap <= self.tolerance, f"token {place} of version {version} is {gap} away from its weights"
        return {tuple(dict.fromkeys(only_sequence(output).weight_versions)) for output in outputs}

    def _check_adapter_update(
        self, rollout: BaseRollout, adapter: AdapterWeights, version: int, models: Mapping[int, Any]
    ) -> None:
        reports: list[WeightReport] = []

        async def update() -> None:
            reports.append(await rollout.update_adapter(adapter, version))

        self._check_meanwhile(rollout, update, models)
        assert reports[0].version == version
        assert reports[0].tensors == len(adapter.tensors)
        assert reports[0].bytes == sum(tensor.nbytes for tensor in adapter.tensors.values())

    def _check_update(self, rollout: BaseRollout, model: Any, version: int, named: Named | None = None) -> None:
        sent = list(model.named_parameters()) if named is None else named
        report = asyncio.run(rollout.update_weights([sent[:3], sent[3:]], version))
        assert report.version == version
        assert report.tensors == len(sent)
        assert report.bytes == sum(tensor.nbytes for _, tensor in sent)
        self._check_answers(rollout, model, version)

    def _check_answers(self, rollout: BaseRollout, model: Any, version: int | None = None) -> None:
        prompts = make_prompts(6)
        for prompt, output in zip(prompts, run_prompts(rollout, prompts, GREEDY), strict=True):
            sequence = only_sequence(output)
            assert list(sequence.token_ids) == greedy_tokens(model, prompt, GREEDY.max_tokens)
            self.check_log_probs(model, prompt, sequence, replace(GREEDY, temperature=1.0))
            assert version is None or set(sequence.weight_versions) == {version}

    def _check_wrong_adapter(self, rollout: BaseRollout, reference: Any) -> None:
        adapter = _make_adapter(reference, 5)
        wrong = next(name for name in adapter.tensors if "k_proj" in name)
        for tensors in (
            {**adapter.tensors, wrong: torch.zeros(4, 3)},
            {**adapter.tensors, wrong.replace("k_proj", "no_such"): adapter.tensors[wrong]},
        ):
            with pytest.raises(WeightSyncError, match=r"k_proj|no_such"):
                asyncio.run(rollout.update_adapter(AdapterWeights(adapter.config, tensors), 5))
            with pytest.raises(RollcastError):
                run_prompts(rollout, [[5, 6]], GREEDY)


def _check_rounding(rollout: BaseRollout, model: Any, other: Any) -> None:
    """Check that log-probs are near those of one model, though not equal, and far from those of another."""
    sampling, prompts = SamplingParams(max_tokens=8, ignore_eos=True), make_prompts(8)
    gaps: dict[str, list[float]] = {"own": [], "other": []}
    for prompt, output in zip(prompts, run_prompts(rollout, prompts, sampling), strict=True):
        sequence = only_sequence(output)
        for name, source in (("own", model), ("other", other)):
            expected = token_log_probs(source, prompt, sequence.token_ids, sampling)
            gaps[name] += [abs(a - b) for a, b in zip(sequence.log_probs, expected, strict=True)]
    mean = {name: sum(values) / len(values) for name, values in gaps.items()}
    assert 1e-4 < mean["own"] < 0.2 * mean["other"], mean


def _spoil(named: Named, fault: str) -> tuple[Sequence[tuple[str, Tensor]], str]:
    """Return the second half of a model's weights with one fault, and the name of the faulty tensor."""
    rest = named[4:]
    name, tensor = rest[2]
    if fault == "unknown":
        return [*rest, ("model.no_such.weight", torch.zeros(2))], "model.no_such.weight"
    if fault == "shape":
        return [*rest[:2], (name, torch.zeros(3, 5)), *rest[3:]], name
    if fault == "missing":
        return [*rest[:2], *rest[3:]], name
    expected = {tensor_name: tensor_checksum(value) for tensor_name, value in rest}
    expected[name] = tensor_checksum(tensor + 1)
    return WeightBucket(rest, expected), name


def _make_adapter(model: Any, seed: int) -> AdapterWeights:
    """Build an adapter of rank 4 for four matrices of each layer, large enough to change the answers."""
    generator = torch.Generator().manual_seed(seed)
    targets = ["q_proj", "k_proj", "v_proj", "down_proj"]
    tensors: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        module = name.removesuffix(".weight")
        if weight.ndim == 2 and module.split(".")[-1] in targets:
            for half, shape in (("A", (4, weight.shape[1])), ("B", (weight.shape[0], 4))):
                value = torch.randn(shape, generator=generator) * 0.2
                tensors[f"base_model.model.{module}.lora_{half}.weight"] = value
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": targets,
    }
    return AdapterWeights(config, tensors)


def _merge(folder: Path, adapter: AdapterWeights) -> Any:
    """Load the folder's model and add an adapter to its weights."""
    model = load_model(folder)
    scale = adapter.config["lora_alpha"] / adapter.config["r"]
    with torch.no_grad():
        for name, first in adapter.tensors.items():
            if ".lora_A." in name:
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                second = adapter.tensors[name.replace(".lora_A.", ".lora_B.")]
                model.get_parameter(f"{module}.weight").add_(scale * second @ first)
    return model
