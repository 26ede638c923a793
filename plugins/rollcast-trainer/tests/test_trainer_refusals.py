"""Damaged run directories, checkpoints, rows, models and settings: one message, exit code 2, and nothing is lost."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_tools import SmallTask, files_of, launch
from typer.testing import CliRunner, Result

from rollcast.cli.app import build_app
from rollcast.config import compose
from rollcast.contracts.algorithm import (
    AdvantageInputs,
    advantages,
    kl_penalties,
    loss_aggregations,
    policy_losses,
)
from rollcast.contracts.hooks import hookimpl
from rollcast.contracts.tracker import BaseTracker, trackers
from rollcast_trainer.ppo import PpoTrainer
from rollcast_trainer.run.settings import check_run

#: Written by every start.
_REWRITTEN = (".lock", "config.yaml", "status.json", "report.html")


@pytest.fixture(scope="module")
def first_run(small_task: SmallTask, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a checkpoint after each; its tests copy it."""
    run = tmp_path_factory.mktemp("first") / "run"
    launch(small_task.ppo(run, "trainer.total_steps=2", "trainer.save_freq=1", "trackers=[jsonl,report]"))
    return run


@pytest.fixture
def run(first_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(first_run, tmp_path / "run"))


@pytest.fixture
def train(small_task: SmallTask) -> Iterator[Callable[..., Result]]:
    """Runs ``rollcast train`` in this process."""
    import logging

    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level

    def invoke(run_dir: Path, *changes: str) -> Result:
        overrides = small_task.ppo(
            run_dir, "trainer.total_steps=3", "trainer.save_freq=1", "trackers=[jsonl,report]", *changes
        )
        return CliRunner(env={"COLUMNS": "1000"}).invoke(build_app(), ["train", *overrides])

    yield invoke
    root.handlers[:] = handlers
    root.setLevel(level)


def assert_refused(result: Result, *says: str) -> None:
    assert result.exit_code == 2, (result.exception, result.output)
    text = " ".join((result.stdout + result.stderr).split())
    assert "Traceback" not in text
    assert result.stderr.count("error: ") == 1, result.stderr
    for words in says:
        assert words in text


def kept(run: Path) -> dict[str, bytes]:
    return {name: content for name, content in files_of(run).items() if name not in _REWRITTEN}


