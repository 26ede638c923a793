"""The job of ``rollcast profile``: start a recipe's workers and measure them by batch size and length."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from rollcast.contracts.rollout import SamplingParams
from rollcast.errors import CapabilityError, ConfigError
from rollcast.protocol import DataProto, Jagged
from rollcast_automap.memory.memory_model import measure_model
from rollcast_automap.profiling.costs import CostTable, Measurement, Phase, RoleLayout
from rollcast_automap.profiling.devices import describe_device
from rollcast_automap.profiling.flops import ModelFlops, read_model_flops
from rollcast_automap.profiling.passes import PassShape, measure_passes
from rollcast_trainer.api import ParallelSizes, Role, Run, RunSettings

__all__ = ["CostJob", "Grid", "a_step"]

logger = logging.getLogger(__name__)
_ENGINE_PHASES = ("forward", "forward_backward", "backward", "optimizer")
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Grid:
    """The phases and sizes to measure.

    Attributes:
        phases: phases, some of :data:`~rollcast_automap.profiling.costs.PHASES`.
        batch_sizes: rows of a data-parallel part.
        lengths: tokens of a row.
        repeats: repetitions of each measurement.
        new_tokens: number of tokens over which ``decode`` is averaged.
        response_share: fraction of response tokens in a row; None for that of the recipe's longest row.
    """

    phases: Sequence[Phase]
    batch_sizes: Sequence[int]
    lengths: Sequence[int]
    repeats: int
    new_tokens: int
    response_share: float | None = None


@dataclass(frozen=True)
class _Engine:
    """A role with an engine: its name, the workers and attribute that hold the engine, and its model."""

    name: str
    role: str
    attribute: str
    trains: bool
    model_path: str


class CostJob:
    """A job that measures the roles of a recipe.

    Args:
        settings: settings of the recipe.
        grid: phases and sizes to measure.
    """

    def __init__(self, settings: RunSettings, grid: Grid) -> None:
        self._run = Run(settings)
        self._grid = grid
        self._found: list[Measurement] = []
        self._counters: dict[tuple[str, bool], ModelFlops | None] = {}
        self._parameters: dict[str, int | None] = {}
        self._say: Progress = logger.debug

    def run(self, progress: Progress | None = None) -> CostTable:
        """Start the workers, measure, and stop them.

        Args:
            progress: callback that gets a description of the next measurement.

        Raises:
            ConfigError: the sizes do not fit the model.
            RollcastError: the workers cannot be started, or a measurement failed.
        """
        self._say = progress or self._say
        with self._run as run:
            self._check_model(Path(run.settings.model.path))
            run.total_steps = 1
            self._say("starting workers")
            run.start_runtime()
            run.start_workers()
            self._measure_sync()
            self._measure_rollout()
            for engine in self._engines():
                self._measure_engine(engine)
            return self._table()

    def _check_model(self, folder: Path) -> None:
        config = folder / "config.json"
        if not config.is_file():
            raise ConfigError(f"model.path: {folder} has no config.json; give a Hugging Face model folder")
        content = json.loads(config.read_text(encoding="utf-8"))
        most = (content.get("text_config") or content).get("max_position_embeddings")
        longest = max(self._grid.lengths) + self._grid.new_tokens
        if most is not None and longest > int(most):
            raise ConfigError(
                f"--lengths {max(self._grid.lengths)} and --new-tokens {self._grid.new_tokens} make {longest} tokens, "
                f"but the model in {folder} has {most} positions (max_position_embeddings)"
            )
        files = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
        settings = self._run.settings
        if not files and not settings.model.random_init:
            logger.info("%s holds no weights: random weights are used", folder)
            self._run.settings = replace(settings, model=replace(settings.model, random_init=True))

    # -- the rollout --------------------------------------------------------------------------

    def _measure_sync(self) -> None:
        # Generation needs a first sync, so one runs even if sync is not measured.
        seconds, sent = [], 0
        wanted = "sync" in self._grid.phases
        self._say("sync")
        for version in range(self._grid.repeats + 1 if wanted else 1):
            start = time.perf_counter()
            metrics = self._run.sync_weights()
            whole = time.perf_counter() - start
            # A rollout in the actor's process shares the weights and reports no sync time: take the call's duration.
            seconds.append(metrics.get("sync/seconds", whole))
            sent = round(metrics.get("sync/GB_per_s", 0.0) * 1e9 * metrics.get("sync/seconds", 0.0))
            self._run.completed = version + 1
        if wanted:
            self._add("rollout", "sync", (0, 0, 0, 0), seconds[1:], sent=sent or None)

    def _measure_rollout(self) -> None:
        if not {"prefill", "decode"} & set(self._grid.phases):
            return
        layout = self._rollout_layout()
        counter = self._counter(self._run.settings.model.path, False)
        for length in self._grid.lengths:
            for batch in self._grid.batch_sizes:
                self._say(f"rollout: {batch} x {length} tokens")
                rows = batch * layout.data_parallel
                first = self._generate(rows, length, 1)
                devices = layout.world_size / layout.data_parallel
                if "prefill" in self._grid.phases:
                    flops = None if counter is None else counter.count([length] * batch, batch) / devices
                    self._add("rollout", "prefill", (batch, length, 1, batch * length), first, flops=flops)
                if "decode" in self._grid.phases:
                    more = self._generate(rows, length, 1 + self._grid.new_tokens)
                    least = min(first)
                    steps = [a_step(seconds, least, self._grid.new_tokens) for seconds in more]
                    flops = None if counter is None else counter.count_decode(batch, length) / devices
                    self._add("rollout", "decode", (batch, length, 1, batch), steps, flops=flops)

    def _generate(self, rows: int, length: int, tokens: int) -> list[float]:
        """Generate ``tokens`` tokens for each row and return the seconds of each repetition.

        Each repetition draws new prompts, so that prefix caches do not help. Rows share prompts as in training.
        """
        samples = self._run.settings.rollout.n
        temperature = self._run.settings.rollout.temperature or 1.0
        sampling = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
        seconds = []
        for repeat in range(self._grid.repeats + 1):
            generator = torch.Generator().manual_seed(1_000_003 * length + 1009 * tokens + repeat)
            vocabulary = len(self._run.settings.tokenizer)
            ids = torch.randint(0, vocabulary, (-(-rows // samples), length), generator=generator, dtype=torch.int32)
            ids = ids.repeat_interleave(samples, 0)[:rows].flatten()
            column = Jagged.from_lengths(ids, torch.full((rows,), length)).column()
            seeds = torch.randint(0, 2**31, (rows,), generator=generator)
            prompts = DataProto.from_dict({"prompts": column, "seed": seeds})
            start = time.perf_counter()
            # A rollout in the actor's processes returns a handle at once, so wait for a column of the result.
            self._run.sampler.generate(prompts, sampling).local("response_mask")
            seconds.append(time.perf_counter() - start)
        return seconds[1:]

    def _rollout_layout(self) -> RoleLayout:
        settings = self._run.settings
        ranks = settings.pools.get_resource_pool(
            Role.ROLLOUT if settings.uses_replicas else Role.ACTOR_ROLLOUT
        ).world_size
        sizes = ParallelSizes.read(settings.rollout)
        parts = sizes.data(ranks) if settings.uses_replicas else self._run.ranks_of(Role.ACTOR_ROLLOUT)
        return self._layout(settings.rollout.name, settings.model.path, ranks, parts, sizes, settings.rollout)

    # -- the engines --------------------------------------------------------------------------

    def _engines(self) -> list[_Engine]:
        if not set(_ENGINE_PHASES) & set(self._grid.phases):
            return []
        paths: dict[str, str] = self._run.model_paths
        engines: list[_Engine] = []
        actor = paths[Role.ACTOR_ROLLOUT]
        for role in self._run.groups:
            path = paths.get(role, actor)
            if role in (Role.ACTOR_ROLLOUT, Role.ACTOR_ROLLOUT_REF):
                engines.append(_Engine("actor", role, "actor", True, path))
            if role in (Role.REF, Role.ACTOR_ROLLOUT_REF):
                engines.append(_Engine("ref", role, "ref", False, actor))
            if role == Role.CRITIC:
                engines.append(_Engine("critic", role, "critic", True, path))
            if role == Role.REWARD_MODEL:
                engines.append(_Engine("reward_model", role, "model", False, path))
        return engines

    def _measure_engine(self, engine: _Engine) -> None:
        self._run.sampler.rest()
        settings, layout = self._run.settings, self._engine_layout(engine)
        share = self._grid.response_share
        if share is None:
            share = settings.data.max_response_length / (
                settings.data.max_prompt_length + settings.data.max_response_length
            )
        value_model = engine.role in (Role.CRITIC, Role.REWARD_MODEL)
        counter = self._counter(engine.model_path, value_model)
        for length in self._grid.lengths:
            response = min(max(round(length * share), 1), length - 1)
            for batch in self._grid.batch_sizes:
                self._say(f"{engine.name}: {batch} x {length} tokens")
                vocabulary, samples = len(settings.tokenizer), settings.rollout.n
                rows = settings.data.train_batch_size * samples
                shape = PassShape(batch, length - response, response, vocabulary, samples, rows)
                flops = None
                if counter is not None:
                    devices = layout.world_size / layout.data_parallel
                    flops = counter.count([length] * batch, batch * response) / devices
                if not self._measure_passes(engine, shape, (batch, length, response, batch * length), flops):
                    break  # larger batches of this length need even more memory

    def _measure_passes(
        self, engine: _Engine, shape: PassShape, sizes: tuple[int, int, int, int], flops: float | None
    ) -> bool:
        """Measure the passes of an engine at one size; return False if it ran out of memory."""
        phases = self._grid.phases
        trains = engine.trains and bool({"forward_backward", "backward", "optimizer"} & set(phases))
        group = self._run.groups[engine.role]
        by_rank = group.execute_func(measure_passes, engine.attribute, shape, self._grid.repeats, trains)
        failed = {name for cost in by_rank for name in cost.out_of_memory}
        peaks = {name: max(cost.peaks.get(name, 0) for cost in by_rank) for name in ("forward", "forward_backward")}
        times = {
            name: [max(values) for values in zip(*(getattr(cost, name) for cost in by_rank), strict=True)]
            for name in ("forward", "forward_backward", "optimizer")
            if name not in failed and (trains or name == "forward")
        }
        if "forward" in phases:
            self._add(engine.name, "forward", sizes, times.get("forward"), peak=peaks["forward"], flops=flops)
        if not trains:
            return not failed
        both = times.get("forward_backward")
        if "forward_backward" in phases:
            whole = None if flops is None else 3 * flops
            self._add(engine.name, "forward_backward", sizes, both, peak=peaks["forward_backward"], flops=whole)
        if "backward" in phases and both and times.get("forward"):
            least = min(times["forward"])
            rest = [seconds - least for seconds in both if seconds > least]
            if rest:  # else the difference is smaller than the noise
                self._add(engine.name, "backward", sizes, rest, flops=None if flops is None else 2 * flops)
        if (
            "optimizer" in phases
            and both
            and not any(measurement.phase == "optimizer" for measurement in self._of(engine.name))
        ):
            self._add(engine.name, "optimizer", (0, 0, 0, 0), times["optimizer"])
        return not failed

    def _of(self, role: str) -> list[Measurement]:
        return [measurement for measurement in self._found if measurement.role == role]

    # -- the table ----------------------------------------------------------------------------

    def _add(
        self,
        role: str,
        phase: Phase,
        sizes: tuple[int, int, int, int],
        seconds: Sequence[float] | None,
        *,
        peak: int = 0,
        flops: float | None = None,
        sent: int | None = None,
    ) -> None:
        batch, length, response, tokens = sizes
        fits = bool(seconds)
        self._found.append(
            Measurement(
                role=role,
                phase=phase,
                batch_size=batch,
                length=length,
                response_tokens=response,
                tokens=tokens,
                seconds=statistics.median(seconds) if seconds else None,
                seconds_min=min(seconds) if seconds else None,
                seconds_max=max(seconds) if seconds else None,
                repeats=len(seconds) if seconds else self._grid.repeats,
                out_of_memory=not fits,
                peak_bytes=peak or None,
                flops=flops,
                bytes=sent,
            )
        )

    def _counter(self, path: str, value_model: bool) -> ModelFlops | None:
        key = path, value_model
        if key not in self._counters:
            try:
                trusts = self._run.settings.model.trust_remote_code
                self._counters[key] = read_model_flops(Path(path), value_model, trusts)
            except ConfigError as error:
                logger.warning("operations are not counted: %s", error)
                self._counters[key] = None
        return self._counters[key]

    def _engine_layout(self, engine: _Engine) -> RoleLayout:
        config, group = self._run.settings.role_engine(engine.name), self._run.groups[engine.role]
        parts = self._run.ranks_of(engine.role)
        sizes = ParallelSizes.read(config)
        return self._layout(config.name, engine.model_path, group.world_size, parts, sizes, config)

    def _layout(
        self, engine: str, path: str, ranks: int, parts: int, sizes: ParallelSizes, settings: Any
    ) -> RoleLayout:
        if path not in self._parameters:
            try:
                self._parameters[path] = measure_model(replace(self._run.settings.model, path=path)).parameters
            except ConfigError:  # a reward model's folder, say, holds no language model
                self._parameters[path] = None
        values = asdict(settings) if is_dataclass(settings) and not isinstance(settings, type) else {}
        return RoleLayout(
            engine, path, self._parameters[path], ranks, parts, sizes.tensor, sizes.pipeline, sizes.context, values
        )

    def _table(self) -> CostTable:
        if not self._found:
            raise CapabilityError(f"nothing of {', '.join(self._grid.phases)} can be measured of this recipe")
        roles = {engine.name: self._engine_layout(engine) for engine in self._engines()}
        if any(measurement.role == "rollout" for measurement in self._found):
            roles["rollout"] = self._rollout_layout()
        names = ("rollcast", "torch", "transformers")
        return CostTable(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            versions={name: importlib.metadata.version(name) for name in names},
            device=self._run.actor.group.execute_func_rank_zero(describe_device),
            nodes=list(self._run.settings.pools.get_resource_pool(Role.ACTOR_ROLLOUT).process_on_nodes),
            roles=roles,
            measurements=self._found,
        )


def a_step(seconds: float, first: float, tokens: int) -> float:
    """Return the mean seconds of each of ``tokens`` decoded tokens after the first token.

    If the difference is smaller than the noise, return the mean over all tokens, which is larger.

    Args:
        seconds: duration of all tokens together, the first included.
        first: duration of a generation of one token.
        tokens: tokens after the first.
    """
    return (seconds - first) / tokens if seconds > first else seconds / (tokens + 1)
