"""Simulation of a mapping: replicas decode randomly drawn lengths, and stages wait for each other."""

from __future__ import annotations

import heapq
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollcast.errors import ConfigError
from rollcast_automap.composition import ahead, find_generator, find_trained
from rollcast_automap.contract import (
    BaseCostModel,
    GenerationSpeed,
    Placement,
    Pool,
    Problem,
    RoleSpec,
    StageSpec,
)
from rollcast_automap.contract import Mapping as RoleMapping
from rollcast_automap.costs.decoding import read_decoding
from rollcast_automap.costs.length_curve import LengthCurve
from rollcast_serving.admissions import WindowedFifo
from rollcast_serving.contracts.admission import AdmissionSettings
from rollcast_serving.simulation import TrainingSimulation

__all__ = ["Interval", "Replica", "ReplicaUse", "SimulatedMapping", "simulate_mapping"]

#: Name of the interval in which a pool receives or sends new weights.
SYNC = "weight_sync"


@dataclass(frozen=True)
class Interval:
    """A piece of work of a pool; times are in seconds since the start of the run.

    Attributes:
        name: stage, ``weight_sync``, ``controller``, or ``switch ROLE``.
        pool: name of the pool; empty for the controller.
        step: number of the step, from 1; None for generation that runs ahead, which belongs to several steps.
        start, end: start and end of the work.
    """

    name: str
    pool: str
    step: int | None
    start: float
    end: float


@dataclass(frozen=True)
class ReplicaUse:
    """The number of active sequences of a replica over time.

    Attributes:
        slots: sequences that the replica decodes at once.
        changes: (time in seconds, active sequences from then on), by rising time, up to the end of the run.
    """

    slots: int
    changes: tuple[tuple[float, int], ...]

    @property
    def seconds(self) -> float:
        """Duration of the run in seconds."""
        return self.changes[-1][0]

    def busy(self, start: float = 0.0) -> float:
        """Return the share of the time from ``start`` in which the replica had a sequence."""
        return sum(end - max(begin, start) for begin, end, active in self._spans(start) if active) / self._rest(start)

    def occupancy(self, start: float = 0.0) -> float:
        """Return the mean share of busy slots from ``start`` on."""
        work = sum((end - max(begin, start)) * active for begin, end, active in self._spans(start))
        return work / self.slots / self._rest(start)

    def busy_spans(self) -> list[tuple[float, float]]:
        """Return (begin, end) of the times in which the replica had a sequence."""
        spans: list[tuple[float, float]] = []
        for begin, end, active in self._spans(0.0):
            if active and spans and spans[-1][1] == begin:
                spans[-1] = (spans[-1][0], end)
            elif active:
                spans.append((begin, end))
        return spans

    def _rest(self, start: float) -> float:
        return max(self.seconds - start, 1e-12)

    def _spans(self, start: float) -> list[tuple[float, float, int]]:
        pairs = zip(self.changes, self.changes[1:], strict=False)
        return [(begin, end, active) for (begin, active), (end, _) in pairs if end > max(begin, start)]