def write(name: str, content: str | bytes) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        (run / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return damage


def cut(name: str, keep: float) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        content = (run / name).read_bytes()
        (run / name).write_bytes(content[: int(len(content) * keep)])

    return damage


def flip(name: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        content = bytearray((run / name).read_bytes())
        content[len(content) // 2] ^= 0xFF
        (run / name).write_bytes(content)

    return damage


def remove(name: str) -> Callable[[Path], None]:
    return lambda run: (run / name).unlink()


def as_folder(name: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).mkdir()

    return damage


def as_link(name: str, exists: bool) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        target = run.parent / "elsewhere"
        if exists:
            target.write_bytes((run / name).read_bytes())
        (run / name).unlink()
        (run / name).symlink_to(target)

    return damage


def change(name: str, **values: Any) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        content = json.loads((run / name).read_text())
        (run / name).write_text(json.dumps({**content, **values}))

    return damage


class Evil:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("evil",)


def torch_file(name: str, value: Any) -> Callable[[Path], None]:
    return lambda run: torch.save(value, run / name)


STATE = "checkpoints/step_2/trainer.json"
ACTOR = "checkpoints/step_2/actor"
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "state_list": (write(STATE, "[1]"), "has to be an object"),
    "state_empty": (write(STATE, "{}"), "trainer.json"),
    "state_types": (change(STATE, best_accuracy="high", data=3), "trainer.json"),
    "state_epoch": (change(STATE, data={"epoch": "1", "batch": 0}), "data loader's state"),
    "state_null": (write(STATE, "null"), "has to be an object"),
    "state_binary": (write(STATE, b"\xff\x00\x80"), "no readable trainer.json"),
    "state_deep": (write(STATE, "[" * 50_000), "no readable trainer.json"),
    "state_gone": (remove(STATE), "no readable trainer.json"),
    "config_garbled": (write("config.yaml", "a: [b"), "config.yaml"),
    "config_binary": (write("config.yaml", b"\x00\xff\xfe\x01"), "config.yaml"),
    "config_tag": (write("config.yaml", "a: !!python/object/apply:os.getcwd []"), "config.yaml"),
    "config_list": (write("config.yaml", "- a\n- b\n"), "config.yaml"),
    "config_folder": (as_folder("config.yaml"), "config.yaml"),
    "metrics_garbled": (write("metrics.jsonl", "not json\n{}\n"), "metrics.jsonl, line 1"),
    "metrics_binary": (write("metrics.jsonl", b"\xff\xfe\n"), "metrics.jsonl, line 1"),
    "metrics_deep": (write("metrics.jsonl", "[" * 50_000 + "\n"), "metrics.jsonl, line 1"),
    "metrics_step": (write("metrics.jsonl", '{"step": "1"}\n'), "metrics.jsonl, line 1"),
    "metrics_folder": (as_folder("metrics.jsonl"), "metrics.jsonl is a folder"),
    "metrics_link": (as_link("metrics.jsonl", exists=True), "metrics.jsonl is a link"),
    "metrics_dangling": (as_link("metrics.jsonl", exists=False), "metrics.jsonl is a link"),
    "samples_folder": (as_folder("samples.jsonl"), "samples.jsonl is a folder"),
    "samples_garbled": (write("samples.jsonl", "{\n"), "samples.jsonl, line 1"),
    "status_folder": (as_folder("status.json"), "status.json is a folder"),
    "report_folder": (as_folder("report.html"), "report.html is a folder"),
    "lock_folder": (as_folder(".lock"), ".lock"),
    "index_cut": (cut(f"{ACTOR}/shards/.metadata", 0.5), ".metadata is not an index"),
    "index_empty": (write(f"{ACTOR}/shards/.metadata", b""), ".metadata is not an index"),
    "index_replaced": (write(f"{ACTOR}/shards/.metadata", pickle.dumps([1, 2])), ".metadata is not an index"),
    "index_evil": (write(f"{ACTOR}/shards/.metadata", pickle.dumps(Evil())), "names posix.mkdir"),
    "index_gone": (remove(f"{ACTOR}/shards/.metadata"), ".metadata"),
    "sums_emptied": (write(f"{ACTOR}/sums/rank_0.json", "{}"), "no checksum of shards/"),
    "sums_blank": (write(f"{ACTOR}/sums/rank_0.json", ""), "sums"),
    "sums_list": (write(f"{ACTOR}/sums/rank_0.json", "[]"), "sums"),
    "sums_types": (write(f"{ACTOR}/sums/rank_0.json", '{"__0_0.distcp": "1"}'), "sums"),
    "sums_gone": (remove(f"{ACTOR}/sums/rank_0.json"), "sums"),
    "shard_cut": (cut(f"{ACTOR}/shards/__0_0.distcp", 0.9), "bytes"),
    "shard_flipped": (flip(f"{ACTOR}/shards/__0_0.distcp"), "is corrupt"),
    "shard_gone": (remove(f"{ACTOR}/shards/__0_0.distcp"), "__0_0.distcp"),
    "shard_added": (write(f"{ACTOR}/shards/__1_0.distcp", b"x"), "no checksum of shards/__1_0.distcp"),
    "summary_list": (write(f"{ACTOR}/engine.json", "[]"), "engine.json"),
    "summary_empty": (write(f"{ACTOR}/engine.json", "{}"), "engine.json"),
    "summary_types": (change(f"{ACTOR}/engine.json", world_size="1"), "world_size has to be a int"),
    "summary_ranks": (change(f"{ACTOR}/engine.json", world_size=-1), "world_size"),
    "summary_null": (change(f"{ACTOR}/engine.json", parameters=None), "parameters has to be a dict"),
    "summary_moments": (change(f"{ACTOR}/engine.json", optimizer_state=3), "optimizer_state has to be a list"),
    "summary_shape": (change(f"{ACTOR}/engine.json", parameters={"a": 3}), "does not fit"),
    "rng_cut": (cut(f"{ACTOR}/rng/rank_0.pt", 0.5), "rank_0.pt"),
    "rng_garbage": (write(f"{ACTOR}/rng/rank_0.pt", b"garbage"), "rank_0.pt"),
    "rng_list": (torch_file(f"{ACTOR}/rng/rank_0.pt", [1]), "rank_0.pt"),
    "rng_empty": (torch_file(f"{ACTOR}/rng/rank_0.pt", {}), "random state"),
    "rng_evil": (write(f"{ACTOR}/rng/rank_0.pt", pickle.dumps(Evil())), "rank_0.pt"),
    "rollout_garbage": (write("checkpoints/step_2/rollout_rank_0.pt", b"garbage"), "rollout_rank_0.pt"),
    "rollout_list": (torch_file("checkpoints/step_2/rollout_rank_0.pt", [1]), "rollout_rank_0.pt"),
}


@pytest.mark.cases(5)
@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_run_directory(
    run: Path,
    train: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
    case: str,
) -> None:
    monkeypatch.chdir(run.parent)
    damage, says = DAMAGE[case]
    damage(run)
    before = kept(run)
    assert_refused(train(run), says)
    assert kept(run) == before
    assert not Path("evil").exists()


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "values",
    [{"elapsed_s": "long"}, {"pid": "1", "host": 3}, {"total_steps": [1]}, {"state": None}, {"elapsed_s": True}],
)
def test_status_of_wrong_types_is_a_warning(run: Path, train: Callable[..., Result], values: dict[str, Any]) -> None:
    change("status.json", **values)(run)
    result = train(run)
    assert result.exit_code == 0, result.output
    assert "Traceback" not in result.output
    assert "status.json" in result.stderr
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2, 3]


