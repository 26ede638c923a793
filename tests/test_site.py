"""The documentation site: it builds, and each kind of dead link fails the build. `nox -s docs` runs this."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="nox -s docs installs what the site is built with")

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "mkdocs.yml").is_file(), reason="only in the repository")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of what the site is made of."""
    for name in ("docs", ".ci"):
        shutil.copytree(ROOT / name, tmp_path / name)
    readmes = [*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("*/*/README.md")]
    for file in [ROOT / "mkdocs.yml", *readmes]:
        target = tmp_path / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    return tmp_path


def build(repository: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(repository / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "NO_COLOR": "1"}
    return subprocess.run(
        command, cwd=repository, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_it_builds(repository: Path) -> None:
    done = build(repository)
    assert done.returncode == 0, done.stderr
    pages = repository / "site"
    assert (pages / "contributing" / "index.html").is_file()
    hf = (pages / "distributions" / "rollcast-hf" / "index.html").read_text()
    assert 'href="../rollcast-agents/"' in hf, "the navigation lists the distributions"


@pytest.mark.parametrize(
    ("file", "planted", "complaint"),
    [
        ("docs/stages.md", "[x](no-such-page.md)", "no-such-page.md"),
        ("docs/stages.md", "[x](rewards.md#no-such-heading)", "no-such-heading"),
        ("docs/stages.md", "[x](#no-such-heading)", "no-such-heading"),
        ("docs/stages.md", "[x](/rewards.md)", "absolute"),
        ("README.md", "[x](docs/no-such-page.md)", "no-such-page.md"),
        ("plugins/rollcast-hf/README.md", "[x](../../docs/rollouts.md#no-such-heading)", "no-such-heading"),
        ("CONTRIBUTING.md", "[x](plugins/no-such/README.md)", "no-such"),
        ("docs/in-no-group.md", "# A page that the navigation does not have", "in-no-group.md"),
    ],
)
def test_a_planted_fault_fails_the_build(repository: Path, file: str, planted: str, complaint: str) -> None:
    with (repository / file).open("a") as page:
        page.write(f"\n{planted}\n")
    done = build(repository)
    assert done.returncode != 0, done.stderr
    assert complaint in done.stderr


def test_formulas_become_mathml(repository: Path) -> None:
    with (repository / "docs" / "stages.md").open("a") as page:
        page.write("\n```math\n\\frac{a}{b}\n```\n")
    assert build(repository).returncode == 0
    assert "<mfrac>" in (repository / "site" / "stages" / "index.html").read_text()
