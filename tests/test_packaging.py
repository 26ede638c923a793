"""The wheels: what is in them, what they require, and that every part they announce is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from run_commands import Commands

ROOT = Path(__file__).parents[1]
FOLDERS = [
    ROOT / "core",
    *sorted((ROOT / "plugins").glob("rollcast-*")),
    *sorted((ROOT / "contrib").glob("rollcast-*")),
]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, zipfile.ZipFile]:
    """Distribution → its wheel: those that were installed for this run, or built now."""
    given = os.environ.get("ROLLCAST_WHEELS")
    folder = Path(given) if given else tmp_path_factory.mktemp("wheels")
    if not given:
        build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
        subprocess.run([*build, *map(str, FOLDERS)], check=True, timeout=300)
    found = {}
    for wheel in folder.glob("*.whl"):
        archive = zipfile.ZipFile(wheel)
        found[metadata_of(archive)["Name"]] = archive
    return found


def metadata_of(wheel: zipfile.ZipFile) -> dict[str, str]:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    message = HeaderParser().parsestr(wheel.read(name).decode())
    return {**dict(message.items()), "Requires": "\n".join(message.get_all("Requires-Dist", []))}


def test_every_folder_is_a_wheel(wheels: dict[str, zipfile.ZipFile]) -> None:
    assert set(wheels) == {tomllib.loads((f / "pyproject.toml").read_text())["project"]["name"] for f in FOLDERS}


def test_wheels_are_complete(wheels: dict[str, zipfile.ZipFile]) -> None:
    for folder in FOLDERS:
        (package,) = (path for path in (folder / "src").iterdir() if path.is_dir() and path.name.startswith("rollcast"))
        name = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"]
        inside = set(wheels[name].namelist())
        wanted = {
            str(path.relative_to(folder / "src"))
            for path in package.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert f"{package.name}/py.typed" in wanted
        assert any(path.endswith(".dist-info/licenses/LICENSE") for path in inside)
        assert wanted <= inside
        # A template of `rollcast new` is a package with tests of its own.
        assert not [entry for entry in inside if "tests/" in entry and "/templates/" not in entry]
        assert (folder / "README.md").stat().st_size > 300, f"{name} has no README to speak of"


def test_one_version_train(wheels: dict[str, zipfile.ZipFile]) -> None:
    headers = {name: metadata_of(wheel) for name, wheel in wheels.items()}
    assert len({header["Version"] for header in headers.values()}) == 1
    version = headers["rollcast"]["Version"]
    for name, header in headers.items():
        if name != "rollcast":
            assert f"rollcast~={version}" in header["Requires"].splitlines(), f"{name} on core"
        for line in header["Requires"].splitlines():
            if line.startswith("rollcast-"):
                assert line.partition(";")[0].strip().endswith(f"=={version}"), f"{name}: {line}"


def test_core_requires_no_plugin_and_no_transformers(wheels: dict[str, zipfile.ZipFile]) -> None:
    lines = [line for line in metadata_of(wheels["rollcast"])["Requires"].splitlines() if "extra ==" not in line]
    assert not [line for line in lines if line.startswith(("rollcast-", "transformers", "pyarrow"))]


def test_every_announced_part_loads(rollcast: Commands) -> None:
    report = json.loads(rollcast.must_run("plugins", "--json", "--check").out)
    parts = report["parts"] if isinstance(report, dict) else report
    first_party = [part for part in parts if part["distribution"].startswith("rollcast")]
    assert len(first_party) > 40
    assert {part["state"] for part in first_party} == {"ok"}, [p for p in first_party if p["state"] != "ok"]


def test_the_page_names_every_folder_that_its_command_needs() -> None:
    """pip takes the distributions of the clone from the folders only, and looks for others on the index."""
    page = (ROOT / "docs" / "installation.md").read_text()
    command = page[page.index("pip install -e core") :]
    named = {ROOT / word for word in command[: command.index("```")].split() if (ROOT / word).is_dir()}
    projects = {folder: tomllib.loads((folder / "pyproject.toml").read_text())["project"] for folder in FOLDERS}
    ours = {project["name"] for project in projects.values()}
    given = {projects[folder]["name"] for folder in named}
    needed = {Requirement(line).name for folder in named for line in projects[folder].get("dependencies", ())}
    assert needed & ours <= given
