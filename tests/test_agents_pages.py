"""The pages about agents: their packages are built, installed and pass their suites; their code runs."""

from __future__ import annotations

import json
import re

import pytest
from page_packages import PagePackage

#: Page and distribution, with the parts that it announces.
PACKAGES = {
    "write-an-environment.md": (
        "rollcast-games",
        {("rollcast.environments", "shop"), ("rollcast.environments", "guess")},
    ),
    "write-a-tool.md": ("rollcast-desk", {("rollcast.tools", "convert"), ("rollcast.tools", "notes")}),
    "write-a-renderer.md": ("rollcast-lines", {("rollcast.renderers", "lines")}),
    "write-an-agent-loop.md": ("rollcast-reflect", {("rollcast.agent_loops", "reflect")}),
}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> PagePackage:
    """All packages of the pages, in one environment."""
    (first, (name, _)), *others = PACKAGES.items()
    installed = PagePackage(first, name, tmp_path_factory.mktemp("agents"))
    for page, (name, _) in others:
        installed.add(page, name)
    return installed


def test_each_package_passes_its_suites(packages: PagePackage) -> None:
    folders = [f"{name}/tests" for name, _ in PACKAGES.values()]
    listed = packages.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", *folders)
    for name, _ in PACKAGES.values():
        file = f"test_{name.removeprefix('rollcast-')}.py"
        assert len(re.findall(rf"^PASSED \S*{file}::", listed, re.MULTILINE)) >= 5, name


def test_the_parts_are_announced(packages: PagePackage) -> None:
    listed = json.loads(packages.rollcast("plugins", "--json", "--check"))
    parts = listed["parts"] if isinstance(listed, dict) else listed
    for name, announced in PACKAGES.values():
        rows = [part for part in parts if part["distribution"] == name]
        assert {(row["group"], row["name"]) for row in rows} == announced
        assert {row["state"] for row in rows} == {"ok"}
