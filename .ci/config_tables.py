"""Write ``docs/configuration-reference.md``: every key of every schema in this repository, with its sentence.

python .ci/config_tables.py [--check]
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollcast.config import sections as schemas
from rollcast.config.sources import find_sources, load_schemas
from rollcast.contracts.config import ConfigSchema

ROOT = Path(__file__).parents[1]


def show_default(value: Any, kind: Any) -> str:
    """Return the cell of a default, with that on accelerators if the key has one of its own."""
    mark = schemas.on_accelerator(kind)
    return f"`{json.dumps(value)}`" + (f"; `{json.dumps(mark.value)}` on an accelerator" if mark else "")


REFERENCE = ROOT / "docs" / "configuration-reference.md"
INTRODUCTION = """# Configuration reference

Every key that a distribution of this repository declares. `rollcast explain KEY` shows the same for one key,
`rollcast config recipe=…` the values of a run; [Configuration](configuration.md) says how they are set.

- *values* are what a key accepts: its type and range. `???` as a default is a value that a run must set.
- *with* names the options that have the key, where not every option of its section does.
- `<role>.engine` stands for `actor.engine`, and for the engine of every other role, such as `critic.engine`.

This page is generated from the schemas (`nox -s config_docs`).
"""
TOP_LEVEL, ROLE_ENGINE = "Top level", "Engine of a role"  # the other sections are named by their first key


@dataclass(frozen=True)
class Row:
    """A key of the reference: its name and what stands beside it."""

    key: str
    values: str
    default: str
    owner: str
    doc: str


def rows_of(entry: ConfigSchema) -> list[Row]:
    """Return the keys of a schema; those of sections that other schemas fill are left out."""
    path = "<role>.engine" if entry.path is None else entry.path
    # Declarations are read without a run, so the schema is placed where it would stand in one.
    placed = schemas.Sections((schemas.Section(path, entry.schema),), {})
    kinds = dict(schemas.walk(path, entry.schema))
    rows = []
    for key, about in schemas.declarations(placed).items():
        if schemas.hosts_of(kinds[key]) is None:
            # Described as for a value of the right type, so that a number's range stands in place of its type.
            owner = about["declared"].partition(".")[0].replace("_", "-")  # as every package here is named
            values, default = schemas.describe(kinds[key], 0), show_default(about["default"], kinds[key])
            rows.append(Row(key, values, default, owner, about["doc"]))
    return rows


def section_table(found: dict[Row, list[str]], variants: set[str]) -> str:
    """Return the table of a section: its rows with the options that have each, out of all its options."""
    partial = any(set(options) != variants for options in found.values())
    lines = ["| key | values | default | from |" + (" with |" if partial else "") + " |"]
    lines.append("|---" * (6 if partial else 5) + "|")
    for row, options in found.items():
        where = "" if set(options) == variants else ", ".join(f"`{option}`" for option in options)
        cells = [f"`{row.key}`", row.values, row.default, row.owner, *([where] if partial else []), row.doc]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def render_reference() -> str:
    """Return the page of all keys."""
    sources = find_sources(None).found
    found: dict[str, dict[Row, list[str]]] = defaultdict(dict)
    variants: dict[str, set[str]] = defaultdict(set)
    root = ConfigSchema(schema=schemas.RootConfig, path="")
    for entry in [root, *load_schemas(sources)]:
        option = f"{entry.group}={entry.option}" if entry.option else ""
        for row in rows_of(entry):
            head, dot, _ = row.key.partition(".")
            section = ROLE_ENGINE if head == "<role>" else head if dot else TOP_LEVEL
            found[section].setdefault(row, []).append(option)
            variants[section].add(option)
    parts = [INTRODUCTION]
    for section in sorted(found, key=lambda name: (name != TOP_LEVEL, name != ROLE_ENGINE, name)):
        # A schema without an option holds with every one.
        rows = {row: sorted(variants[section] if "" in given else given) for row, given in found[section].items()}
        title = section if section in (TOP_LEVEL, ROLE_ENGINE) else f"`{section}`"
        parts.append(f"## {title}\n\n{section_table(rows, variants[section])}")
    return "\n".join([*parts, render_options()])


def render_options() -> str:
    """Return the section of config groups with their options and the distributions that bring them."""
    groups: dict[str, list[str]] = defaultdict(list)
    for source in find_sources(None).found:
        for file in sorted(source.folder.glob("*/*.yaml")):
            groups[file.parent.name].append(f"`{file.stem}` ({source.provider})")
    lines = ["## Options of groups", "", "`GROUP=OPTION` chooses one.", "", "| group | options |", "|---|---|"]
    lines += [f"| `{group}` | {', '.join(sorted(options))} |" for group, options in sorted(groups.items())]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page; with ``--check`` only say whether it is stale."""
    new = render_reference()
    if REFERENCE.is_file() and REFERENCE.read_text(encoding="utf-8") == new:
        return 0
    if "--check" in sys.argv:
        sys.stdout.write(f"stale: {REFERENCE.relative_to(ROOT)}\n")
        return 1
    REFERENCE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