@dataclass(frozen=True)
class SimulatedMapping:
    """A simulated run of a mapping.

    Attributes:
        mapping: the mapping.
        intervals: work of the pools, by rising start.
        replicas: use of each replica of the rollout.
        ends: end of each step in seconds since the start of the run.
        ages: for each step, the age of each trained group in versions of the weights.
        trained: for each step, the numbers of the prompts that it trained.
        warm_up: first steps, which fill the pipeline of a run that generates ahead; no figure counts them.
    """

    mapping: RoleMapping
    intervals: tuple[Interval, ...]
    replicas: tuple[ReplicaUse, ...]
    ends: tuple[float, ...]
    ages: tuple[tuple[int, ...], ...]
    trained: tuple[tuple[int, ...], ...]
    warm_up: int = 0

    @property
    def step_times(self) -> tuple[float, ...]:
        """Duration of each step after the warm-up, in seconds."""
        starts = (0.0, *self.ends)
        return tuple(end - start for start, end in zip(starts, self.ends, strict=False))[self.warm_up :]

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a step."""
        return statistics.fmean(self.step_times)

    @property
    def begins(self) -> float:
        """End of the warm-up in seconds."""
        return self.ends[self.warm_up - 1] if self.warm_up else 0.0

    def busy(self) -> dict[str, float]:
        """Return pool → share of the time in which one of its stages ran; syncs and switches do not count."""
        whole = self.ends[-1] - self.begins
        seconds = dict.fromkeys((pool.name for pool in self.mapping.pools), 0.0)
        for pool in seconds:
            spans = [interval for interval in self.intervals if interval.pool == pool and _is_stage(interval.name)]
            seconds[pool] = sum(max(span.end - max(span.start, self.begins), 0.0) for span in spans) / whole
        return seconds

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON; busy shares and occupancies exclude the warm-up."""
        return {
            "step_seconds": self.step_seconds,
            "step_times": list(self.step_times),
            "warm_up_steps": self.warm_up,
            "pools": {
                pool: {
                    "busy": share,
                    "idle": 1.0 - share,
                    "intervals": [
                        {"name": interval.name, "step": interval.step, "start": interval.start, "end": interval.end}
                        for interval in self.intervals
                        if interval.pool == pool
                    ],
                }
                for pool, share in self.busy().items()
            },
            "replicas": [
                {"slots": replica.slots, "busy": replica.busy(self.begins), "occupancy": replica.occupancy(self.begins)}
                for replica in self.replicas
            ],
            "ages": [{str(age): ages.count(age) for age in sorted(set(ages))} for ages in self.ages],
        }


def _is_stage(name: str) -> bool:
    return name not in (SYNC, "controller") and not name.startswith("switch ")


@dataclass
class Replica:
    """A replica that decodes all its sequences in lockstep, at a rate that depends on their number and lengths.

    Events happen only when a sequence ends, not at every decoding step, which keeps the simulation fast.
    """

    limit: int
    speed: GenerationSpeed
    #: Number of a sequence → tokens of its prompt, and their ratio to the mean prompt length.
    prompt_of: Callable[[int], tuple[float, float]]
    changes: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])
    _now: float = 0.0
    #: Time at which decoding resumes; prefills and weight syncs delay it.
    _free: float = 0.0
    _paused: float = 0.0
    _steps: float = 0.0
    #: Sum over the active sequences of prompt tokens minus the decoding step at which the sequence started.
    _base: float = 0.0
    _ends: list[tuple[float, int, float]] = field(default_factory=list)
    _queue: deque[tuple[int, float]] = field(default_factory=deque)

    @property
    def next_end(self) -> float | None:
        """Time at which the next sequence ends; None if no sequence is in flight."""
        if not self._ends:
            return None
        first, slope = self._rate()
        steps = max(self._ends[0][0] - self._steps, 0.0)
        return max(self._now, self._free) + first * steps + slope * steps * steps / 2

    def take(self, number: int, length: float, now: float) -> None:
        """Start a sequence if a slot is free, else add it to the queue."""
        self._advance(now)
        if len(self._ends) < self.limit:
            self._admit(number, length)
        else:
            self._queue.append((number, length))

    def finish(self, now: float) -> list[int]:
        """End the sequences that are due, start queued ones, and return the numbers of the ended sequences."""
        ended: list[int] = []
        while (due := self.next_end) is not None and due <= now:
            self._now, self._steps = due, self._ends[0][0]
            before = len(ended)
            while self._ends and self._ends[0][0] <= self._steps:
                _, number, base = heapq.heappop(self._ends)
                self._base -= base
                ended.append(number)
            for _ in range(min(len(ended) - before, len(self._queue))):
                self._admit(*self._queue.popleft())
            self._note()
        return ended

    def pause(self, now: float, until: float) -> None:
        """Stop decoding from ``now`` to ``until``."""
        self._advance(now)
        if until > now:
            # An interrupted prefill continues after the pause.
            self._free = until + max(self._free - now, 0.0)
            self._paused = until
            self.changes.append((now, 0))
            self._note()

    def close(self, now: float) -> ReplicaUse:
        """Return the use of the replica up to the end of the run at ``now``."""
        changes = [change for change in self.changes if change[0] < now]
        return ReplicaUse(self.limit, (*changes, (now, 0)))

    def _admit(self, number: int, length: float) -> None:
        tokens, prefills = self.prompt_of(number)
        self._free = max(self._free, self._now) + prefills * self.speed.prefill
        base = tokens - self._steps
        self._base += base
        heapq.heappush(self._ends, (self._steps + length, number, base))
        self._note()

    def _rate(self) -> tuple[float, float]:
        """Return the seconds of the next decoding step, and their growth per step up to the next end of a sequence.

        Between two ends, the seconds of a step are assumed to be linear in the context length.
        """
        active = len(self._ends)
        steps = self._ends[0][0] - self._steps
        context = self._base / active + self._steps
        first = self.speed.decode(active, context)
        return first, (self.speed.decode(active, context + steps) - first) / steps if steps > 0 else 0.0

    def _advance(self, now: float) -> None:
        """Count the decoding steps up to ``now``, which is before the next end of a sequence."""
        begin = max(self._now, self._free)
        if self._ends and now > begin:
            first, slope = self._rate()
            seconds = now - begin
            # first * steps + slope * steps**2 / 2 = seconds
            root = math.sqrt(max(first * first + 2 * slope * seconds, 0.0))
            self._steps = min(self._steps + 2 * seconds / (first + root), self._ends[0][0])
        self._now = max(self._now, now)

    def _note(self) -> None:
        moment = max(self._now, self._paused)
        if self.changes[-1][0] == moment:
            self.changes.pop()
        self.changes.append((moment, len(self._ends)))


