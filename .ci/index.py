"""Write the index of this repository's plugins: `python .ci/index.py`, or `nox -s index`.

The index holds a line about each group, from the Registry that declares it, and for each plugin the
distribution that provides it, from the entry points in the pyproject.toml files. The core reads it
for hints such as "pip install rollcast-x", so that no distribution is named in its code.
"""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "core/src/rollcast/plugins/known.json"
#: Groups whose plugins nobody asks for by name.
UNNAMED = ("rollcast.configs", "rollcast.hooks")


def find_descriptions(source: str) -> Iterator[tuple[str, str]]:
    """Yield group and description of every `Registry("group", ..., description="...")` in a module."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or ast.unparse(node.func).partition("[")[0] != "Registry":
            continue
        said = [word.value for word in node.keywords if word.arg == "description"]
        if node.args and isinstance(node.args[0], ast.Constant):
            yield node.args[0].value, said[0].value if said and isinstance(said[0], ast.Constant) else ""


def build() -> str:
    """Return the text of the index.

    Raises:
        SystemExit: two distributions claim one name, or a group has no registry with a description.
    """
    projects = sorted([*ROOT.glob("core/pyproject.toml"), *ROOT.glob("*/rollcast-*/pyproject.toml")])
    groups: dict[str, str] = {}
    plugins: dict[str, dict[str, str]] = {}
    for file in projects:
        for source in sorted(file.parent.glob("src/**/*.py")):
            groups.update(find_descriptions(source.read_text()))
        project = tomllib.loads(file.read_text())["project"]
        for group, points in project.get("entry-points", {}).items():
            if group.startswith("rollcast."):
                for name in points:
                    other = plugins.setdefault(group, {}).setdefault(name, project["name"])
                    if other != project["name"]:
                        raise SystemExit(f"{other} and {project['name']} both provide {name!r} in {group}")
    silent = sorted(group for group in {*groups, *plugins} if not groups.get(group))
    if silent:
        raise SystemExit(f"no Registry(..., description=...) declares {', '.join(silent)}")
    named = {group: names for group, names in plugins.items() if group not in UNNAMED}
    return json.dumps({"groups": groups, "plugins": named}, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    FILE.write_text(build())
