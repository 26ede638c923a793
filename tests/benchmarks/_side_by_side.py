"""A recipe of rollcast and somebody else's loop, step by step in turns on one machine.

Each side has its own process, and one waits while the other works: whatever slows the machine down
for a while slows both. Both start from the same weights and stay there. Those of the quick start are from
after its warm-up and 50 of its steps, when a fifth of the groups have no advantage, which is the mean of the
whole run; another recipe's are those it starts from.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rollcast import compose
from rollcast.contracts.hooks import hookimpl
from rollcast.contracts.trainer import trainers
from rollcast_trainer.ppo import PpoTrainer
from rollcast_trainer.run.run import Run
from rollcast_trainer.run.settings import RunSettings, check_run

__all__ = ["Options", "Pairs", "StepReport", "Work", "parse_options", "run_side_by_side"]

#: The recipes that can be compared: a tiny model, and the small pretrained one.
QUICKSTART, PRETRAINED = "quickstart", "smollm_words"
_START_TIMEOUT_S = 180.0
_STEP_TIMEOUT_S = 120.0
_TOLERANCE = 0.1
_LEARNING_STEPS = 50
#: AdamW does all its work, but no policy moves: otherwise chance would soon make one side learn
#: faster than the other, and have other responses and other rows to train on.
_STANDSTILL_LR = 1e-12


@dataclass(frozen=True)
class Work:
    """What one step has to do, and where it starts from; the same for both sides.

    Attributes:
        model: Hugging Face folder with the weights of the start.
        train_file: JSONL with ``prompt`` and ``ground_truth``.
        threads: of the process that computes.
        prompts, samples: prompts a step, and responses to each.
        max_new_tokens: the longest response.
        mini_batches: optimizer steps a step.
        peer_rows: responses that the other side sends through its model at once.
        lr: constant, and next to nothing.
    """

    model: str
    train_file: str
    seed: int
    threads: int
    prompts: int
    samples: int
    temperature: float
    max_new_tokens: int
    mini_batches: int
    peer_rows: int
    lr: float
    betas: tuple[float, float]
    weight_decay: float
    clip_grad: float
    clip_ratio_low: float
    clip_ratio_high: float
    clip_ratio_c: float

    @classmethod
    def of(cls, settings: RunSettings, threads: int, peer_rows: int | None) -> Work:
        """The work of a run that has been set up."""
        mini_batches = settings.data.train_batch_size // settings.actor.ppo_mini_batch_size
        actor, optim = settings.actor, settings.actor.optim
        return cls(
            model=settings.model.path,
            train_file=settings.data.train_files[0],
            seed=settings.trainer.seed,
            threads=threads,
            prompts=settings.data.train_batch_size,
            samples=settings.rollout.n,
            temperature=settings.rollout.temperature,
            max_new_tokens=settings.data.max_response_length,
            mini_batches=mini_batches,
            peer_rows=peer_rows or settings.data.train_batch_size * settings.rollout.n // mini_batches,
            lr=optim.lr,
            betas=(optim.betas[0], optim.betas[1]),
            weight_decay=optim.weight_decay,
            clip_grad=optim.clip_grad,
            clip_ratio_low=actor.clip_ratio_low,
            clip_ratio_high=actor.clip_ratio_high,
            clip_ratio_c=actor.clip_ratio_c,
        )

    @property
    def rows(self) -> int:
        """Responses a step."""
        return self.prompts * self.samples


@dataclass(frozen=True)
class StepReport:
    """One step of one side.

    Attributes:
        seconds: wall time.
        tokens: sampled, of all responses.
        trained_rows: responses that went through the update.
        reward: mean of the responses.
    """

    seconds: float
    tokens: float
    trained_rows: float
    reward: float


#: Runs in a process of its own: sets up, sends True, then answers each True with a StepReport.
Serve = Callable[[Connection, Work], None]


class Peer:
    """The other side, in a process of its own."""

    def __init__(self, serve: Serve, work: Work) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, work), daemon=True)
        self._process.start()
        theirs.close()
        self._receive(_START_TIMEOUT_S)

    def step(self) -> StepReport:
        """Let it do one step."""
        self._connection.send(True)
        report = self._receive(_STEP_TIMEOUT_S)
        if not isinstance(report, StepReport):
            raise TypeError(f"the other side sent {report!r} in place of a StepReport")
        return report

    def close(self) -> None:
        """Send it home."""
        if self._process.is_alive():
            self._connection.send(False)
            self._process.join(10.0)
        if self._process.is_alive():
            self._process.terminate()
        self._connection.close()

    def _receive(self, timeout: float) -> Any:
        if not self._connection.poll(timeout):
            raise TimeoutError(f"the other side did not answer within {timeout:g} s")
        try:
            return self._connection.recv()
        except EOFError:
            self._process.join(10.0)
            raise RuntimeError(f"the other side ended with exit code {self._process.exitcode}") from None


@dataclass
class Pairs:
    """The steps of both sides, in turns; a hook plugin of the run that it watches.

    rollcast's step is timed from the first hook of the step to the last, so that what trackers
    write is in it.

    Attributes:
        peer: the other side.
        rows: responses a step.
        load: processes that wanted to run in the minute before the benchmark.
        ours, theirs: the steps so far.
        phases: of our steps; name to seconds.
    """

    peer: Peer
    rows: int
    load: float
    ours: list[StepReport] = field(default_factory=list)
    theirs: list[StepReport] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)
    _start: float = 0.0

    @hookimpl(tryfirst=True)
    def on_step_start(self, trainer: object, step: int) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    @hookimpl(trylast=True)
    def on_step_end(self, trainer: object, step: int, metrics: dict[str, float]) -> None:
        """Stop the clock, and give the other side its turn."""
        seconds = time.perf_counter() - self._start
        trained = self.rows * (1.0 - metrics["actor/zero_advantage_rows"])
        self.ours.append(StepReport(seconds, metrics["rollout/tokens"], trained, metrics["reward/mean"]))
        self.phases.append({name: value for name, value in metrics.items() if name.startswith("time/")})
        self.theirs.append(self.peer.step())

    def drop_first(self, count: int) -> None:
        """Forget the first steps, which warm up caches and allocators."""
        del self.ours[:count], self.theirs[:count], self.phases[:count]

    def check_same_work(self, *names: str) -> None:
        """Refuse sides that differ in these fields of a step.

        Raises:
            RuntimeError: says in which, and how much.
        """
        for name in names:
            ours, theirs = (statistics.fmean(getattr(each, name) for each in side) for side in (self.ours, self.theirs))
            if abs(ours - theirs) > _TOLERANCE * theirs:
                raise RuntimeError(f"not the same work: {name} a step is {ours:.0f} here and {theirs:.0f} there")

    def notes(self, other: str) -> list[str]:
        """The step times of both sides with how much work they were, our phases, and how busy the machine was."""
        medians = {name: statistics.median(phase[name] for phase in self.phases) for name in sorted(self.phases[0])}
        phases = ", ".join(f"{name[5:-2]} {seconds:.3f}" for name, seconds in medians.items())
        return [
            _describe("rollcast", self.ours),
            f"its phases (s): {phases}",
            _describe(other, self.theirs),
            f"load of the machine before: {self.load:.1f} on {os.cpu_count()} cores",
        ]


@dataclass(frozen=True)
class Options:
    """The command line of a benchmark."""

    output: Path
    steps: int
    warmup: int
    seed: int
    threads: int
    runtime: str
    strict: bool
    recipe: str
    peer_rows: int | None
    override: list[str]


def parse_options(
    description: str, name: str, arguments: Sequence[str] | None = None, recipes: Sequence[str] = (QUICKSTART,)
) -> Options:
    """Read the command line of benchmark ``name``, whose other side can run these recipes."""
    parser = argparse.ArgumentParser(description=description)
    parser.set_defaults(recipe=QUICKSTART, peer_rows=None)
    parser.add_argument("--output", type=Path, default=Path("runs/bench") / f"{name}.json")
    parser.add_argument("--steps", type=int, default=25, help="measured steps of each side")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them that do not count")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="of each side's computing process")
    parser.add_argument("--runtime", choices=("ray", "local"), default="ray")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a goal is missed")
    if len(recipes) > 1:
        parser.add_argument("--recipe", choices=recipes)
        parser.add_argument(
            "--peer-rows", type=int, help="responses in a pass of the other side, if memory is short; else a mini-batch"
        )
    parser.add_argument("override", nargs="*", help="further config overrides of rollcast's side")
    return Options(**vars(parser.parse_args(arguments)))


def run_side_by_side(serve: Serve, options: Options) -> tuple[Work, Pairs]:
    """Train the recipe with one worker, and give ``serve`` a step after each of ours.

    Returns:
        The work of a step, and the measured steps.

    Raises:
        RuntimeError: the other side ended early.
    """
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="rollcast_bench_") as folder:
        start: list[str] = []
        if options.recipe == QUICKSTART:
            start = [f"model.path={_prepare_model(Path(folder), options.seed)}", "trainer.warm_start=null"]
        config = compose(
            [
                f"recipe={options.recipe}",
                *start,
                f"runtime={options.runtime}",
                f"runtime.threads_per_worker={options.threads}",
                f"run_dir={folder}/run",
                "trackers=[jsonl,report]",
                f"trainer.seed={options.seed}",
                f"trainer.total_steps={options.warmup + options.steps}",
                "trainer.val_before_train=false",
                "trainer.test_freq=-1",
                "trainer.save_freq=-1",
                "trainer.export=false",
                f"actor.optim.lr={_STANDSTILL_LR}",
                *options.override,
            ]
        ).config
        run = Run(check_run(config, PpoTrainer))
        trainer = PpoTrainer(run)
        with run:
            work = Work.of(run.settings, options.threads, options.peer_rows)
            with _started(serve, work) as peer:
                pairs = Pairs(peer, work.rows, load)
                run.settings.hooks.register(pairs)
                trainer.fit()
    pairs.drop_first(options.warmup)
    return work, pairs


def _prepare_model(folder: Path, seed: int) -> Path:
    """Train the warm-up and the first part of the quick start; gives the folder of the exported model."""
    warm = _train("recipe=quickstart_warmup", f"run_dir={folder}/warm_up", f"trainer.seed={seed}")
    return _train(
        "recipe=quickstart",
        f"run_dir={folder}/first",
        f"trainer.seed={seed}",
        f"model.path={warm}",
        "trainer.warm_start=null",
        f"trainer.total_steps={_LEARNING_STEPS}",
        "actor.optim.total_training_steps=90",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
    )


def _train(*overrides: str) -> Path:
    config = compose([*overrides, "runtime=local", "trackers=[jsonl]", "trainer.export=true"]).config
    trainers.get(config.trainer.name).launch(config)
    return Path(config.run_dir) / "export"


@contextmanager
def _started(serve: Serve, work: Work) -> Iterator[Peer]:
    peer = Peer(serve, work)
    try:
        yield peer
    finally:
        peer.close()


def _describe(name: str, side: Sequence[StepReport]) -> str:
    low, middle, high = statistics.quantiles([report.seconds for report in side], n=4)
    tokens, trained = (statistics.fmean(getattr(each, key) for each in side) for key in ("tokens", "trained_rows"))
    return (
        f"{name}: {len(side)} steps, {middle:.3f} s a step (quartiles {low:.3f} to {high:.3f}), "
        f"{tokens:.0f} response tokens and {trained:.0f} trained rows a step"
    )
