"""The tables of keys in the docs are those that the schemas make."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / ".ci" / "config_tables.py"
pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="only in the repository")


def test_tables_are_current() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\nnox -s config_docs writes them"


def test_the_reference_has_every_key_of_a_run() -> None:
    """A key that a composed run knows has a row with its sentence, range and declaring distribution."""
    from rollcast import compose
    from rollcast.config.sections import declarations

    page = (ROOT / "docs" / "configuration-reference.md").read_text(encoding="utf-8")
    for overrides in (["trainer=ppo"], ["trainer=sft"], ["trainer=sample"], ["trainer=ppo", "rollout=vllm"]):
        known = declarations(compose(overrides, allow_missing=True).sections)
        for key, about in known.items():
            if any(other.startswith(f"{key}.") for other in known):
                continue  # a section
            parts = key.split(".")
            shown = key if "engine" not in parts[1:-1] else f"<role>.engine.{parts[-1]}"
            rows = [line for line in page.splitlines() if line.startswith(f"| `{shown}` |")]
            if about["doc"]:
                assert any(about["doc"].replace("|", "\\|") in row for row in rows), key
    rows = [line for line in page.splitlines() if line.startswith("| `runtime.num_cpus` |")]
    for runtime, owner in (("ray", "rollcast-ray"), ("local", "rollcast")):
        (row,) = [line for line in rows if f"| `runtime={runtime}` |" in line]
        assert f"| at least 1 or null | `null` | {owner} |" in row


def test_every_key_of_the_trainers_has_a_sentence() -> None:
    from rollcast import compose

    for overrides in (["trainer=ppo"], ["trainer=sft"], ["trainer=sample"], ["trainer=ppo", "engine=megatron"]):
        composed = compose(overrides, allow_missing=True)
        assert set(composed.sections.known()) - set(composed.sections.docs()) <= {
            "runtime",
            "placement",
            "data",
            "agent",
        } | {
            "rollout",
            "algorithm",
            "reward",
            "profiler",
            "judge",
        }


@pytest.mark.parametrize("option", sorted((ROOT / "plugins").glob("*/src/*/conf/*/*.yaml")), ids=lambda path: path.stem)
def test_files_of_options_hold_only_what_differs(option: Path) -> None:
    """But for the name of the option, no key repeats the default of its schema."""
    from omegaconf import OmegaConf

    from rollcast import compose
    from rollcast.contracts.config import flatten

    group = option.parent.name
    if group in ("recipe", "trainer", "model_size"):
        pytest.skip("recipes say what they decide")
    path = {"engine": "actor.engine"}.get(group, group)
    given = flatten(OmegaConf.to_container(OmegaConf.load(option)), path)
    names = {f"{path}.{leaf}" for leaf in ("name", "tool", "dataset", "adv_estimator")}
    removed = [f"~{key}" for key in given if key not in names and given[key] != "???"]
    plain = compose(["trainer=ppo", f"{group}={option.stem}", *removed], allow_missing=True).config
    assert not [key for key in given if f"~{key}" in removed and OmegaConf.select(plain, key) == given[key]]