@dataclass
class _Player:
    """The trainer of a simulated mapping: stages of a step, weight syncs and switches."""

    problem: Problem
    mapping: RoleMapping
    costs: BaseCostModel
    draws: _Draws
    replicas: list[Replica] = field(default_factory=list)
    intervals: list[Interval] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    trained: list[tuple[int, ...]] = field(default_factory=list)
    _step: int = 0
    _began: float = 0.0

    def __post_init__(self) -> None:
        pools = {pool.name: pool for pool in self.mapping.pools}
        self.placed = {placement.role: (placement, pools[placement.pool]) for placement in self.mapping.placements}
        self.generation = _find_generation(self.problem)
        self.overlaps = ahead(self.mapping) > 0

    def start(self) -> None:
        """Load the role that generates; no replica decodes before."""
        self._began = self._switch(self.problem.role(self.generation.role), 0.0, 1)
        for replica in self.replicas:
            replica.pause(0.0, self._began)

    def train(self, now: float, tasks: Sequence[int]) -> float:
        """Simulate the stages of a step after its generation, with the drawn lengths; return the end of the last."""
        self._step += 1
        self.trained.append(tuple(tasks))
        problem = self.draws.problem_of(tasks)
        home = self.placed[self.generation.role][1].name
        if not self.overlaps:
            self.intervals.append(Interval(self.generation.name, home, self._step, self._began, now))
        begin = self._spend("controller", "", now, self.costs.controller_cost(problem, self.mapping.mode).seconds)
        ends: dict[str, float] = {self.generation.name: begin}
        # A pool that generates is free when generation ends; the other pools are free since the last step.
        free: dict[str, float] = {} if self.overlaps else {home: begin}
        loaded = {self.generation.role}
        for stage in problem.stages:
            if stage.name == self.generation.name:
                continue
            placement, pool = self.placed[stage.role]
            start = max(free.get(pool.name, self._began), *(ends[name] for name in stage.waits_for), 0.0)
            if stage.role not in loaded:
                loaded.add(stage.role)
                start = self._switch(self.problem.role(stage.role), start, self._step)
            seconds = self.costs.stage_cost(problem, stage, placement, pool, self.mapping.mode).seconds
            free[pool.name] = ends[stage.name] = self._spend(stage.name, pool.name, start, seconds)
        return max(ends.values())

    def sync(self, now: float) -> float:
        """Simulate a weight sync, during which no replica decodes; return the end of the step."""
        trained, generator = find_trained(self.problem), find_generator(self.problem)
        end = now
        if trained is not None and generator is not None:
            sides = self.placed[trained.name], self.placed[generator.name]
            seconds = self.costs.sync_cost(self.problem, *sides, self.mapping.mode).seconds
            for home in dict.fromkeys(pool.name for _, pool in sides):
                end = self._spend(SYNC, home, now, seconds)
        self.ends.append(end)
        self._began = self._switch(self.problem.role(self.generation.role), end, self._step + 1)
        for replica in self.replicas:
            replica.pause(now, self._began)
        return end

    def _switch(self, role: RoleSpec, start: float, step: int) -> float:
        placement, pool = self.placed[role.name]
        seconds = self.costs.switch_cost(self.problem, role, placement, pool, self.mapping.mode).seconds
        return self._spend(f"switch {role.name}", pool.name, start, seconds, step)

    def _spend(self, name: str, pool: str, start: float, seconds: float, step: int | None = None) -> float:
        if seconds:
            self.intervals.append(Interval(name, pool, step or self._step, start, start + seconds))
        return start + seconds


