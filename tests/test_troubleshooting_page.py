"""docs/troubleshooting.md: its messages are those of the commands, or at least messages of the code."""

from __future__ import annotations

import ast
import fcntl
import functools
import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from page_packages import DOCS
from prose import sources
from run_commands import SMALL, Commands
from warm_process import ROLLCAST

pytestmark = pytest.mark.long

PAGE = (DOCS / "troubleshooting.md").read_text("utf-8")
MESSAGES = [" ".join(block.split()) for block in re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)]
#: Literal characters that a message of the code must share with a quoted one.
ENOUGH = 24
#: Beginnings of messages that other libraries raise.
FOREIGN = ("torch.OutOfMemoryError",)

TRAIN = ("train", *SMALL, "runtime=local", "trainer.total_steps=2")
#: Commands that end at the configuration, and the beginning of the message that the page quotes.
WRONG_CONFIGS = {
    "error: no trainer is chosen": ("train",),
    "error: model.path must be set": ("train", "recipe=gsm8k_grpo"),
    "error: no plugin 'nccl'": (*TRAIN, "rollout=vllm", "rollout.weight_sync=nccl"),
    "error: override 'trainer.total_step=3'": (*TRAIN, "trainer.total_step=3"),
    "error: override 'trainer.total_steps=many'": (*TRAIN, "trainer.total_steps=many"),
    "error: override 'data.train_files=a,b'": (*TRAIN, "data.train_files=a,b"),
    "error: data.train_batch_size=10": (*TRAIN, "data.train_batch_size=10"),
    "error: algorithm.adv_estimator=grpo compares": (*TRAIN, "rollout.n=1"),
    "error: actor.engine.name=fsdp, rollout.name=vllm": (*TRAIN, "rollout=vllm", "rollout.weight_sync=in_process"),
    "error: rollout sets min_p=0.1": (*TRAIN, "rollout=sglang", "rollout.min_p=0.1"),
    "error: rollout.weight_sync=collective connects": (
        *(*TRAIN, "rollout=vllm", "placement.device=cuda"),
        *("rollout.mode=hybrid", "rollout.weight_sync=collective"),
    ),
    "error: rollout.weight_sync=cuda_ipc": (*TRAIN, "rollout=vllm", "rollout.weight_sync=cuda_ipc"),
}
#: Overrides of a run on the quick start's files in ``data/``, and the beginning of the message.
WRONG_RUNS = {
    "error: pool 'global_pool' asks for": ("placement.device=cuda",),
    "error: model.path: /home/me/nowhere does not exist": ("model.path=nowhere",),
    "error: model.path: /home/me/bare has no tokenizer": ("model.path=bare",),
    "error: model.path data/model contains no weights": ("model.random_init=false",),
    "error: a row may have 100016 tokens": ("data.max_response_length=100000",),
    "error: data.train_files: rows.jsonl does not exist": ("data.train_files=[rows.jsonl]",),
    "error: data.train_files: rows.jsonl:1": ("data.train_files=[bad.jsonl]",),
    "error: data.apply_chat_template is 'always'": ("data.apply_chat_template=always",),
    "error: data.train_files: no row is left": ("data.max_prompt_length=4",),
    "error: reward mine.py:score failed": ("reward=function", "reward.reward_kwargs.path=mine.py:score"),
    "error: actor.ppo_max_token_len_per_gpu is 20": (
        "actor.use_dynamic_bsz=true",
        "actor.ppo_max_token_len_per_gpu=20",
    ),
    "error: replica 0 cannot be started": (
        *("rollout.mode=colocated", "rollout.weight_sync=shared_memory"),
        "rollout.replica.python=/nowhere/python",
    ),
}
PROVOKED = (
    *WRONG_CONFIGS,
    *WRONG_RUNS,
    "error: cannot join Ray",
    "error: rollcast-broken 1.0",
    "error: rollcast-old 1.0",
    "error: 'twice' in rollcast.rewards is claimed",
    "error: Ray cannot keep its files",
    "error: run_dir=good holds a run",
    "error: run_dir=run is in use",
    "error: checkpoint /home/me/broken",
    "error: /home/me/corrupt",
)