GOOD = {"prompt": "1+2=", "ground_truth": "3"}
DEEP = "[" * 200 + "]" * 200
ROWS: dict[str, tuple[str | bytes, str]] = {
    "surrogate": ('{"prompt": "a\\ud800b", "ground_truth": "3"}', "rows.jsonl:2: the row has a lone surrogate"),
    "surrogate_answer": ('{"prompt": "a", "ground_truth": "\\uDFFF"}', "lone surrogate"),
    "surrogate_key": ('{"prompt": "a", "ground_truth": "3", "\\ud800": 1}', "lone surrogate"),
    "surrogate_message": (
        '{"prompt": [{"role": "user", "content": "\\udc00"}], "ground_truth": "3"}',
        "lone surrogate",
    ),
    "deep": ("[" * 100_000, "rows.jsonl:2: the row is nested more than 100"),
    "deep_column": (f'{{"prompt": "a", "ground_truth": "3", "extra": {DEEP}}}', "nested more than 100"),
    "huge": (b'{"prompt": "' + b"a" * (64 << 20) + b'"}', "rows.jsonl:2: the row has more than 64 MiB"),
    "huge_number": ('{"prompt": "a", "ground_truth": 1' + "0" * 5000 + "}", "rows.jsonl:2"),
    "binary": (b"\x00\x01\x02", "rows.jsonl:2"),
    "not_utf8": (b'{"prompt": "\xff"}', "rows.jsonl:2"),
    "utf16": ('{"prompt": "a"}'.encode("utf-16"), "rows.jsonl:2"),
    "list": ("[1]", "rows.jsonl:2: a row has to be a JSON object"),
    "number": ("3", "rows.jsonl:2: a row has to be a JSON object"),
    "cut": ('{"prompt": "a", ', "rows.jsonl:2: not JSON"),
    "prompt_number": ('{"prompt": 3, "ground_truth": "3"}', "rows.jsonl:2"),
    "prompt_null": ('{"prompt": null, "ground_truth": "3"}', "is null"),
    "prompt_empty_list": ('{"prompt": [], "ground_truth": "3"}', "rows.jsonl:2"),
    "prompt_empty": ('{"prompt": "", "ground_truth": "3"}', "no tokens"),
    "message_number": ('{"prompt": [3], "ground_truth": "3"}', "message 0"),
    "message_role": ('{"prompt": [{"content": "a"}], "ground_truth": "3"}', "'role'"),
    "message_content": ('{"prompt": [{"role": "user", "content": 3}], "ground_truth": "3"}', "'content'"),
    "answer_null": ('{"prompt": "a", "ground_truth": null}', "is null"),
    "answer_missing": ('{"prompt": "a"}', "has no column 'ground_truth'"),
}


