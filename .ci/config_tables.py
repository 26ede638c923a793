"""Write the tables of keys into the docs, from the schemas that own the keys.

A block ``<!-- keys: PATH [OVERRIDES] -->`` … ``<!-- end -->`` in a Markdown file holds the table of a section: every
key below PATH that its own schema declares, with type, default and doc sentence. OVERRIDES choose the plugins.
``docs/configuration-reference.md`` is written whole: every key of every schema in this repository.

    python .ci/config_tables.py [--check]
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollcast import compose
from rollcast.config import sections as schemas
from rollcast.config.assembly import Composed
from rollcast.config.sources import find_sources, load_schemas
from rollcast.contracts.config import ConfigSchema, flatten

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(<!-- keys: (\S+)((?: \S+=\S+)*) -->\n).*?(<!-- end -->)", re.DOTALL)
PATTERNS = ("README.md", "docs/*.md", "plugins/*/README.md", "contrib/*/README.md")


@functools.cache
def composed(overrides: tuple[str, ...]) -> Composed:
    """Compose with mandatory values left open."""
    return compose(["trainer=ppo", *overrides] if overrides else ["trainer=ppo"], allow_missing=True)


def table(path: str, overrides: tuple[str, ...]) -> str:
    """Return the Markdown table of a section."""
    found: dict[str, tuple[str, ...]] = {}
    for each in composed(overrides).sections.placed:
        if each.hosts is not None and each.path != path:
            continue  # an engine has a table of its own
        docs = schemas.walk_docs(each.path, each.schema)
        defaults = flatten(schemas.nest(each.path, schemas.defaults_of(each.schema)))
        for key, kind in schemas.walk(each.path, each.schema):
            name = key.removeprefix(f"{path}.")
            if name != key and schemas.dataclass_in(kind) is None and schemas.hosts_of(kind) is None:
                default = show_default(defaults.get(key), kind)
                found.setdefault(name, (f"`{name}`", schemas.describe(kind, 0), default, docs.get(key, "")))
    if not found:
        raise SystemExit(f"no schema holds at {path!r} with {' '.join(overrides)}")
    rows = ["| key | values | default | |", "|---|---|---|---|"]
    rows += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in found.values()]
    return "\n".join(rows) + "\n"


def show_default(value: Any, kind: Any) -> str:
    """Return the cell of a default, with that on accelerators if the key has one of its own."""
    mark = schemas.on_accelerator(kind)
    return f"`{json.dumps(value)}`" + (f"; `{json.dumps(mark.value)}` on an accelerator" if mark else "")


def render(text: str) -> str:
    """Return a page with every block's table as it has to be."""
    return BLOCK.sub(lambda block: block[1] + table(block[2], tuple(block[3].split())) + block[4], text)


# -- the reference ------------------------------------------------------------------------------

REFERENCE = ROOT / "docs" / "configuration-reference.md"
INTRODUCTION = """# Configuration reference

Every key that a distribution of this repository declares. `rollcast explain KEY` shows the same for one key,
`rollcast config recipe=…` the values of a run; [Configuration](configuration.md) says how they are set.

- *values* are what a key accepts: its type and range. `???` as a default is a value that a run must set.
- *with* names the options that have the key, where not every option of its section does.
- `<role>.engine` stands for `actor.engine`, and for the engine of every other role, such as `critic.engine`.

This page is generated from the schemas (`nox -s config_docs`).
"""


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
            section = "<role>.engine" if head == "<role>" else head if dot else "Top level"
            found[section].setdefault(row, []).append(option)
            variants[section].add(option)
    parts = [INTRODUCTION]
    for section in sorted(found, key=lambda name: (name != "Top level", name)):
        # A schema without an option holds with every one.
        rows = {row: sorted(variants[section] if "" in given else given) for row, given in found[section].items()}
        title = section if section == "Top level" else f"`{section}`"
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
    """Write the pages; with ``--check`` only name those that are stale."""
    stale = []
    pages = [page for pattern in PATTERNS for page in sorted(ROOT.glob(pattern)) if page != REFERENCE]
    for page in [*pages, REFERENCE]:
        text = page.read_text(encoding="utf-8") if page.is_file() else ""
        new = render_reference() if page == REFERENCE else render(text)
        if new != text:
            stale.append(str(page.relative_to(ROOT)))
            if "--check" not in sys.argv:
                page.write_text(new, encoding="utf-8")
    sys.stdout.write("".join(f"{'stale' if '--check' in sys.argv else 'wrote'}: {page}\n" for page in stale))
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
