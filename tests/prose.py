"""Findings in docstrings and comments, by package, and in Markdown pages.

python tests/prose.py    # number of findings of each package and page
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: A docstring that opens with one of these is no sentence: functions start with a verb, classes with a noun phrase.
_OPENING = re.compile(r"\W*(What|Where|How|Whether|Of|Who|Which|When|If|As|To be|The same(?=,))\b")
#: An attribute line says what the attribute is; "path: of the folder" leaves that to its name.
_ATTRIBUTE = re.compile(r"^\s*[*\w][\w*, ]*: (of|what|where|how|whether|who|which|to be|such as) ", re.MULTILINE)
#: A comment that documents the name below it is held to the rule of openings too.
_COMMENT = re.compile(r"^\s*#: (.*(?:\n\s*#: .*)*)", re.MULTILINE)
_GIVES = re.compile(r"\b[Gg]ives?\b")
#: Phrases that read as translated, and the plain words for them.
_PLAIN = {
    r"gives?|gave": "returns, prints or contains",
    r"go(?:es|ing)? on|went on": "continues",
    "anew": "again",
    "beside": "in addition to, next to or with",
    "perhaps": "possibly or optionally",
    "mend(?:s|ed|ing)?": "fix",
    "(?:is|are|was|were) (?:told|said)": "reports or states",
    "to be had": "is available",
    "what it got": "what it received",
    "hands? on": "passes",
    "at hand": "available",
}
_STILTED = [(re.compile(rf"\b(?:{words})\b", re.IGNORECASE), plain) for words, plain in _PLAIN.items()]
#: A sentence or table cell of a page must not open with one of these; a heading or a question may.
_FRAGMENT = re.compile(r"(?:What|Whether|Of|Who|Which|To be)\b(?![^.!?]*\?)")
_PAGES = ("*.md", "core/README.md", "docs/*.md", "plugins/*/README.md", "contrib/*/README.md")
#: Pages that other tools or the change log write.
_GENERATED = ("docs/api.md", "docs/configuration-reference.md", "CHANGELOG.md")
_NOT_PROSE = re.compile(
    r"^ *```.*?^ *```|<!-- keys.*?<!-- end -->|<!--.*?-->|`[^`\n]*`|\]\([^)\n]*\)", re.MULTILINE | re.DOTALL
)
_ARGS = re.compile(r"^Args:\n((?:    .*\n?|\n)+)", re.MULTILINE)
_ARGUMENT = re.compile(r"^    (\*{0,2}\w[\w, *]*): ", re.MULTILINE)
_KINDS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _fields(node: ast.AST) -> Iterator[str]:
    """Yield the strings below the assignments of a module or class, which document the names above them."""
    body = node.body if isinstance(node, ast.Module | ast.ClassDef) else []
    for above, below in itertools.pairwise(body):
        if isinstance(above, ast.Assign | ast.AnnAssign):
            value = below.value if isinstance(below, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value


def _messages(node: ast.AST) -> Iterator[str]:
    """Yield the strings of a raised error's message."""
    raised = node.exc if isinstance(node, ast.Raise) else None
    for argument in raised.args if isinstance(raised, ast.Call) else []:
        for part in ast.walk(argument):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.value


def _documented(docstring: str) -> set[str]:
    """Return the names in the section ``Args`` of a docstring."""
    section = _ARGS.search(docstring)
    lines = _ARGUMENT.finditer(section[1]) if section else ()
    return {name.strip("* ") for line in lines for name in line[1].split(",")}


def _parameters(node: ast.AST) -> set[str] | None:
    """Return the names of a function's parameters, or of a class's constructor; None if the class inherits it."""
    if isinstance(node, ast.ClassDef):
        makers = [item for item in node.body if getattr(item, "name", "") in ("__init__", "__new__")]
        return _parameters(makers[0]) if makers else None
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return set()
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return {argument.arg for argument in named if argument is not None}


def findings(source: str) -> Iterator[str]:
    """Yield the faults in the docstrings of a file, and in the strings and comments that document names."""
    for comment in _COMMENT.finditer(source):
        if opening := _OPENING.match(comment[1]):
            yield f"comment {comment[1][:40]!r}: opens with {opening[1]!r}"
    for node in ast.walk(ast.parse(source)):
        for text in _messages(node):
            for pattern, plain in _STILTED[1:]:  # "give one value a row" tells the reader what to do
                for match in pattern.finditer(text):
                    yield f"error message {text[:40]!r}: {match[0]!r}; write {plain}"
        for text in _fields(node):
            if opening := _OPENING.match(text):
                yield f"text {text[:40]!r}: opens with {opening[1]!r}"
        text = ast.get_docstring(node) if isinstance(node, _KINDS) else None
        if text is None:
            continue
        name = getattr(node, "name", "module")
        if opening := _OPENING.match(text):
            yield f"{name}: opens with {opening[1]!r}"
        for line in _ATTRIBUTE.finditer(text):
            yield f"{name}: attribute line {line[0].strip()!r}"
        for word in _GIVES.finditer(text):
            yield f"{name}: {word[0]!r}; write 'returns'"
        parameters = _parameters(node)
        for argument in sorted(_documented(text) - parameters) if parameters is not None else ():
            yield f"{name}: documents {argument!r}, which is no parameter"


def page_findings(text: str) -> Iterator[str]:
    """Yield the faults in the prose of a Markdown page; code, links' targets and generated tables are left out."""
    prose = _NOT_PROSE.sub(lambda found: "\n" if "\n" in found[0] else "·", text)
    for paragraph in re.split(r"\n\s*\n|\n(?= *[-|#] ?| *\d+\. )", prose):
        line = " ".join(paragraph.split())
        # A heading is a noun phrase, which may be a clause: "What a model takes in memory".
        for sentence in [] if line.startswith("#") else re.split(r"(?<=[.!?]) |^[-#>|\d.]+ | \| ", line):
            if opening := _FRAGMENT.match(sentence):
                yield f"{sentence[:50]!r}: opens with {opening[0]!r}"
        for pattern, plain in _STILTED:
            for found in pattern.finditer(line):
                yield f"{line[max(found.start() - 20, 0) : found.end() + 20]!r}: {found[0]!r}; write {plain}"


def pages() -> dict[str, Path]:
    """Return the Markdown pages that are written by hand."""
    found = {path.relative_to(ROOT).as_posix(): path for pattern in _PAGES for path in sorted(ROOT.glob(pattern))}
    return {name: path for name, path in found.items() if name not in _GENERATED}


def sources() -> dict[str, Path]:
    """Return the source folder of each package."""
    found = {"rollcast": ROOT / "core" / "src"}
    return found | {path.parent.name: path for path in sorted(ROOT.glob("*/rollcast-*/src"))}


def findings_of(package: str) -> list[str]:
    """Return the findings of a package, with their files."""
    files = sorted(sources()[package].rglob("*.py"))
    return [f"{path.name}: {each}" for path in files for each in findings(path.read_text("utf-8"))]


if __name__ == "__main__":
    for name in sources():
        sys.stdout.write(f"{len(findings_of(name)):5} {name}\n")
    for name, path in pages().items():
        sys.stdout.write(f"{len(list(page_findings(path.read_text('utf-8')))):5} {name}\n")
