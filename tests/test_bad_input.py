"""Every mistake that a person can make ends in exit code 2 and one message that helps."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from run_commands import SMALL, Commands, Finished

from rollcast import compose
from rollcast.errors import ConfigError

pytestmark = pytest.mark.long

Refused = Callable[..., Finished]
TRAIN = ("train", *SMALL, "runtime=local", "run_dir=run", "trainer.total_steps=2")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    Commands(folder).must_run("preprocess", "sort_digits", "--output", "data", "--seed", "0")
    return folder / "data"


def with_rows(task: Path, tmp_path: Path, text: str) -> list[str]:
    """Overrides that train on a file with this text and the real task's model."""
    (tmp_path / "rows.jsonl").write_text(text)
    return [
        "data.preprocess=null",
        f"model.path={task / 'model'}",
        "data.train_files=[rows.jsonl]",
        f"data.val_files=[{task / 'test.jsonl'}]",
    ]


def with_reward(tmp_path: Path, body: str) -> list[str]:
    (tmp_path / "mine.py").write_text(f"def score(sample):\n    {body}\n")
    return ["reward=function", "reward.reward_kwargs.path=mine.py:score"]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("engine=fsdpp", ["engine=fsdpp", "fsdp"]),
        ("rollout=vlm", ["rollout=vlm", "hf"]),
        ("recipe=quickstartt", ["recipe=quickstartt", "quickstart"]),
        ("algorithm.adv_estimator=grop", ["algorithm.adv_estimator", "grop", "grpo", "gae"]),
        ("reward.name=exact_mach", ["reward.name", "exact_mach", "exact_match"]),
        ("actor.policy_loss=vanila", ["actor.policy_loss", "vanila", "vanilla"]),
        ("trackers=[consol]", ["consol", "console"]),
    ],
)
@pytest.mark.cases(2)
def test_unknown_part(assert_refused: Refused, override: str, says: list[str]) -> None:
    assert_refused(*TRAIN, override, says=says)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.total_step=3", ["trainer.total_step", "trainer.total_steps"]),
        ("actor.optim.learning_rate=1", ["actor.optim.learning_rate", "actor.optim"]),
        ("trainer.total_steps=many", ["trainer.total_steps", "many"]),
        ("data.train_batch_size=[1]", ["data.train_batch_size"]),
        ("rollot.n=3", ["rollot.n"]),
        ("trainer.total_steps", ["trainer.total_steps", "key=value"]),
    ],
)
def test_misspelt_or_ill_typed_key(assert_refused: Refused, override: str, says: list[str]) -> None:
    assert_refused(*TRAIN, override, says=says)


def test_misspelt_key_in_a_file_names_the_file(assert_refused: Refused, rollcast: Commands) -> None:
    recipes = rollcast.folder / "my" / "recipe"
    recipes.mkdir(parents=True)
    (recipes / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - quickstart\n  - _self_\ntrainer:\n  totl_steps: 3\n"
    )
    says = ["recipe/mine.yaml", "trainer.totl_steps", "trainer.total_steps"]
    assert_refused("train", "--config-dir", "my", "recipe=mine", says=says)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["data.train_batch_size=10", "actor.ppo_mini_batch_size=4"], ["10", "4", "actor.ppo_mini_batch_size=2 or 5"]),
        (["rollout.n=1"], ["rollout.n", "2"]),
        (["data.train_batch_size=0"], ["data.train_batch_size", "0"]),
        (["data.train_batch_size=999999", "actor.ppo_mini_batch_size=999999"], ["999999", "6000"]),
    ],
)
@pytest.mark.cases(2)
def test_sizes_that_do_not_fit(assert_refused: Refused, overrides: list[str], says: list[str]) -> None:
    assert_refused(*TRAIN, *overrides, says=says)


GOOD = json.dumps({"prompt": "31=", "ground_truth": "13"}) + "\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GOOD + "this is not JSON\n", ["rows.jsonl:2", "not JSON"]),
        (json.dumps({"prompt": "31="}) + "\n", ["rows.jsonl:1", "ground_truth", "data.ground_truth_key", "prompt"]),
        ("", ["rows.jsonl", "no rows"]),
    ],
)
@pytest.mark.cases(2)
def test_bad_dataset(assert_refused: Refused, rollcast: Commands, task: Path, text: str, says: list[str]) -> None:
    assert_refused(*TRAIN, *with_rows(task, rollcast.folder, text), says=says)


def test_missing_file(assert_refused: Refused, rollcast: Commands, task: Path) -> None:
    overrides = with_rows(task, rollcast.folder, GOOD)
    (rollcast.folder / "rows.jsonl").unlink()
    assert_refused(*TRAIN, *overrides, says=["rows.jsonl", "data.train_files"])


