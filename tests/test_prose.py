"""Docstrings and comments follow the guide: no openings, attribute lines or words that it forbids."""

from __future__ import annotations

import ast
from collections import Counter

import pytest
from prose import findings, findings_of, page_findings, pages, sources


@pytest.mark.parametrize("package", sources())
def test_a_package_has_no_finding(package: str) -> None:
    assert list(sources()[package].rglob("*.py"))
    assert findings_of(package) == []


@pytest.mark.parametrize(
    "text",
    [
        "What it does.",
        "``Whether`` it is.",
        "A path.\n\n    Attributes:\n        path: of the folder.",
        "A flag.\n\n    Args:\n        a, b: whether it is on.",
        "A call that gives a number.",
        "The same, but later.",
        "If it is one.",
    ],
)
def test_each_kind_is_found(text: str) -> None:
    assert len(list(findings(f'def f(a, b):\n    """{text}"""\n'))) == 1


def test_arguments_that_are_no_parameters_are_found() -> None:
    source = 'def f(a):\n    """Return it.\n\n    Args:\n        {}: a number.\n    """\n'
    assert list(findings(source.format("a"))) == []
    assert list(findings(source.format("b"))) == ["f: documents 'b', which is no parameter"]


def test_texts_that_document_names_are_found() -> None:
    assert (
        len(list(findings('#: Whether it is on.\nON = True\nclass C:\n    a: int = 1\n    """Of the folder."""\n')))
        == 2
    )


def test_plain_english_has_no_finding() -> None:
    assert (
        list(
            findings('def f(path):\n    """Return the path.\n\n    Args:\n        path: path of the folder.\n    """\n')
        )
        == []
    )


@pytest.mark.parametrize("page", pages())
def test_a_page_has_no_finding(page: str) -> None:
    assert list(page_findings(pages()[page].read_text("utf-8"))) == []


@pytest.mark.parametrize(
    "text",
    [
        "It runs. What is left is freed.",
        "- Whether it runs.",
        "| key | Of the folder. |",
        "A call gives a number.",
        "The run goes on.",
        "Rows are written anew.",
        "It may be `null`, perhaps.",
        "They stand beside the others.",
    ],
)
def test_each_kind_is_found_on_a_page(text: str) -> None:
    assert len(list(page_findings(f"# Title\n\n{text}\n"))) == 1


def test_code_headings_questions_and_generated_tables_are_left_out() -> None:
    page = (
        "# What a run writes\n\nHow old is a token? What is a pool?\n\n`it gives`, [a page](what-goes-on.md)\n\n"
        "```text\nit goes on\n```\n\n<!-- keys: x -->\n| a | Whether it gives. |\n<!-- end -->\n"
    )
    assert list(page_findings(page)) == []


@pytest.mark.parametrize("package", sources())
def test_names_say_what_they_hold(package: str) -> None:
    """Local names and parameters are nouns of their values, not words that any value could have."""
    vague = {"each", "found", "given", "kept", "made", "taken", "told"}
    names = Counter(
        node.id if isinstance(node, ast.Name) else node.arg
        for file in sources()[package].rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.arg) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    )
    assert sum(names[name] for name in vague) <= 0.003 * names.total(), {name: names[name] for name in vague}