def quoted(beginning: str) -> re.Pattern[str]:
    """Return a pattern of the page's message that begins so; ``…`` matches anything."""
    (message,) = [message for message in MESSAGES if message.startswith(beginning)]
    return re.compile(".*".join(re.escape(part) for part in message.removesuffix("…").split("…")))


def error_of(rollcast: Commands, arguments: Sequence[str]) -> str:
    """Return the message of a command that must fail, with the command's folder called /home/me."""
    finished = rollcast.run(*arguments)
    assert finished.code == 2, finished.text
    message = finished.err[finished.err.index("error: ") :]
    return " ".join(message.replace(str(rollcast.folder), "/home/me").split())


@pytest.fixture(scope="module")
def task(rollcast_of_module: Commands) -> Commands:
    """The quick start's files, and some that are wrong."""
    folder = rollcast_of_module.folder
    rollcast_of_module.must_run("preprocess", "sort_digits", "--output", "data", "--seed", "0")
    (folder / "bare").mkdir()
    (folder / "bare" / "config.json").write_text((folder / "data" / "model" / "config.json").read_text())
    (folder / "row.jsonl").write_text(json.dumps({"prompt": "31=", "ground_truth": "13"}) + "\n")
    (folder / "bad.jsonl").write_text(json.dumps({"prompt": "31="}) + "\n")
    (folder / "mine.py").write_text("def score(sample):\n    raise KeyError('no such answer')\n")
    return rollcast_of_module


def on_task(*overrides: str) -> tuple[str, ...]:
    files = ("data.train_files=[data/train.jsonl]", "data.val_files=[data/test.jsonl]")
    return (*TRAIN, "data.preprocess=null", "model.path=data/model", *files, *overrides)


@pytest.mark.parametrize("beginning", WRONG_CONFIGS)
def test_a_wrong_configuration_ends_with_the_pages_message(beginning: str, rollcast: Commands) -> None:
    message = error_of(rollcast, WRONG_CONFIGS[beginning])
    assert quoted(beginning).match(message), message


@pytest.mark.parametrize("beginning", WRONG_RUNS)
@pytest.mark.cases(4)
def test_a_wrong_run_ends_with_the_pages_message(beginning: str, task: Commands, tmp_path: Path) -> None:
    message = error_of(task, on_task(f"run_dir={tmp_path}/run", *WRONG_RUNS[beginning]))
    # The nodes and rows of this machine and run, which the page quotes from another.
    message = re.sub(r"\d+ CPUs, 0 GPUs", "2 CPUs, 0 GPUs", message).replace("bad.jsonl", "rows.jsonl")
    message = re.sub(r"prompt: '\d+='", "prompt: '39184987='", message)
    assert quoted(beginning).match(message), message


@pytest.mark.exhaustive
def test_a_cluster_that_does_not_answer(rollcast: Commands) -> None:
    # Nothing listens on port 1.
    overrides = ("runtime=ray", "runtime.address=127.0.0.1:1")
    message = error_of(rollcast, [each for each in TRAIN if not each.startswith("runtime")] + [*overrides])
    message = message.replace("127.0.0.1:1 ", "127.0.0.1:6379 ")
    assert quoted("error: cannot join Ray").match(message), message


@pytest.mark.parametrize(
    ("name", "requires", "source", "beginning"),
    [
        ("broken", "", "import sympy_extras\n", "error: rollcast-broken 1.0"),
        ("old", "Requires-Dist: rollcast<0.1\n", "def f(sample): return 0.0\n", "error: rollcast-old 1.0"),
    ],
)
@pytest.mark.cases(2)
def test_a_plugin_that_does_not_load(name: str, requires: str, source: str, beginning: str, rollcast: Commands) -> None:
    rollcast.install(f"rollcast-{name}", f"{name}_reward", source, f"[rollcast.rewards]\n{name} = {name}_reward:f\n")
    metadata = rollcast.site / f"rollcast_{name}-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text() + requires)
    message = error_of(rollcast, (*TRAIN, f"reward.name={name}")).replace(f"({name}_reward:f) provides 'old'", "")
    pattern = quoted(beginning).pattern.replace(re.escape("(twice:f) provides 'old'"), "")
    assert re.match(pattern, message), message


