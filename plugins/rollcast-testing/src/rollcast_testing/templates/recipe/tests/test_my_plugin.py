import json
import subprocess
import sys

from rollcast_data.testing import PreprocessorSuite
from rollcast_my_plugin import MyPlugin
from rollcast_testing import RecipeSuite
from rollcast_testing.tiny import tiny_model_folder

SMALL = (
    *("runtime=local", "model.path=model", "data.train_batch_size=2", "rollout.n=2", "actor.ppo_mini_batch_size=2"),
    *("data.val_max_samples=2", "trainer.total_steps=1", "trainer.save_freq=-1", "trainer.export=false"),
)


class TestMyPlugin(RecipeSuite):
    name = "my_plugin"
    overrides = ("model.path=model",)


class TestMyPluginData(PreprocessorSuite):
    name = "my_plugin"
    columns = {"*": ("prompt", "ground_truth")}
    uses_seed = True


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_answers_are_the_sums(tmp_path):
    report = MyPlugin().run(None, tmp_path)
    assert report.rows == {"train.jsonl": 2000, "test.jsonl": 200}
    rows = [*read(tmp_path / "train.jsonl"), *read(tmp_path / "test.jsonl")]
    assert len({row["prompt"] for row in rows}) == 2200
    for row in rows:
        left, right = row["prompt"].removesuffix("=").split("+")
        assert int(left) + int(right) == int(row["ground_truth"])


def test_a_tiny_model_trains_a_step(tmp_path):
    tiny_model_folder(tmp_path / "model", hidden=32)
    command = [sys.executable, "-m", "rollcast", "train", "recipe=my_plugin", "run_dir=run", *SMALL]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert read(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 1