@pytest.mark.parametrize("case", ROWS)
def test_bad_row(train: Callable[..., Result], tmp_path: Path, case: str) -> None:
    row, says = ROWS[case]
    content = row if isinstance(row, bytes) else row.encode()
    (tmp_path / "rows.jsonl").write_bytes(json.dumps(GOOD).encode() + b"\n" + content + b"\n")
    result = train(tmp_path / "run", f"data.train_files=[{tmp_path / 'rows.jsonl'}]")
    assert_refused(result, says, "data.train_files")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("rollout.temperature=-1", "rollout.temperature"),
        ("rollout.temperature=inf", "rollout.temperature"),
        ("rollout.val_kwargs.temperature=inf", "rollout.val_kwargs.temperature"),
        ("rollout.temperature=nan", "rollout.temperature"),
        ("rollout.val_kwargs.temperature=-0.5", "rollout.val_kwargs.temperature"),
        ("rollout.top_p=2", "rollout.top_p"),
        ("rollout.n=-1", "rollout.n"),
        ("data.max_response_length=100000", "data.max_response_length=100000"),
        ("data.max_prompt_length=0", "data.max_prompt_length"),
        ("data.max_prompt_length=99999999999999999999", "data.max_prompt_length"),
        ("data.train_batch_size=-4", "data.train_batch_size"),
        ("data.num_workers=-1", "data.num_workers"),
        ("actor.optim.lr=-1", "actor.optim.lr"),
        ("actor.optim.lr=nan", "actor.optim.lr"),
        ("trainer.total_steps=-5", "trainer.total_steps"),
        ("trainer.total_steps=1.5", "trainer.total_steps"),
        ("trainer.seed=abc", "trainer.seed"),
        ("trainer.seed=1e400", "trainer.seed"),
        ("run_dir=''", "run_dir"),
    ],
)
def test_bad_setting(
    train: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(train(tmp_path / "run", change), says)


def _returns_scores(inputs: AdvantageInputs) -> Any:
    return inputs.token_level_rewards.sum(-1)


class _Deaf(BaseTracker):
    @hookimpl
    def on_metrics(self, stepp: int) -> None: ...


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["algorithm.adv_kwargs={wrong: 1}"], "algorithm.adv_kwargs.wrong is set, but rollcast_algorithms"),
        (
            ["+actor.policy_loss_kwargs.wrong=1"],
            "actor.policy_loss_kwargs.wrong is set, but rollcast_algorithms.policy_losses.clipped:vanilla has no such "
            "option; its options: none",
        ),
        (["critic.loss_agg_mode=nowhere", "algorithm.adv_estimator=gae"], "asked for by: critic.loss_agg_mode"),
        (["trainer_kwargs.beta=1"], "trainer_kwargs.beta is set, but trainer=ppo takes no free options"),
        (["trackers=[test_deaf]"], "listens to 'on_metrics' with the argument 'stepp'"),
    ],
)
def test_a_plugin_that_cannot_work_is_refused_before_anything_is_written(
    train: Callable[..., Result], tmp_path: Path, changes: list[str], says: str
) -> None:
    with trackers.temporarily("test_deaf", _Deaf):
        assert_refused(train(tmp_path / "run", *changes), says)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["algorithm.adv_estimator=test_scores"], "_returns_scores returned a Tensor, not an instance of"),
        (["actor.policy_loss=test_bare"], "returned a Tensor, not an instance of PolicyLossOutput"),
        (["actor.loss_agg_mode=test_rows"], "it has to be one number, a float tensor []"),
        (
            ["actor.loss_agg_mode=test_detached"],
            "returned a number without a gradient, so that nothing would be trained",
        ),
        (["actor.use_kl_loss=true", "actor.kl_loss_type=test_mean"], "returned estimates that are torch.float32 []"),
    ],
)
@pytest.mark.cases(3)
def test_what_a_plugin_returns_is_checked_in_the_first_step(
    train: Callable[..., Result], tmp_path: Path, changes: list[str], says: str
) -> None:
    with (
        advantages.temporarily("test_scores", _returns_scores),
        policy_losses.temporarily("test_bare", lambda inputs: inputs.log_probs),
        loss_aggregations.temporarily("test_rows", lambda losses, mask, counts: losses.sum(-1)),
        loss_aggregations.temporarily("test_detached", lambda losses, mask, counts: losses.detach().sum()),
        kl_penalties.temporarily("test_mean", lambda log_probs, ref: (log_probs - ref).mean()),
    ):
        assert_refused(train(tmp_path / "run", *changes, "actor.skip_zero_advantage=false"), says)


def test_a_trainer_may_take_free_options(small_task: SmallTask, tmp_path: Path) -> None:
    class Mine(PpoTrainer):
        takes_kwargs = True

    config = compose(small_task.ppo(tmp_path / "run", "trainer_kwargs.beta=1")).config
    assert check_run(config, Mine).config.trainer_kwargs == {"beta": 1}


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", "[1]", "config.json"),
        ("config.json", "{", "config.json"),
        ("config.json", "[" * 50_000, "config.json"),
        ("tokenizer.json", "garbage", "tokenizer"),
        ("tokenizer_config.json", "garbage", "tokenizer"),
        ("tokenizer_config.json", "[]", "tokenizer"),
        ("generation_config.json", '{"eos_token_id": "x"}', "generation_config.json"),
        ("generation_config.json", "[" * 50_000, "generation_config.json"),
        ("model.safetensors", "garbage", "model"),
    ],
)
def test_bad_model_folder(
    small_task: SmallTask, train: Callable[..., Result], tmp_path: Path, name: str, content: str, says: str
) -> None:
    model = Path(shutil.copytree(small_task.model, tmp_path / "model"))
    (model / name).write_text(content)
    assert_refused(train(tmp_path / "run", f"model.path={model}"), says)
