"""The run directory: whole checkpoints or none, and who may go on in it."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from trainer_tools import files_of

from rollcast.errors import CheckpointError, ConfigError, ResourceError, WorkerError
from rollcast_trainer.run import run_dir as run_dir_module
from rollcast_trainer.run.run_dir import Checkpoints, lock_run_dir, prepare_run_dir, replacing_folder, write_config

CONFIG: dict[str, Any] = {
    "run_dir": "x",
    "model": {"path": "x/task/model"},
    "trainer": {"seed": 0, "total_steps": 4},
    "trackers": ["jsonl"],
    "data": {"train_files": ["x/train.jsonl", "elsewhere/more.jsonl"]},
}


def save(checkpoints: Checkpoints, step: int, text: str = "weights") -> None:
    with checkpoints.writing(step, {"step": step, "data": {}, "best_accuracy": None}) as folder:
        (folder / "part").write_text(text)


def start(run_dir: Path, config: dict[str, Any], mode: str = "auto") -> int:
    from omegaconf import OmegaConf

    with running(run_dir, mode):
        step = prepare_run_dir(run_dir, config)
        write_config(run_dir, OmegaConf.to_yaml(OmegaConf.create(config)))
    return step


@contextmanager
def running(run_dir: Path, mode: str = "auto") -> Iterator[None]:
    """A run is on in the directory."""
    lock = lock_run_dir(run_dir, mode)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file of this process grows beyond ``size`` bytes: what a full disk looks like to a writer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_checkpoint_appears_with_its_state(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.steps() == []
    with checkpoints.writing(12, {"step": 12, "data": {"epoch": 1}}) as folder:
        (folder / "part").write_text("weights")
        assert checkpoints.steps() == []
    save(checkpoints, 9)
    assert checkpoints.steps() == [9, 12]
    assert checkpoints.load_state(12) == {"step": 12, "data": {"epoch": 1}}
    assert (checkpoints.path(12) / "part").read_text() == "weights"


@pytest.mark.parametrize("error", [KeyError("no"), KeyboardInterrupt(), RuntimeError("no")])
def test_an_exception_while_writing_leaves_the_earlier_ones_whole(tmp_path: Path, error: BaseException) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    save(checkpoints, 1)
    before = files_of(tmp_path)
    with pytest.raises(type(error)), checkpoints.writing(2, {"step": 2}) as folder:
        (folder / "part").write_text("half of the")
        raise error
    assert files_of(tmp_path) == before
    assert checkpoints.steps() == [1]


def test_a_full_disk_names_the_checkpoints_that_are_left(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    save(checkpoints, 1)
    save(checkpoints, 2)
    before = files_of(tmp_path)
    with (
        file_size_limit(4096),
        pytest.raises(CheckpointError, match=r"step_3 could not be written: .*complete ones: step_2"),
        checkpoints.writing(3, {"step": 3}) as folder,
    ):
        (folder / "part").write_bytes(b"x" * 5000)
    assert files_of(tmp_path) == before


def test_a_full_disk_at_the_last_file_counts_too(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    save(checkpoints, 1)
    with (
        file_size_limit(4096),
        pytest.raises(CheckpointError, match="step_2"),
        checkpoints.writing(2, {"step": 2, "long": "x" * 5000}),
    ):
        pass
    assert checkpoints.steps() == [1]


def test_a_worker_that_cannot_write_is_a_checkpoint_error(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")

    def fail(cause: Exception) -> None:
        with checkpoints.writing(1, {}):
            raise WorkerError("policy.actor.save_checkpoint failed on rank 1") from cause

    with pytest.raises(CheckpointError, match="No space left"):
        fail(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(WorkerError, match="rank 1"):
        fail(ValueError("something else"))
    assert checkpoints.steps() == []


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    for step in (1, 2, 10, 11):
        save(checkpoints, step)
    assert checkpoints.steps() == [10, 11]
    assert sorted(path.name for path in checkpoints.folder.iterdir() if path.name != "latest") == ["step_10", "step_11"]


def test_the_best_is_kept_beside_the_newest_and_the_newest_is_named(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    for step, accuracy in ((1, 0.2), (2, 0.9), (3, None), (4, 0.9), (5, 0.5), (6, None)):
        with checkpoints.writing(step, {"step": step, "accuracy": accuracy}):
            pass
        assert (checkpoints.folder / "latest").read_text() == f"step_{step}\n"
    assert checkpoints.steps() == [4, 6]
    assert checkpoints.best_step() == 4
    plain = Checkpoints(tmp_path / "checkpoints", keep=1, keep_best=False)
    save(plain, 7)
    assert plain.steps() == [7]


def test_a_step_written_twice_holds_the_second(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    save(checkpoints, 1, "old")
    save(checkpoints, 1, "new")
    assert (checkpoints.path(1) / "part").read_text() == "new"
    assert [path.name for path in checkpoints.folder.iterdir() if path.name != "latest"] == ["step_1"]


def test_what_a_kill_leaves_is_no_checkpoint_and_is_cleaned_up(tmp_path: Path) -> None:
    start(tmp_path, CONFIG)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    save(checkpoints, 1)
    for left in (".unfinished-step_2", ".unfinished-removed-step_0"):
        (checkpoints.folder / left).mkdir()
        (checkpoints.folder / left / "part").write_text("half")
    (checkpoints.folder / ".latest.tmp").write_text("ste")
    assert checkpoints.steps() == [1]
    assert start(tmp_path, CONFIG) == 1
    assert [path.name for path in checkpoints.folder.iterdir() if path.name != "latest"] == ["step_1"]


def test_a_kill_while_pruning_leaves_no_half_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    save(checkpoints, 1)
    real = run_dir_module.shutil.rmtree

    def die_halfway(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            next(Path(path).iterdir()).unlink()
            raise SystemExit
        real(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(run_dir_module.shutil, "rmtree", die_halfway)
    with pytest.raises(SystemExit):
        save(checkpoints, 2)
    assert checkpoints.steps() == [2]


def test_a_checkpoint_without_its_state_is_named(tmp_path: Path) -> None:
    (tmp_path / "step_3").mkdir()
    with pytest.raises(CheckpointError, match=r"step_3 .*trainer.json"):
        Checkpoints(tmp_path).load_state(3)


def test_a_folder_is_replaced_whole_or_stays(tmp_path: Path) -> None:
    final = tmp_path / "export"
    with replacing_folder(final) as folder:
        (folder / "model").write_text("1")
    with pytest.raises(ZeroDivisionError), replacing_folder(final) as folder:
        (folder / "model").write_text("2")
        raise ZeroDivisionError
    assert files_of(tmp_path) == {"export/model": b"1"}
    with replacing_folder(final) as folder:
        (folder / "other").write_text("3")
    assert files_of(tmp_path) == {"export/other": b"3"}


def test_a_fresh_directory_starts_at_zero(tmp_path: Path) -> None:
    assert start(tmp_path / "a" / "run", CONFIG) == 0
    assert (tmp_path / "a" / "run" / "config.yaml").stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_the_newest_checkpoint_is_where_it_goes_on(tmp_path: Path) -> None:
    start(tmp_path, CONFIG)
    for step in (2, 10, 9):
        save(Checkpoints(tmp_path / "checkpoints"), step)
    longer = {**CONFIG, "trainer": {"seed": 0, "total_steps": 8}, "trackers": []}
    assert start(tmp_path, longer) == 10


@pytest.mark.parametrize("trace", ["metrics.jsonl", "checkpoints"])
def test_other_settings_are_refused_and_named(tmp_path: Path, trace: str) -> None:
    start(tmp_path, CONFIG)
    (tmp_path / trace).mkdir()
    other = {**CONFIG, "trainer": {"seed": 1, "total_steps": 4}, "new": 3}
    with pytest.raises(ConfigError, match=r"new: None then, 3 now; trainer.seed: 0 then, 1 now.*resume_mode=disable"):
        prepare_run_dir(tmp_path, other)


def test_a_run_that_was_refused_at_its_start_does_not_stand_in_the_way(tmp_path: Path) -> None:
    start(tmp_path, CONFIG)
    assert start(tmp_path, {**CONFIG, "new": 3}) == 0


def test_a_directory_that_was_moved_is_the_same_run(tmp_path: Path) -> None:
    start(tmp_path, CONFIG)
    save(Checkpoints(tmp_path / "checkpoints"), 2)
    moved = {
        **CONFIG,
        "run_dir": "y",
        "model": {"path": "y/task/model"},
        "data": {"train_files": ["y/train.jsonl", "elsewhere/more.jsonl"]},
    }
    assert start(tmp_path, moved) == 2
    with pytest.raises(ConfigError, match=r"model\.path"):
        prepare_run_dir(tmp_path, {**moved, "model": {"path": "x/task/model"}})


def test_disable_sets_the_earlier_run_aside(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for number in (1, 2):
        start(run, CONFIG)
        save(Checkpoints(run / "checkpoints"), 2, f"run {number}")
        assert start(run, {**CONFIG, "new": number}, "disable") == 0
        assert not (run / "checkpoints").exists()
        aside = tmp_path / f"run.old-{number}"
        assert (aside / "checkpoints" / "step_2" / "part").read_text() == f"run {number}"


def test_disable_sets_checkpoints_without_a_config_aside_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(Checkpoints(run / "checkpoints"), 2)
    assert start(run, CONFIG, "disable") == 0
    assert not (run / "checkpoints").exists()
    assert Checkpoints(tmp_path / "run.old-1" / "checkpoints").steps() == [2]


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        lock_run_dir(tmp_path / "run", "auto")
    with pytest.raises(CheckpointError, match="cannot be made"):
        lock_run_dir(tmp_path / "run" / "below", "auto")


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with running(tmp_path):
        for mode in ("auto", "disable"):
            with pytest.raises(ResourceError, match=rf"in use by another run \(host .*, process {os.getpid()}\)"):
                lock_run_dir(tmp_path, mode)
    start(tmp_path, CONFIG)


def test_the_lock_of_a_killed_run_is_free_although_its_child_lives(tmp_path: Path) -> None:
    """As with the workers of a data loader: a forked child outlives the run."""
    read, write = os.pipe()
    owner = os.fork()
    if owner == 0:
        lock_run_dir(tmp_path, "auto")
        if os.fork() == 0:
            os.write(write, f"{os.getpid()}\n".encode())
            signal.pause()
        os.write(write, b"")
        signal.pause()
    child = int(os.read(read, 64))
    try:
        with pytest.raises(ResourceError, match=f"process {owner}"):
            lock_run_dir(tmp_path, "auto")
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
        os.kill(child, 0)
        start(tmp_path, CONFIG)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[]", "has to be an object, this is a list"),
        ("{}", r"step is None, but the folder belongs to step 2"),
        ('{"step": "2"}', "step has to be int, this is '2'"),
        ('{"step": true}', "step has to be int, this is True"),
        ('{"step": 3}', "step is 3, but the folder belongs to step 2"),
        ('{"step": 2, "data": []}', r"data has to be dict, this is \[\]"),
        ('{"step": 2, "data": {}, "best_accuracy": "high"}', "best_accuracy has to be float or int or null"),
        ('{"step": 2, "data": {}, "best_accuracy": null, "stages": 3}', "stages has to be dict, this is 3"),
        ('{"step": 2, "data": {}}', "lacks best_accuracy"),
        ('{"step": 2, ', "no readable trainer.json"),
        ("[" * 100_000, "no readable trainer.json"),
    ],
)
def test_damaged_state(tmp_path: Path, content: str, says: str) -> None:
    start(tmp_path, CONFIG)
    for step in (1, 2):
        save(Checkpoints(tmp_path / "checkpoints"), step)
    (tmp_path / "checkpoints" / "step_2" / "trainer.json").write_text(content)
    before = files_of(tmp_path)
    with pytest.raises(CheckpointError, match=f"step_2.*{says}.*other ones: step_1"):
        prepare_run_dir(tmp_path, CONFIG)
    assert files_of(tmp_path) == before


@pytest.mark.parametrize(
    "content",
    [b"\x00\xff\xfe", b"a: [1", b"a: !!python/object/apply:os.getcwd []", b"- 1\n", b"\t- x: y", b"a: 1\na: 2"],
)
def test_damaged_config(tmp_path: Path, content: bytes) -> None:
    start(tmp_path, CONFIG)
    save(Checkpoints(tmp_path / "checkpoints"), 2)
    (tmp_path / "config.yaml").write_bytes(content)
    before = files_of(tmp_path)
    with pytest.raises(ConfigError, match=r"config\.yaml of the run.*resume_mode=disable"):
        prepare_run_dir(tmp_path, CONFIG)
    assert files_of(tmp_path) == before


def test_an_older_damaged_checkpoint_ends_no_run(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    save(checkpoints, 1)
    (checkpoints.path(1) / "trainer.json").write_text("[]")
    save(checkpoints, 2)
    assert checkpoints.steps() == [2]