class _Draws:
    """The drawn prompt and response lengths of each prompt number, reproducible by the seed."""

    def __init__(self, problem: Problem, seed: int) -> None:
        self._problem, self._seed = problem, seed
        self._prompts = LengthCurve.read(problem.prompt_lengths)
        self._responses = LengthCurve.read(problem.response_lengths)
        self._drawn: dict[int, tuple[float, list[float]]] = {}

    def prompt(self, task: int) -> tuple[float, float]:
        """Return the tokens of a prompt, and their ratio to the mean prompt length."""
        tokens = self._of(task)[0]
        return tokens, tokens / self._prompts.mean if self._prompts.mean else 0.0

    def responses(self, task: int) -> list[float]:
        """Return the tokens of each response of a prompt."""
        return self._of(task)[1]

    def problem_of(self, tasks: Sequence[int]) -> Problem:
        """Return the problem with the drawn lengths of these prompts and their responses."""
        problem = self._problem
        prompts = LengthCurve.of_batch([self.prompt(task)[0] for task in tasks])
        responses = LengthCurve.of_batch([length for task in tasks for length in self.responses(task)])
        return replace(
            problem,
            prompt_lengths=prompts.statistics(problem.prompt_lengths.maximum),
            response_lengths=responses.statistics(problem.response_lengths.maximum),
        )

    def _of(self, task: int) -> tuple[float, list[float]]:
        if task not in self._drawn:
            seed = (self._seed * 1_000_003 + task) * 2
            prompt = self._prompts.draw(1, seed)[0] if self._prompts.longest else 0.0
            self._drawn[task] = prompt, self._responses.draw(self._problem.samples, seed + 1)
        return self._drawn[task]


def _find_generation(problem: Problem) -> StageSpec:
    """Return the stage that generates.

    Raises:
        ConfigError: the number of generating stages is not 1, or another stage comes first.
    """
    kinds = [stage.kind for stage in problem.stages]
    if kinds.count("generate") != 1 or kinds[0] != "generate":
        listed = ", ".join(f"{stage.name} ({stage.kind})" for stage in problem.stages)
        raise ConfigError(
            f"a mapping can be simulated if one stage generates and is the first; the stages are {listed}"
        )
    return problem.stages[0]


