"""The suites for datasets, preprocessors, trackers, weight syncs and trainers catch planted faults."""

from __future__ import annotations

import csv
import json
import random
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from broken_laws import broken_laws
from broken_syncs import Forgiving, Lazy, Placeless, Rounding, Trusting, Unbounded
from transformers import AutoTokenizer

from rollcast.contracts.hooks import hookimpl
from rollcast.contracts.tracker import BaseTracker
from rollcast.contracts.trainer import BaseTrainer, RunResult, trainers
from rollcast.errors import ConfigError, DataError
from rollcast.protocol import DataProto, Jagged
from rollcast_data.contract import BaseDataset, BasePreprocessor, PreprocessReport
from rollcast_data.files import write_jsonl
from rollcast_data.testing import DatasetSuite, PreprocessorSuite
from rollcast_serving.contracts.weight_sync import BaseWeightSync
from rollcast_serving.syncs.disk import DiskSync
from rollcast_serving.testing import WeightSyncSuite
from rollcast_testing import TrackerSuite, TrainerSuite
from rollcast_testing.tiny import tiny_model_folder
from rollcast_testing.trainer import TrainerTask

# -- datasets --------------------------------------------------------------------------------------------------------


class Lines(BaseDataset):
    """Lines of text as prompts."""

    def __init__(self, files: Sequence[Path], tokenizer: Any, config: Any) -> None:
        self.lines = [line for file in files for line in Path(file).read_text().splitlines()]
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> Any:
        return {"index": index % len(self.lines), "ids": self.tokenizer.encode(self.lines[index])}

    def collate(self, rows: list[Any]) -> DataProto:
        ids = torch.tensor([each for row in rows for each in row["ids"]], dtype=torch.int32)
        prompts = Jagged.from_lengths(ids, torch.tensor([len(row["ids"]) for row in rows]))
        return DataProto.from_dict({"prompts": prompts.column(), "index": torch.tensor([row["index"] for row in rows])})


class Twice(Lines):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lines[3] = self.lines[2]


class Shuffled(Lines):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        random.shuffle(self.lines)


class Drawing(Lines):
    def __getitem__(self, index: int) -> Any:
        row = super().__getitem__(index)
        return {**row, "ids": [*row["ids"], random.randrange(4, 80)]}


class Wide(Lines):
    def collate(self, rows: list[Any]) -> DataProto:
        return DataProto.from_dict({"prompts": torch.zeros(len(rows), 4, dtype=torch.int64)})


class Mutating(Lines):
    def collate(self, rows: list[Any]) -> DataProto:
        for row in rows:
            row["ids"].append(5)
        return super().collate(rows)


class FirstFile(Lines):
    def __init__(self, files: Sequence[Path], tokenizer: Any, config: Any) -> None:
        super().__init__(files[:1], tokenizer, config)


class Open(Lines):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.stream = Path(__file__).open()  # noqa: SIM115


class OfLines(DatasetSuite):
    rows = 9
    columns = ("index",)

    def write(self, folder: Path) -> list[Path]:
        (folder / "lines.txt").write_text("".join(f"{n}+{n}=\n" for n in range(9)))
        return [folder / "lines.txt"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model_folder(tmp_path_factory.mktemp("model"), weights=False))


@pytest.mark.parametrize(
    ("dataset", "law"),
    [
        (Lines, ""),
        (Twice, "rows_differ"),
        (Shuffled, "building_it_again"),
        (Drawing, "reading_a_row_changes_nothing"),
        (Wide, "batches_have_the_columns"),
        (Mutating, "reading_a_row_changes_nothing"),
        (FirstFile, "files_follow_one_another"),
        (Open, "workers_can_hold_it"),
    ],
)
def test_faults_of_a_dataset_are_caught(dataset: type[Lines], law: str, tokenizer: Any) -> None:
    suite = OfLines()

    def fixtures(folder: Path) -> dict[str, Any]:
        files = suite.write(folder)
        return {"build": lambda paths=files: dataset(paths, tokenizer, {})}

    found = broken_laws(suite, fixtures)
    assert any(name.startswith(law) for name in found) if law else not found, found


# -- preprocessors ---------------------------------------------------------------------------------------------------


