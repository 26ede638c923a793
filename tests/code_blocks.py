"""Fenced blocks of the documentation, and what it takes to run or to check them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Languages of blocks that are run or checked; a block without one, or of ``text``, shows output.
CODE = ("python", "bash", "shell", "yaml", "toml", "json", "math")
SHOWN = ("", "text")
_BLOCK = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True)
class Block:
    """A fenced block: its page as a path in the repository, line, language, title and text."""

    page: str
    line: int
    language: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Every page of Markdown whose blocks count: docs, READMEs and the contributor's guide."""
    patterns = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "core/README.md", "docs/**/*.md")
    patterns += ("plugins/*/README.md", "contrib/*/README.md")
    return sorted({str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)})


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        language, _, rest = match["info"].strip().partition(" ")
        title = _TITLE.search(rest)
        line = text.count("\n", 0, match.start()) + 1
        body = re.sub(rf"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
        found.append(Block(page, line, language, title[1] if title else "", body))
    return found


def commands(block: Block) -> Iterator[list[str]]:
    """The commands of a block of shell, as words: comments, prompts and continuations are resolved."""
    text = block.text.replace("\\\n", " ")
    for line in text.splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while "&&" in words:
            yield words[: words.index("&&")]
            words = words[words.index("&&") + 1 :]
        if words:
            yield words


def without_environment(words: list[str]) -> list[str]:
    """A command without the variables in front of it and without a redirection."""
    while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0]):
        words = words[1:]
    return words[: words.index(">")] if ">" in words else words
