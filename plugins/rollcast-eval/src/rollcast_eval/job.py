"""The job of ``rollcast generate`` and ``rollcast eval``, which samples a model for a file of prompts."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf

from rollcast import WorkerGroup
from rollcast.contracts.rollout import SamplingParams
from rollcast.contracts.runtime import Runtime
from rollcast.contracts.storage import is_url
from rollcast.contracts.worker import ClassWithInitArgs
from rollcast.errors import ConfigError
from rollcast.protocol import DataProto
from rollcast_data.contract import BaseDataset, datasets
from rollcast_data.loader import FirstRows
from rollcast_data.schemas import DataConfig
from rollcast_eval.sampled_model import SampledModel
from rollcast_eval.samples_file import SamplesFile
from rollcast_eval.schemas import SampleConfig
from rollcast_rewards.schemas import RewardConfig
from rollcast_rewards.scoring import GeneratedSamples, RewardScorer, RewardSetup
from rollcast_serving.command_judge import NEEDS_JUDGE, CommandJudge
from rollcast_serving.contracts.generator import Answers, BaseGenerator, GeneratorSetup, dataset_name, generators
from rollcast_serving.launcher import ReplicaAddress
from rollcast_serving.pools import JUDGE
from rollcast_serving.replica_loop import ReplicaLoop
from rollcast_serving.replicas import Replicas
from rollcast_serving.requests import SAMPLING_KEYS, configured_sampling
from rollcast_serving.schemas import JudgeConfig

__all__ = ["SampleJob"]

logger = logging.getLogger(__name__)
_PROMPT_COLUMNS = ["prompts"]
Progress = Callable[[int, int], None]


class SampleJob:
    """A job that generates ``rollout.n`` samples for each prompt of a file with replicas of a model.

    Args:
        config: config composed with ``trainer=sample``.
        prompts: JSONL or Parquet file.
        output: file of samples; samples that it already has are kept.
        scored: score the samples with the config's reward.
        overwrite: drop the samples that the output already has.

    Raises:
        RollcastError: the config, the prompts or the output is not usable; nothing has been started.
    """

    def __init__(self, config: DictConfig, prompts: Path, output: Path, scored: bool, overwrite: bool = False) -> None:
        self._config = config
        self._served = served = SampledModel(config)
        self._rollout = served.rollout
        self._data: DataConfig = served.section("data", DataConfig)
        self._sample: SampleConfig = served.section("sample", SampleConfig)
        judges = served.pools.get_resource_pool(JUDGE).process_on_nodes
        self._judge = CommandJudge.of(served.section("judge", JudgeConfig), judges) if scored else None
        self.tokenizer = served.load_tokenizer()
        changes = {} if scored else {"ground_truth_key": None}
        name = dataset_name(self._data.dataset, config)
        dataset_class = cast("Any", datasets.get(name, requested_by="data.dataset"))
        rows = dataset_class([str(prompts)], self.tokenizer, replace(self._data, **changes))
        # Ignore a recipe's limit, which is for validations; a file of prompts is sampled completely.
        self.dataset: BaseDataset = FirstRows(rows, self._data.val_max_samples) if scored else rows
        self.scorer = self._build_scorer() if scored else None
        self._generator = self._build_generator(output)
        self.file = SamplesFile(output, self._settings(prompts, scored), self._rollout.n, overwrite)

    def _settings(self, prompts: Path, scored: bool) -> dict[str, Any]:
        """Return the settings that samples depend on; placement is not among them."""
        rollout, data = self._rollout, self._data
        named = str(self._config.model.path)
        digest = hashlib.blake2b(prompts.read_bytes(), digest_size=8).hexdigest()
        return {
            "model.path": named if is_url(named) else str(Path(named).resolve()),
            "prompts": f"{prompts.name} ({digest})",
            # Two engines draw different samples from the same seed.
            "rollout.name": self._config.rollout.name,
            **{f"rollout.{key}": getattr(rollout, key) for key in ("n", *SAMPLING_KEYS)},
            # The file of samples is JSON, whose keys are texts.
            "rollout.logit_bias": {str(token): bias for token, bias in sorted(rollout.logit_bias.items())},
            **{f"data.{key}": getattr(data, key) for key in ("max_prompt_length", "max_response_length", "prompt_key")},
            "sample.seed": self._sample.seed,
            **({} if self._generator is None else self._generator.settings()),
            **({"reward": OmegaConf.to_container(self._config.reward)} if scored else {}),
            **({"judge": OmegaConf.to_container(self._config.judge)} if self._judge is not None else {}),
        }

    def _build_scorer(self) -> RewardScorer:
        reward: RewardConfig = self._served.section("reward", RewardConfig)
        scorer = RewardScorer(RewardSetup.of(reward, self._data.max_response_length), self.tokenizer)
        if scorer.uses_judge and self._judge is None:
            raise ConfigError(f"reward.name={reward.name} {NEEDS_JUDGE}")
        return scorer

    def _build_generator(self, output: Path) -> BaseGenerator | None:
        """Return the generator that the config selects; None if a sample is a single reply."""
        longest = self._data.max_prompt_length + self._data.max_response_length
        folder = output.with_name(f"{output.name}.run")
        setup = GeneratorSetup(
            self._config,
            self._served.model.path,
            longest,
            self._served.role.routing(),
            self.tokenizer,
            folder,
            self._served.model.trust_remote_code,
        )
        kinds = (generators.get(name) for name in generators.names())
        return next((kind(setup) for kind in kinds if kind.is_wanted(self._config)), None)

    @property
    def samples(self) -> int:
        """Number of samples per prompt."""
        return int(self._rollout.n)

    def run(self, progress: Progress | None = None) -> list[dict[str, Any]]:
        """Generate the missing samples; return all rows, grouped by prompt.

        Args:
            progress: callback that takes the number of finished prompts and the number of all.

        Raises:
            RollcastError: a replica cannot be started, a request cannot be served, a reward failed.
        """
        count = len(self.dataset)
        missing = self.file.missing(count)
        with ExitStack() as stack:
            if self.scorer is not None:
                stack.callback(self.scorer.close)
            if missing:
                if self._generator is not None:
                    self._generator.resume(self.file.rows.keys())
                replicas = stack.enter_context(self._replicas())
                for start in range(0, len(missing), self._sample.chunk_size):
                    self.file.add(self._chunk(replicas, missing[start : start + self._sample.chunk_size]))
                    if progress is not None:
                        progress(len(self.file.rows), count)
        return self.file.in_order()

    @contextmanager
    def _replicas(self) -> Iterator[Replicas]:
        placed = self._served.placement.device
        workers: dict[Hashable, ClassWithInitArgs[Any]] = {}
        if self._generator is not None:
            workers.update(self._generator.workers())
        if self._judge is not None:
            workers[JUDGE] = self._judge.worker(self._sample.seed, placed)
        with self._served.serve(self._sample.seed, workers) as (replicas, groups, runtime):
            if self._generator is not None:
                self._generator.connect(groups, functools.partial(_living, replicas))
            with self._judging(groups, runtime, replicas.loop):
                yield replicas

    @contextmanager
    def _judging(self, groups: Mapping[Hashable, WorkerGroup], runtime: Runtime, loop: ReplicaLoop) -> Iterator[None]:
        """Serve the judge inside the block, if the rewards use one."""
        if self._judge is None or self.scorer is None:
            yield
            return
        judge = self._judge.start(groups[JUDGE], runtime, loop, [self.scorer])
        try:
            yield
        finally:
            self.scorer.close()  # before the judge that it asks
            judge.close()

    def _chunk(self, replicas: Replicas, indices: Sequence[int]) -> list[dict[str, Any]]:
        prompts = self.dataset.collate([self.dataset[index] for index in indices])
        rows = prompts.repeat(self.samples, interleave=True)
        seeds = [_seed(self._sample.seed, index, sample) for index in indices for sample in range(self.samples)]
        sampling = configured_sampling(self._rollout, self._data.max_response_length)
        answers = self._answer(replicas, rows, indices, torch.tensor(seeds), sampling)
        batch = answers.batch
        if self.scorer is not None:
            scored = self.scorer.score(batch).as_rows()
        else:
            final = batch.select_idxs(batch["is_final"].nonzero().flatten()) if "is_final" in batch else batch
            scored = self._plain(final)
        if answers.save is not None:
            answers.save([row.get("score") if self.scorer is not None else None for row in scored])
        numbers = [{"index": index, "sample": sample} for index in indices for sample in range(self.samples)]
        return [{**number, **row, **note} for number, row, note in zip(numbers, scored, answers.notes, strict=True)]

    def _answer(
        self,
        replicas: Replicas,
        rows: DataProto,
        indices: Sequence[int],
        seeds: torch.Tensor,
        sampling: SamplingParams,
    ) -> Answers:
        """Return the answers to these rows."""
        if self._generator is None:
            output = replicas.generate_sequences(rows.select(_PROMPT_COLUMNS).with_columns({"seed": seeds}), sampling)
            return Answers(rows.drop(_PROMPT_COLUMNS).joined(output), [{}] * len(rows))
        numbers = torch.tensor(indices).repeat_interleave(self.samples)
        prompts = rows.with_columns({"uid": numbers, "index": numbers})
        return self._generator.generate(prompts, seeds, sampling)

    def _plain(self, batch: DataProto) -> list[dict[str, Any]]:
        """Return rows without a score, with all other columns of the file of prompts."""
        texts = [sample.response for sample in GeneratedSamples(batch, self.tokenizer)]
        columns = batch.non_tensor_batch
        return [
            {**(extra or {}), "prompt": prompt, "response": text, "data_source": source, "finished": bool(finished)}
            for prompt, text, source, extra, finished in zip(
                columns["raw_prompt"],
                texts,
                columns["data_source"],
                columns["extra_info"],
                batch["finished"].tolist(),
                strict=True,
            )
        ]


def _living(replicas: Replicas) -> Sequence[ReplicaAddress]:
    """Restart dead replicas; return the addresses of all."""
    replicas.check_health()
    return replicas.addresses


def _seed(run: int, index: int, sample: int) -> int:
    """Return the seed of one sample; it does not depend on the samples generated before."""
    digest = hashlib.blake2b(f"{run}/{index}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