class Sums(BasePreprocessor):
    """Sums of small numbers."""

    def run(self, source: Path | None, output: Path, seed: int = 0) -> PreprocessReport:
        return PreprocessReport({"train.jsonl": write_jsonl(output / "train.jsonl", self.rows(seed))})

    def rows(self, seed: int) -> list[dict[str, Any]]:
        numbers = random.Random(seed).sample(range(90), 20)
        return [{"prompt": f"{n}+{n}=", "ground_truth": str(2 * n)} for n in numbers]


class Unseeded(Sums):
    """Sums of other numbers each time."""

    def rows(self, seed: int) -> list[dict[str, Any]]:
        return super().rows(random.randrange(10**6))


class Deaf(Sums):
    """Sums without regard to the seed."""

    def rows(self, seed: int) -> list[dict[str, Any]]:
        return super().rows(0)


class Appending(Sums):
    """Sums that are added to the file."""

    def run(self, source: Path | None, output: Path, seed: int = 0) -> PreprocessReport:
        rows = self.rows(seed)
        with (output / "train.jsonl").open("a") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in rows)
        return PreprocessReport({"train.jsonl": len(rows)})


class Overcounting(Sums):
    """Sums, and one row too many in the report."""

    def run(self, source: Path | None, output: Path, seed: int = 0) -> PreprocessReport:
        return PreprocessReport({"train.jsonl": super().run(source, output, seed).rows["train.jsonl"] + 1})


class Littering(Sums):
    """Sums, and a file in the working directory."""

    def run(self, source: Path | None, output: Path, seed: int = 0) -> PreprocessReport:
        Path("cache.json").write_text("{}")
        return super().run(source, output, seed)


class Nameless(Sums):
    """Sums in another column."""

    def rows(self, seed: int) -> list[dict[str, Any]]:
        return [{"question": row["prompt"]} for row in super().rows(seed)]


class Silent(Sums):
    pass


class Vague(Sums):
    """A source that is not there makes no error."""

    def run(self, source: Path | None, output: Path, seed: int = 0) -> PreprocessReport:
        if source is not None and not source.exists():
            raise ValueError("no")
        return super().run(source, output, seed)


class OfSums(PreprocessorSuite):
    uses_seed = True
    columns: ClassVar[Mapping[str, Sequence[str]]] = {"*": ("prompt", "ground_truth")}


class FromSource(OfSums):
    def write_source(self, folder: Path) -> Path:
        (folder / "raw.txt").write_text("raw")
        return folder


@pytest.mark.parametrize(
    ("preprocessor", "suite", "law"),
    [
        (Sums, OfSums(), ""),
        (Unseeded, OfSums(), "the_same_seed_gives_the_same_bytes"),
        (Deaf, OfSums(), "the_same_seed_gives_the_same_bytes"),
        (Appending, OfSums(), "running_again_replaces_the_files"),
        (Overcounting, OfSums(), "the_report_has_every_file"),
        (Littering, OfSums(), "it_writes_only_its_output"),
        (Nameless, OfSums(), "rows_have_the_columns"),
        (Silent, OfSums(), "it_has_a_help_text"),
        (Vague, FromSource(), "a_missing_source_is_named"),
    ],
)
def test_faults_of_a_preprocessor_are_caught(preprocessor: type[Sums], suite: OfSums, law: str) -> None:
    def fixtures(folder: Path) -> dict[str, Any]:
        (folder / "source").mkdir()
        return {"preprocessor_class": preprocessor, "source": suite.write_source(folder / "source")}

    found = broken_laws(suite, fixtures)
    assert any(name.startswith(law) for name in found) if law else not found, found


def test_a_source_that_is_named_passes() -> None:
    class Right(Sums):
        """Sums."""

        def run(self, source: Path | None, output: Path, seed: int = 0) -> PreprocessReport:
            if source is None or not source.exists():
                raise DataError(f"there is no source {source}")
            return super().run(source, output, seed)

    source = Path(__file__).parent
    assert not broken_laws(FromSource(), {"preprocessor_class": Right, "source": source})


# -- trackers --------------------------------------------------------------------------------------------------------


class Csv(BaseTracker):
    """Metrics as lines of step and reward; drops what an interrupted run wrote after its checkpoint."""

    def __init__(self, run_dir: Path, config: dict[str, Any], start_step: int = 0) -> None:
        super().__init__(run_dir, config, start_step)
        self.file = run_dir / "rewards.csv"
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.lines = [line for line in lines if int(line.split(",")[0]) <= start_step]

    @hookimpl
    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self.lines.append(f"{step},{metrics['reward/mean']}")

    def close(self) -> None:
        self.file.write_text("\n".join(self.lines))


