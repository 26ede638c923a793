"""Every dotted name on a page is a module, an attribute of one, or a group of plugins; benchmarks import what exists."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollcast.plugins.discovery import describe_groups

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/*/README.md"), ROOT / "core/README.md"])
NAME = re.compile(r"(?<![\w./-])rollcast(?:_\w+)?(?:\.[A-Za-z_]\w*)+(?![\w/])")
#: Ends of names of files and hosts, which look like attributes.
FILES = ("py", "md", "sbatch", "toml", "json", "yaml", "pth", "txt", "sh", "html", "com", "internal")
#: Names of other kinds: a file format, and a group that a page makes up.
OTHERS = {"rollcast.costs", "rollcast.my_group"}


def dotted_names(page: Path) -> Iterator[str]:
    for name in sorted(set(NAME.findall(page.read_text()))):
        if name.rpartition(".")[2] not in FILES and name not in OTHERS:
            yield name


def resolves(name: str) -> bool:
    """Return True if a prefix of the name is a module that has the rest of it."""
    parts = name.split(".")
    if importlib.util.find_spec(parts[0]) is None:
        return True  # a package that the page itself makes up
    for count in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            if not hasattr(value, part) and part not in getattr(value, "__annotations__", {}):
                return False
            value = getattr(value, part, None)
        return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_dotted_names_resolve(page: Path) -> None:
    groups = set(describe_groups())
    assert [name for name in dotted_names(page) if name not in groups and not resolves(name)] == []


@pytest.mark.parametrize("file", sorted(ROOT.glob("tests/benchmarks/*.py")), ids=lambda file: file.name)
def test_benchmarks_import_what_exists(file: Path) -> None:
    """No session of the tests runs them."""
    imports = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
    names = [f"{node.module}.{alias.name}" for node in imports for alias in node.names if node.level == 0]
    assert [name for name in names if name.startswith("rollcast") and not resolves(name)] == []
