"""Hooks of the documentation site: pages that are kept outside docs/, and formulas that need no script.

The guide to contributing, the change log, the README of each distribution and the notebooks become pages. Their
relative links are turned into links between pages, so that the strict build also fails at a dead link or anchor in a
README.
A block ```` ```math ```` holds LaTeX; it becomes MathML, which browsers draw without a script or a network.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

#: Entry of the navigation that stands for the list of distributions.
LISTED = "distributions/"
#: Pages of the site by their files in the repository.
OUTSIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    # In no navigation: on the site for the check of its links alone.
    "README.md": "readme.md",
}
#: A relative link of Markdown: text, file, anchor.
_LINK = re.compile(r"\[([^\[\]]*)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")
_FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def find_pages(root: Path) -> dict[str, str]:
    """Return the pages kept outside docs/: address on the site by path in the repository."""
    folders = [root / "core", *sorted(root.glob("plugins/*")), *sorted(root.glob("contrib/*"))]
    readmes = [folder / "README.md" for folder in folders if (folder / "README.md").is_file()]
    names = {f"{path.parent.relative_to(root)}/README.md": path.parent.name for path in readmes}
    names["core/README.md"] = "rollcast"
    listed = {path: f"{LISTED}{name}.md" for path, name in names.items()}
    return {path: page for path, page in (OUTSIDE | listed).items() if (root / path).is_file()}


def rewrite_links(text: str, source: str, root: Path) -> str:
    """Return a page with its relative links made relative to its place on the site.

    A link to a file of the repository that is no page of the site becomes plain text; a dead one stays dead.

    Args:
        text: The page in Markdown.
        source: Path of the page in the repository.
        root: Folder of the repository.
    """
    pages = find_pages(root)
    here = Path(pages[source]).parent
    pages["README.md"] = "index.md"

    def replace(link: re.Match[str]) -> str:
        words, file, anchor = link[1], link[2], link[3] or ""
        target = os.path.normpath(Path(source).parent / file)
        page = pages.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if page is None:
            return words if (root / target).exists() else f"[{words}](missing/{target})"
        return f"[{words}]({os.path.relpath(page, here)}{anchor})"

    parts, end = [], 0
    for code in _FENCED.finditer(text):
        parts += [_LINK.sub(replace, text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, _LINK.sub(replace, text[end:])])


def format_math(source: str, *_: Any, **__: Any) -> str:
    """Return the formula of a block ``math`` as MathML; superfences calls this."""
    return f'<div class="math">{convert(source.strip(), display="block")}</div>'


def render_notebook(file: Path) -> str:
    """Return a notebook as a page: its text, its code, and the output that it was saved with."""
    parts = []
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"]).rstrip("\n")
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            text = "".join(output.get("text") or output["data"]["text/plain"]).rstrip("\n")
            parts.append(f"```text\n{text}\n```")
    parts.append(f"[Download the notebook]({file.name})")
    return "\n\n".join(parts) + "\n"


# -- called by mkdocs ---------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the list of distributions into the navigation, and set up formulas."""
    fence = {"name": "math", "class": "math", "format": format_math}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [fence]}
    pages = find_pages(Path(config.config_file_path).parent)
    listed = [{Path(page).stem: page} for page in pages.values() if page.startswith(LISTED)]
    _fill(config.nav, listed)
    return config


def _fill(entries: Any, listed: list[dict[str, str]]) -> None:
    for entry in entries:
        for name, value in entry.items() if isinstance(entry, dict) else ():
            if value == LISTED:
                entry[name] = listed
            elif isinstance(value, list):
                _fill(value, listed)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are kept outside docs/."""
    root = Path(config.config_file_path).parent
    for source, page in find_pages(root).items():
        text = (root / source).read_text(encoding="utf-8")
        if source == "README.md":
            text = f"---\nsearch:\n  exclude: true\n---\n{text}"
        files.append(File.generated(config, page, content=rewrite_links(text, source, root)))
    for notebook in sorted((root / "docs" / "notebooks").glob("*.ipynb")):
        page = f"notebooks/{notebook.stem}.md"
        files.append(File.generated(config, page, content=render_notebook(notebook)))
    return files