class Misspelt(BaseTracker):
    @hookimpl
    def on_metric(self, step: int) -> None: ...


class WrongArgument(Csv):
    @hookimpl
    def on_step_end(self, stepp: int) -> None: ...


class Doubling(Csv):
    def __init__(self, run_dir: Path, config: dict[str, Any], start_step: int = 0) -> None:
        super().__init__(run_dir, config, start_step)
        self.lines = self.file.read_text().splitlines() if self.file.exists() else []


class Overwriting(Csv):
    def __init__(self, run_dir: Path, config: dict[str, Any], start_step: int = 0) -> None:
        super().__init__(run_dir, config, start_step)
        self.lines = []


class Backwards(Csv):
    def close(self) -> None:
        self.file.write_text("\n".join(reversed(self.lines)))


class Strict(Csv):
    @hookimpl
    def on_step_end(self, metrics: Mapping[str, float]) -> None:
        json.dumps(dict(metrics), allow_nan=False)


class Changing(Csv):
    @hookimpl
    def on_fit_start(self) -> None:
        self.config.clear()

    @hookimpl
    def on_configure(self, config: dict[str, Any]) -> None:
        Path("log.txt").write_text(str(config))


class Failing(Csv):
    @hookimpl
    def on_exception(self, error: BaseException) -> None:
        _, _ = str(error).split("\n\n")


class Demanding(Csv):
    def __init__(self, run_dir: Path, config: dict[str, Any], start_step: int, url: str) -> None:
        super().__init__(run_dir, config, start_step)


class Shared(Csv):
    seen: ClassVar[list[str]] = []

    @hookimpl
    def on_fit_start(self) -> None:
        self.seen.extend(self.lines)
        self.lines = self.seen


class OfCsv(TrackerSuite):
    def read(self, run_dir: Path) -> Sequence[tuple[int, float]]:
        with (run_dir / "rewards.csv").open() as stream:
            return [(int(step), float(value)) for step, value in csv.reader(stream)]


@pytest.mark.parametrize(
    ("tracker", "law"),
    [
        (Csv, ""),
        (Misspelt, "its_hooks_exist"),
        (WrongArgument, "its_hooks_exist"),
        (BaseTracker, "its_hooks_exist"),
        (Doubling, "an_interrupted_run_is_written_again"),
        (Overwriting, "a_continued_run_appends"),
        (Backwards, "a_run_is_recorded"),
        (Strict, "any_metrics_are_recorded"),
        (Changing, "it_writes_into_the_run_directory"),
        (Failing, "a_failed_run_is_closed"),
        (Demanding, "its_options_have_defaults"),
        (Shared, "two_runs_do_not_mix"),
    ],
)
def test_faults_of_a_tracker_are_caught(tracker: type[BaseTracker], law: str, caplog: pytest.LogCaptureFixture) -> None:
    Shared.seen.clear()

    def fixtures(folder: Path) -> dict[str, Any]:
        (folder / "elsewhere").mkdir()
        return {"tracker_class": tracker, "caplog": caplog}

    class Suite(OfCsv):
        def record(self, *args: Any, **more: Any) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(Path.cwd() / "elsewhere")
                super().record(*args, **more)

    found = broken_laws(Suite(), fixtures)
    assert any(name.startswith(law) for name in found) if law else not found, found


# -- weight syncs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sync", "laws"),
    [
        (DiskSync, set()),
        (Forgiving, {"a_damaged_tensor_is_named", "a_wrong_report_is_refused"}),
        (Rounding, {"what_is_sent_arrives", "a_small_change_arrives"}),
        (Unbounded, {"what_is_sent_arrives"}),
        (Lazy, {"a_rank_without_targets_takes_part"}),
        (Trusting, {"what_is_sent_arrives", "a_wrong_report_is_refused", "a_dead_replica_costs_no_other_its_weights"}),
        (Placeless, {"it_declares_where_it_works"}),
    ],
)
@pytest.mark.cases(4)
def test_faults_of_a_weight_sync_are_caught(sync: type[BaseWeightSync], laws: set[str]) -> None:
    suite = WeightSyncSuite()
    started: list[Any] = []
    replicas = type(suite).replicas.__wrapped__  # type: ignore[attr-defined]  # what the fixture calls
    try:
        found = broken_laws(
            suite,
            lambda _: {"sync_class": sync, "started": started, "replicas": replicas(suite, sync, started)},
        )
    finally:
        for process in started:
            process.close()
    assert laws <= set(found), found
    assert bool(found) == bool(laws), found