def _uniform_speed(
    problem: Problem, stage: StageSpec, costs: BaseCostModel, at: tuple[Placement, Pool], mapping: RoleMapping
) -> GenerationSpeed:
    """Return a constant speed for every decoding step: the stage's price divided by its expected steps."""
    placement = at[0]
    response = LengthCurve.read(problem.response_lengths)
    rows = math.ceil(problem.rows / placement.mesh.data)
    decoding = read_decoding(response, rows, placement.micro_batch_rows, problem.rows)
    steps = sum(steps for steps, _, _ in decoding.phases)
    seconds = costs.stage_cost(problem, stage, *at, mapping.mode).seconds / steps
    return GenerationSpeed(0.0, lambda _active, _context: seconds)


def simulate_mapping(
    problem: Problem, mapping: RoleMapping, cost_model: BaseCostModel, steps: int, seed: int = 0
) -> SimulatedMapping:
    """Simulate steps of a mapping event by event, with lengths drawn from the distributions of the problem.

    Replicas take groups from one queue and decode at the cost model's speed for the sequences that they currently
    hold. The duration of any other stage is the cost model's price for the drawn lengths; a stage starts after the
    stages that it waits for and after the earlier stages of its pool. A role is switched before its first stage of a
    step. No replica decodes during a weight sync. With ``max_staleness`` above 0 and a rollout on devices of its own,
    groups start ahead, paced by the admission ``windowed_fifo``.

    Args:
        problem: problem whose first stage, and no other, generates.
        mapping: mapping to simulate.
        cost_model: model that prices stages; without ``generation_speed``, every decoding step takes the same time.
        steps: steps to count, 1 or more; a run that generates ahead simulates ``max_staleness + 1`` more before them.
        seed: seed of the drawn lengths.

    Raises:
        ConfigError: the problem does not start with its only generating stage, or ``steps`` is below 1.
    """
    if steps < 1:
        raise ConfigError(f"steps is {steps}; simulate 1 step or more")
    draws = _Draws(problem, seed)
    player = _Player(problem, mapping, cost_model, draws)
    at = player.placed[player.generation.role]
    speed = cost_model.generation_speed(problem, player.generation, *at, mapping.mode)
    speed = speed or _uniform_speed(problem, player.generation, cost_model, at, mapping)

    def prompt_of(sequence: int) -> tuple[float, float]:
        return draws.prompt(run.task_of(sequence))

    placement = at[0]
    player.replicas += [Replica(placement.micro_batch_rows, speed, prompt_of) for _ in range(placement.mesh.data)]
    admission = WindowedFifo(AdmissionSettings(ahead(mapping), problem.prompts))
    run = TrainingSimulation(admission, draws.responses, player.replicas, player)
    player.start()
    warm_up = ahead(mapping) + 1 if player.overlaps else 0
    run.run(warm_up + steps)
    return _collect(player, run, warm_up)


def _collect(player: _Player, run: TrainingSimulation, warm_up: int) -> SimulatedMapping:
    end = player.ends[-1]
    replicas = tuple(replica.close(end) for replica in player.replicas)
    intervals = [interval for interval in player.intervals if interval.start < end]
    if player.overlaps:
        home = player.placed[player.generation.role][1].name
        spans = _union([span for replica in replicas for span in replica.busy_spans()])
        intervals += [Interval(player.generation.name, home, None, *span) for span in spans]
    return SimulatedMapping(
        mapping=player.mapping,
        intervals=tuple(sorted(intervals, key=lambda interval: (interval.start, interval.end))),
        replicas=replicas,
        ends=tuple(player.ends),
        ages=tuple(step.ages for step in run.steps),
        trained=tuple(player.trained),
        warm_up=warm_up,
    )


def _union(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of time spans as disjoint spans in rising order."""
    active_spans: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if active_spans and start <= active_spans[-1][1]:
            active_spans[-1] = (active_spans[-1][0], max(active_spans[-1][1], end))
        else:
            active_spans.append((start, end))
    return active_spans
