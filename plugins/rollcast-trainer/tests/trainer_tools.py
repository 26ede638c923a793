"""What the trainer's tests share: a small task, runs of it, and readers of what they wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from rollcast.config import compose
from rollcast.contracts.trainer import RunResult, trainers
from rollcast.protocol import DataProto
from rollcast_trainer.ppo import PpoTrainer
from rollcast_trainer.run.run import Run
from rollcast_trainer.run.settings import check_run

REWARD = '''
import os
import signal
from pathlib import Path

_calls = 0


def has_digit(sample):
    """1 for a response with a digit in it: a random model gets it right about every second time."""
    global _calls
    _calls += 1
    order = Path(__file__).with_name("die_after")
    if order.exists() and _calls > int(order.read_text()):
        os.kill(os.getpid(), signal.SIGKILL)
    return float(any(letter.isdigit() for letter in sample.response))
'''


@dataclass(frozen=True)
class SmallTask:
    """A model folder, prompts and a reward, and the overrides that train on them in seconds."""

    folder: Path
    model: Path

    @classmethod
    def make(cls, folder: Path, model: Path) -> SmallTask:
        rows = [
            {"prompt": f"{a}+{b}=", "ground_truth": str(a + b), "response": f"{a + b}."}
            for a in range(4, 9)
            for b in range(3)
        ]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:5]))
        (folder / "reward.py").write_text(REWARD)
        return cls(folder, model)

    def data(self) -> list[str]:
        return [
            f"model.path={self.model}",
            f"data.train_files=[{self.folder / 'train.jsonl'}]",
            f"data.val_files=[{self.folder / 'test.jsonl'}]",
            "data.max_prompt_length=16",
            "data.max_response_length=6",
            "runtime=local",
            # The order of sums, and so the last digit, depends on it.
            "runtime.threads_per_worker=1",
            "trackers=[jsonl]",
        ]

    def ppo(self, run_dir: Path, *changes: str) -> list[str]:
        """15 prompts, so the epochs end within the run: 4 prompts x 4 samples a step, two mini-batches."""
        return [
            "trainer=ppo",
            *self.data(),
            f"run_dir={run_dir}",
            "reward=function",
            "reward.reward_manager=naive",
            f"reward.reward_kwargs.path={self.folder / 'reward.py'}:has_digit",
            "data.train_batch_size=4",
            "rollout.n=4",
            "actor.ppo_mini_batch_size=2",
            "actor.optim.lr=1e-2",
            "actor.optim.eps=1e-4",
            "actor.optim.lr_warmup_steps=3",
            "trainer.total_steps=4",
            "trainer.test_freq=2",
            "trainer.save_freq=2",
            *changes,
        ]

    def sft(self, run_dir: Path, *changes: str) -> list[str]:
        return [
            "trainer=sft",
            *self.data(),
            f"run_dir={run_dir}",
            "data.train_batch_size=5",
            "actor.optim.lr=1e-2",
            "trainer.total_steps=4",
            "trainer.test_freq=2",
            *changes,
        ]


def launch(overrides: Sequence[str]) -> RunResult:
    """What ``rollcast train`` does with these overrides."""
    config = compose(list(overrides)).config
    return trainers.get(config.trainer.name).launch(config)


@contextmanager
def set_up(overrides: Sequence[str], trainer_class: type[PpoTrainer] = PpoTrainer) -> Iterator[PpoTrainer]:
    """A trainer with workers, before its first step."""
    run = Run(check_run(compose(list(overrides)).config, trainer_class))
    trainer = trainer_class(run)
    with run:
        trainer.setup()
        trainer.run.sync_weights()
        yield trainer


def run_stages(trainer: PpoTrainer, batch: DataProto | None = None, *, until: str = "", after: str = "") -> DataProto:
    """The batch after the stages of a step; from the one after ``after`` up to and including ``until``."""
    names = [place.name for place in trainer.run.settings.places]
    first = names.index(after) + 1 if after else 0
    last = names.index(until) + 1 if until else len(names)
    current = trainer.run.prompts.draw() if batch is None else batch
    for stage in trainer.run.stages[first:last]:
        current = stage(current)
    return current


def roll_out(trainer: PpoTrainer) -> tuple[DataProto, dict[str, float]]:
    """A step up to and including its advantages, with its metrics."""
    trainer.run.recorder.take()
    batch = run_stages(trainer, until="advantage")
    return batch, trainer.run.recorder.take()


def run_stage(trainer: PpoTrainer, name: str, batch: DataProto) -> dict[str, float]:
    """The metrics of one stage."""
    trainer.run.recorder.take()
    trainer.run.stages[[place.name for place in trainer.run.settings.places].index(name)](batch)
    return trainer.run.recorder.take()


def before_stage(trainer: PpoTrainer, name: str, action: Callable[[DataProto], None]) -> None:
    """Have ``action`` called with the batch before a stage of the trainer runs."""
    stage: Any = trainer.run.stages[[place.name for place in trainer.run.settings.places].index(name)]
    kind = type(stage)

    def call(self: Any, batch: DataProto) -> DataProto:
        action(batch)
        return cast("DataProto", kind.__call__(self, batch))

    stage.__class__ = type(kind.__name__, (kind,), {"__call__": call})


def worker_of(trainer: PpoTrainer) -> Any:
    """The worker itself; it lives in this process under the runtime ``local``."""
    group = trainer.run.actor.group
    return group.workers[0].handle.workers[group.role]


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    return read_jsonl(run_dir / "metrics.jsonl")


def without_times(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What has to repeat exactly."""
    return [
        {
            key: value
            for key, value in row.items()
            if not key.startswith(("time/", "perf/")) and not key.endswith("_per_s")
        }
        for row in rows
    ]


def read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """The weights in an engine's checkpoint, by name."""
    from rollcast_engine.checkpoint_files import read_summary
    from rollcast_fsdp.checkpoint import read_tensors

    return read_tensors(folder, read_summary(folder, "fsdp")["parameters"])


def global_norm(gradients: Sequence[torch.Tensor]) -> float:
    return float(torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt())


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder`` with its content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
