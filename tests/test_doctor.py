"""``rollcast doctor`` on a machine with planted faults, all at once; and the code of docs/doctor.md."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

from run_commands import Commands
from warm_process import ROLLCAST

from rollcast.plugins.discovery import describe_groups, find_plugins
from rollcast_testing.tiny import tiny_model_folder

PAGE = (Path(__file__).parents[1] / "docs" / "doctor.md").read_text()
#: Leaves earlier thinking out, as some published templates do.
FORGETFUL = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content and loop.last %}{{ m.reasoning_content }}{% endif %}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))


def test_planted_faults_are_all_named_with_their_mends(rollcast: Commands) -> None:
    rollcast.install("some-plugin", "some_plugin", "import no_such_library\n", "[rollcast.hooks]\nmine = some_plugin\n")
    old = rollcast.site / "rollcast_trtllm-0.0.7.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: rollcast-trtllm\nVersion: 0.0.7\n")
    model = tiny_model_folder(rollcast.folder / "model", weights=False, chat_template=FORGETFUL)
    (rollcast.folder / "full").touch()
    asked = (f"model.path={model}", "model.random_init=true", "run_dir=full/run", "rollout=vllm")
    done = subprocess.run(
        [str(ROLLCAST), "doctor", "--json", *asked, f"rollout.replica.python={sys.executable}"],
        cwd=rollcast.folder,
        env=rollcast.environment(),
        preexec_fn=few_files,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)["findings"]
    faults = {row["name"]: row for row in found if row["state"] != "ok"}
    planted = {
        "hooks/mine": ("some-plugin 1.0", "pip install no_such_library"),
        "rollcast-trtllm": ("version 0.0.7 beside rollcast", "pip install 'rollcast-trtllm=="),
        "open files": ("200 files", "LimitNOFILE"),
        "run directory": ("full is a file", "run_dir=DIR"),
        "rollout: vLLM": (sys.executable, "rollcast-vllm[cuda]"),
        "prefix": ("does not keep earlier turns", "agent.renderer"),
    }
    for name, (text, fix) in planted.items():
        assert text in faults[name]["message"], faults[name]
        assert fix in faults[name]["fix"], faults[name]
    broken = [row for row in found if row["name"] == "health check"]
    assert not broken, "a planted fault broke the check itself"


def test_the_pages_check_is_found(rollcast: Commands) -> None:
    code = re.search(r'^```python title="my_health.py"\n(?P<text>.*?)^```$', PAGE, re.MULTILINE | re.DOTALL)
    points = re.search(r"^```toml\n(?P<text>.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert code is not None
    assert points is not None
    section = points["text"].replace('[project.entry-points."', "[").replace('"]', "]").replace('"', "")
    rollcast.install("my-plugin", "my_health", code["text"], section)
    done = rollcast.run("doctor", "--only", "scratch")
    assert done.code in (0, 1)
    assert done.out.startswith("scratch disk\n")


def test_the_page_names_every_check() -> None:
    assert describe_groups()["rollcast.health_checks"] == "checks of rollcast doctor"
    rows = set(re.findall(r"^\| `(\w+)` \| `(rollcast[\w-]*)` \|", PAGE, re.MULTILINE))
    installed = {(each.name, each.distribution) for each in find_plugins("rollcast.health_checks")}
    assert rows == {each for each in installed if each[1].startswith("rollcast")}
