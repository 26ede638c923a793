"""Write the tables of keys into the docs, from the schemas that own the keys.

A block ``<!-- keys: PATH [OVERRIDES] -->`` … ``<!-- end -->`` in a Markdown file holds the table of a section: every
key below PATH that its own schema declares, with type, default and doc sentence. OVERRIDES choose the plugins.

    python .ci/config_tables.py [--check]
"""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path

from rollcast import compose
from rollcast.config import sections as schemas
from rollcast.config.assembly import Composed
from rollcast.contracts.config import flatten

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
                default = json.dumps(defaults.get(key))
                found.setdefault(name, (f"`{name}`", schemas.describe(kind, 0), f"`{default}`", docs.get(key, "")))
    if not found:
        raise SystemExit(f"no schema holds at {path!r} with {' '.join(overrides)}")
    rows = ["| key | values | default | |", "|---|---|---|---|"]
    rows += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in found.values()]
    return "\n".join(rows) + "\n"


def render(text: str) -> str:
    """Return a page with every block's table as it has to be."""
    return BLOCK.sub(lambda block: block[1] + table(block[2], tuple(block[3].split())) + block[4], text)


def main() -> int:
    """Write the pages; with ``--check`` only name those that are stale."""
    stale = []
    for page in (page for pattern in PATTERNS for page in sorted(ROOT.glob(pattern))):
        text = page.read_text(encoding="utf-8")
        new = render(text)
        if new != text:
            stale.append(str(page.relative_to(ROOT)))
            if "--check" not in sys.argv:
                page.write_text(new, encoding="utf-8")
    sys.stdout.write("".join(f"{'stale' if '--check' in sys.argv else 'wrote'}: {page}\n" for page in stale))
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
