"""The repository as a whole: one version, one licence, workflows that know every distribution, the release script."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / ".ci" / "release.py"
FOLDERS = [ROOT / "core", *sorted([*ROOT.glob("plugins/rollcast-*"), *ROOT.glob("contrib/rollcast-*")])]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The files of a release in a folder of their own."""
    files = [SCRIPT, ROOT / "CHANGELOG.md", ROOT / "pyproject.toml", *(ROOT / "changes").iterdir()]
    for path in [*files, *(folder / "pyproject.toml" for folder in FOLDERS)]:
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return tmp_path


def release(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / ".ci" / "release.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_licence_and_version_are_those_of_the_repository(folder: Path) -> None:
    """A wheel takes the licence from its own folder."""
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    core = tomllib.loads((ROOT / "core" / "pyproject.toml").read_text())["project"]["version"]
    assert tomllib.loads((folder / "pyproject.toml").read_text())["project"]["version"] == core


def test_a_release_writes_every_version_and_pin(copy: Path) -> None:
    (copy / "changes" / "7.fixed.md").write_text("A mended thing.\n")
    done = release(copy, "0.2.0")
    assert done.returncode == 0, done.stderr
    for folder in FOLDERS:
        text = (copy / folder.relative_to(ROOT) / "pyproject.toml").read_text()
        assert tomllib.loads(text)["project"]["version"] == "0.2.0"
        assert not re.findall(r'"rollcast[^"]*[=~]=0\.1\.0', text)
    log = (copy / "CHANGELOG.md").read_text()
    assert re.search(r"^## 0\.2\.0 \(20\d\d-\d\d-\d\d\)$", log, re.MULTILINE)
    assert "### Fixed\n\n- A mended thing. (#7)\n" in log
    assert [path.name for path in (copy / "changes").iterdir()] == ["README.md"]
    again = release(copy, "0.3.0")
    assert (again.returncode, "changes/ has no fragment" in again.stderr) == (1, True)
    assert release(copy, "--tag", "v0.2.0").returncode == 0
    wrong = release(copy, "--tag", "v0.3.0")
    assert wrong.returncode == 1
    assert "rollcast 0.2.0" in wrong.stderr


@pytest.mark.parametrize(("version", "message"), [("two", "is no version"), ("0.0.9", "is below 0.1.0")])
def test_a_wrong_version_changes_nothing(copy: Path, version: str, message: str) -> None:
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    done = release(copy, version)
    assert done.returncode == 1
    assert message in done.stderr
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("+x.improved.md", "Better.\n", "Invalid news fragment name: +x.improved.md"),
        ("+x.added.txt", "New.\n", "changes/+x.added.txt is not well-formed"),
        ("+x.added.md", "- New.\n", "changes/+x.added.md is not well-formed"),
        ("+x.added.md", "New.\n\n## More\n", "changes/+x.added.md is not well-formed"),
        ("+x.added.md", " \n", "changes/+x.added.md is not well-formed"),
    ],
)
def test_a_fragment_that_is_not_well_formed_is_refused(copy: Path, name: str, text: str, message: str) -> None:
    assert release(copy, "--fragments").returncode == 0
    (copy / "changes" / name).write_text(text)
    for arguments in (["--fragments"], ["0.2.0"]):
        done = release(copy, *arguments)
        assert (done.returncode, message in done.stderr) == (1, True), done.stderr
    assert (copy / "CHANGELOG.md").read_bytes() == (ROOT / "CHANGELOG.md").read_bytes()


def test_links_of_readmes_work_on_a_package_index(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / ".ci" / "package_pages.py")]
    address = "https://example.org/rollcast"
    done = subprocess.run(
        [*script, str(tmp_path), "--repository", address], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert {folder.name for folder in tmp_path.iterdir()} == {folder.name for folder in FOLDERS}
    links = 0
    for folder in tmp_path.iterdir():
        text = (folder / "README.md").read_text()
        targets = re.findall(r"\]\(([^)]+)\)", text)
        assert not [target for target in targets if not target.startswith(("https://", "#"))], folder.name
        for target in targets:
            if target.startswith(f"{address}/blob/v"):
                _, path = target.removeprefix(f"{address}/blob/").split("#")[0].split("/", 1)
                assert (ROOT / path).exists(), target
                links += 1
        urls = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["urls"]
        assert urls["Repository"] == address
        assert (folder / "LICENSE").is_file()
    assert links > 20


def test_a_dead_link_of_a_readme_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(ROOT / ".ci")
    import package_pages

    monkeypatch.setattr(package_pages, "ROOT", tmp_path)
    page = tmp_path / "README.md"
    page.write_text("See [the guide](docs/guide.md#start) and [this](https://example.org).")
    with pytest.raises(ValueError, match=r"README.md links to docs/guide.md, which does not exist"):
        package_pages.link_absolutely(page, "https://example.org/blob/v1")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "guide.md").touch()
    assert "[the guide](https://example.org/blob/v1/docs/guide.md#start)" in package_pages.link_absolutely(
        page, "https://example.org/blob/v1"
    )
    assert package_pages.link_absolutely(page, None) == "See the guide and [this](https://example.org)."


def nox_list(*options: str) -> list[dict[str, str]]:
    command = [sys.executable, "-m", "nox", *options, "--list", "--json"]
    return json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


def test_the_workflow_runs_every_distribution() -> None:
    """Its matrix is what nox lists, and nox finds every distribution."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    assert jobs["plugin"]["strategy"]["matrix"]["session"] == "${{ fromJSON(needs.distributions.outputs.sessions) }}"
    assert "nox -s plugin --list --json" in jobs["distributions"]["steps"][-1]["run"]
    names = {folder.name.removeprefix("rollcast-") for folder in FOLDERS}
    assert {each["session"] for each in nox_list("-s", "plugin")} == {f"plugin({name})" for name in names}


def test_the_workflows_run_every_session_of_tests() -> None:
    workflows = ROOT / ".github" / "workflows"
    jobs = yaml.safe_load((workflows / "ci.yml").read_text())["jobs"]
    nightly = yaml.safe_load((workflows / "nightly.yml").read_text())["jobs"]
    matrices = (job["strategy"]["matrix"] for job in (jobs["static"], jobs["whole"], nightly["versions"]))
    named = {session for matrix in matrices for session in matrix["session"]}
    sessions = {each["name"] for each in nox_list("-k", "not none")}
    assert named <= sessions
    assert {session for session in sessions if session.startswith("tests")} <= named


def test_the_guide_says_what_each_session_does() -> None:
    sessions = {each["name"]: each["description"] for each in nox_list("-k", "not none")}
    rows = [f"| `{name}` | {description} |" for name, description in sessions.items()]
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    table = guide.split("| session | what it does |\n|---|---|\n")[1].split("\n\n")[0]
    assert table.splitlines() == rows, "the table of CONTRIBUTING.md should be:\n" + "\n".join(rows)


def test_commands_of_the_guide_name_sessions_that_exist() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"nox -s \"?([a-z_]+)", guide))
    assert named <= {each["name"] for each in nox_list("-k", "not none")}
    assert "dev" in named