def test_model_folder_without_a_tokenizer(assert_refused: Refused, rollcast: Commands, task: Path) -> None:
    bare = rollcast.folder / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((task / "model" / "config.json").read_text())
    overrides = [*with_rows(task, rollcast.folder, GOOD), "model.path=bare"]
    assert_refused(*TRAIN, *overrides, says=["bare", "tokenizer"])


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise KeyError('no such answer')", ["KeyError", "no such answer"]),
        ("return float('nan')", ["nan", "finite"]),
        ("return 'good'", ["good"]),
    ],
)
@pytest.mark.cases(2)
def test_bad_reward(assert_refused: Refused, rollcast: Commands, body: str, says: list[str]) -> None:
    assert_refused(*TRAIN, *with_reward(rollcast.folder, body), says=["mine.py", *says])


def test_reward_of_the_wrong_length(assert_refused: Refused, rollcast: Commands) -> None:
    rollcast.install(
        "rollcast-short",
        "short_reward",
        "from rollcast.contracts.reward import BaseReward\n"
        "class Short(BaseReward):\n"
        "    def score(self, sample):\n        return 0.0\n"
        "    def score_batch(self, samples):\n        return [0.0]\n",
        "[rollcast.rewards]\nshort = short_reward:Short\n",
    )
    assert_refused(*TRAIN, "reward.name=short", says=["reward short", "16 samples were given", "1 scores"])


BROKEN = (
    "rollcast-broken",
    "broken_reward",
    "import nothing_of_that_name\n",
    "[rollcast.rewards]\nbroken = broken_reward:f\n",
)


def test_broken_plugin_that_is_asked_for(assert_refused: Refused, rollcast: Commands) -> None:
    rollcast.install(*BROKEN)
    says = ["rollcast.rewards", "'broken'", "rollcast-broken", "nothing_of_that_name", "reward.name"]
    assert_refused(*TRAIN, "reward.name=broken", says=says)


def test_broken_plugin_that_nobody_asked_for(rollcast: Commands) -> None:
    rollcast.install(*BROKEN)
    rollcast.must_run(*TRAIN)
    listed = rollcast.run("plugins", "rewards", "--check", "--json").out
    (row,) = [row for row in json.loads(listed) if row["name"] == "broken"]
    assert row["state"] == "broken"
    assert "nothing_of_that_name" in row["cause"]


def test_two_distributions_claim_one_name(assert_refused: Refused, rollcast: Commands) -> None:
    for number in (1, 2):
        entry_points = f"[rollcast.rewards]\ntwice = twice_{number}:f\n"
        rollcast.install(
            f"rollcast-twice-{number}", f"twice_{number}", "def f(sample):\n    return 0.0\n", entry_points
        )
    says = ["'twice'", "rollcast-twice-1", "rollcast-twice-2"]
    assert_refused(*TRAIN, "reward.name=twice", says=says)


def test_nothing_chosen(assert_refused: Refused) -> None:
    assert_refused("train", says=["recipe=", "trainer=", "quickstart"])


def test_open_value(assert_refused: Refused) -> None:
    assert_refused("train", "recipe=gsm8k_grpo", says=["model.path"])


def test_traceback_on_request(rollcast: Commands) -> None:
    finished = rollcast.run(*TRAIN, "--traceback", "rollout.n=1")
    assert finished.code == 2
    assert "Traceback" in finished.out + finished.err


def test_bad_change_loses_nothing_that_was_saved(assert_refused: Refused, rollcast: Commands) -> None:
    rollcast.must_run(*TRAIN)
    saved = sorted(path for path in (rollcast.folder / "run" / "checkpoints").rglob("*") if path.is_file())
    before = {path: path.read_bytes() for path in saved}
    metrics = (rollcast.folder / "run" / "metrics.jsonl").read_bytes()
    assert_refused(*TRAIN, "trainer.total_steps=4", "actor.optim.lr=0.5", says=["actor.optim.lr", "resume_mode"])
    assert {path: path.read_bytes() for path in saved} == before
    assert (rollcast.folder / "run" / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.exhaustive
def test_full_disk_while_saving(rollcast: Commands) -> None:
    """No file may grow beyond 256 KiB from the first checkpoint on: the second one cannot be written."""
    arguments = [*TRAIN, "trainer.total_steps=50", "trainer.test_freq=-1", "trackers=[jsonl]"]
    process = rollcast.start(*arguments)
    first = rollcast.folder / "run" / "checkpoints" / "step_2"
    while not first.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2, out + err
    assert "Traceback" not in out + err
    assert "checkpoint" in err
    left = sorted(path.name for path in first.parent.iterdir() if path.name != "latest")
    assert left[:1] == ["step_2"]
    assert all(name.startswith("step_") for name in left)
    assert not psutil.pid_exists(process.pid)
    # Whole enough to go on from.
    rollcast.must_run(*arguments, "trainer.total_steps=12")


def test_verls_name_of_the_length_of_a_run_leads_to_ours() -> None:
    with pytest.raises(ConfigError, match=r"no key 'trainer.total_training_steps'; did you mean 'trainer.total_steps'"):
        compose(["recipe=quickstart", "trainer.total_training_steps=2"])