def test_a_name_that_two_distributions_claim(rollcast: Commands) -> None:
    for number in (1, 2):
        points = "[rollcast.rewards]\ntwice = twice:f\n"
        rollcast.install(f"rollcast-twice-{number}", "twice", "def f(sample):\n    return 0.0\n", points)
    message = error_of(rollcast, (*TRAIN, "reward.name=twice"))
    assert quoted("error: 'twice' in rollcast.rewards is claimed").match(message), message


@pytest.mark.exhaustive
def test_a_run_directory_that_cannot_be_resumed(rollcast: Commands) -> None:
    """Other settings, a missing file and a changed byte, one after the other in one run directory."""
    rollcast.must_run(*TRAIN, "run_dir=good")
    message = error_of(rollcast, (*TRAIN, "run_dir=good", "actor.optim.lr=1e-5"))
    assert quoted("error: run_dir=good holds a run").match(message), message

    step = rollcast.folder / "good" / "checkpoints" / "step_2" / "actor"
    (shard,) = (step / "shards").glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    resume = (*TRAIN, "run_dir=good", "trainer.total_steps=4")
    message = error_of(rollcast, resume).replace("/home/me/good", "/home/me/corrupt")
    assert quoted("error: /home/me/corrupt").match(message), message

    (step / "engine.json").unlink()
    message = error_of(rollcast, resume).replace("/home/me/good", "/home/me/broken")
    assert quoted("error: checkpoint /home/me/broken").match(message), message


def test_a_run_directory_that_another_run_uses(rollcast: Commands) -> None:
    lock = rollcast.folder / "run" / ".lock"
    lock.parent.mkdir()
    lock.write_text("host node-1, process 4242\n")
    with lock.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        message = error_of(rollcast, (*TRAIN, "run_dir=run"))
    assert quoted("error: run_dir=run is in use").match(message), message


@pytest.mark.exhaustive
def test_a_folder_with_too_long_a_path_for_ray(rollcast: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = rollcast.folder / "scratch" / ("x" * 100)
    folder.mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(folder))
    command = [str(ROLLCAST), *TRAIN, "runtime=ray", "run_dir=run"]
    done = subprocess.run(
        command, cwd=rollcast.folder, env=rollcast.environment(), capture_output=True, text=True, check=False
    )
    message = " ".join(done.stderr[done.stderr.index("error: ") :].replace(str(rollcast.folder), "/home/me").split())
    assert quoted("error: Ray cannot keep its files").match(message), message


@pytest.mark.parametrize("message", [message for message in MESSAGES if not message.startswith(PROVOKED)])
def test_a_quoted_message_is_one_of_the_code(message: str) -> None:
    assert message.startswith(FOREIGN) or any(has(message, text) for text in messages_of_the_code()), message


def test_each_message_begins_once() -> None:
    assert [begin for begin in PROVOKED if sum(message.startswith(begin) for message in MESSAGES) != 1] == []


def has(message: str, fragments: Sequence[str]) -> bool:
    """Check that a message contains the fragments of a string of the code in order, up to a shortened end."""
    place, shared = 0, 0
    for fragment in fragments:
        found = message.find(fragment, place)
        if found < 0:
            cut = next((n for n in range(len(fragment), 0, -1) if message.startswith(fragment[:n], place)), 0)
            return "…" in message and shared + cut >= ENOUGH
        place, shared = found + len(fragment), shared + len(fragment)
    return shared >= ENOUGH


@functools.cache
def messages_of_the_code() -> list[tuple[str, ...]]:
    """Return the strings of the packages' code without the values that are filled in."""
    files = (path for folder in sources().values() for path in folder.rglob("*.py"))
    return sorted({text for path in files for text in strings(path) if sum(map(len, text)) >= ENOUGH})


def strings(path: Path) -> Iterator[tuple[str, ...]]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        literals = (part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str))
        yield tuple(" ".join(text.split()) for text in literals if text.strip())