# -- trainers --------------------------------------------------------------------------------------------------------


class Counting(BaseTrainer):
    """Trains a number, in a file, and calls the hooks of a run."""

    leak: ClassVar[bool] = False

    @classmethod
    def launch(cls, config: Any) -> RunResult:
        if config.trainer_kwargs:
            raise ConfigError(f"trainer_kwargs.{next(iter(config.trainer_kwargs))} is set, but there are no options")
        run_dir = Path(config.run_dir)
        run_dir.mkdir(exist_ok=True)
        return cls.fit(run_dir, int(config.trainer.total_steps))

    @classmethod
    def fit(cls, run_dir: Path, steps: int) -> RunResult:
        from rollcast.contracts.hooks import build_hook_manager
        from rollcast.contracts.tracker import trackers

        call = build_hook_manager([trackers.get("suite_watch")(run_dir, {})]).hook
        file = run_dir / "weight"
        weight, first = json.loads(file.read_text()) if file.exists() else (1.0, 0)
        call.on_fit_start(trainer=None)
        try:
            for step in range(first + 1, steps + 1):
                call.on_step_start(trainer=None, step=step)
                weight = cls.train(weight)
                call.on_metrics(trainer=None, step=step, metrics={"weight": weight})
                file.write_text(json.dumps([weight, step]))
                call.on_checkpoint_saved(trainer=None, step=step, path=str(file))
                call.on_step_end(trainer=None, step=step, metrics={"weight": weight})
        except Exception as error:
            call.on_exception(trainer=None, error=error)
            call.on_fit_end(trainer=None, error=error)
            raise
        call.on_fit_end(trainer=None, error=None)
        return RunResult(steps, run_dir, {"weight": weight})

    @classmethod
    def train(cls, weight: float) -> float:
        return weight * 0.9


class Random(Counting):
    @classmethod
    def train(cls, weight: float) -> float:
        return weight * random.random()


class Restarting(Counting):
    @classmethod
    def fit(cls, run_dir: Path, steps: int) -> RunResult:
        (run_dir / "weight").unlink(missing_ok=True)
        return super().fit(run_dir, steps)


class Lost(Counting):
    @classmethod
    def train(cls, weight: float) -> float:
        return float("nan")


class Careless(Counting):
    @classmethod
    def launch(cls, config: Any) -> RunResult:
        Path(config.run_dir).mkdir(exist_ok=True)
        return cls.fit(Path(config.run_dir), int(config.trainer.total_steps))


class Leaking(Counting):
    release: ClassVar = threading.Event()

    @classmethod
    def launch(cls, config: Any) -> RunResult:
        threading.Thread(target=cls.release.wait, args=(60,), name="forgotten").start()
        return super().launch(config)


class Short(Counting):
    @classmethod
    def fit(cls, run_dir: Path, steps: int) -> RunResult:
        return super().fit(run_dir, 1)


class OfCounting(TrainerSuite):
    def overrides(self, task: TrainerTask, run_dir: Path) -> list[str]:
        return ["trainer=ppo", f"trainer.name={self.name}", f"run_dir={run_dir}", f"model.path={task.model}"]


@pytest.mark.parametrize(
    ("trainer", "law"),
    [
        (Counting, ""),
        (Random, "a_run_repeats_itself"),
        (Random, "a_resumed_run_is_the_uninterrupted_one"),
        (Restarting, "a_resumed_run_is_the_uninterrupted_one"),
        (Lost, "it_trains"),
        (Careless, "an_option_without_effect_is_refused"),
        (Leaking, "it_trains"),
        (Short, "hooks_are_called_in_order"),
    ],
)
@pytest.mark.cases(4)
def test_faults_of_a_trainer_are_caught(trainer: type[Counting], law: str, tmp_path: Path) -> None:
    task = TrainerTask.write(tmp_path)

    class Suite(OfCounting):
        name = "test_counting"

    Leaking.release.clear()
    try:
        with trainers.temporarily("test_counting", trainer):
            found = broken_laws(Suite(), {"trainer_class": trainer, "task": task})
    finally:
        Leaking.release.set()
    assert any(name.startswith(law) for name in found) if law else not found, found
