"""docs/conformance.md: its package is built, installed and tested, and its tables are those of the classes."""

from __future__ import annotations

import re

import pytest
import suite_tables
from page_packages import DOCS, PagePackage

import rollcast_testing
from rollcast.plugins.discovery import describe_groups, find_groups

PAGE = DOCS / "conformance.md"


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> PagePackage:
    return PagePackage("conformance.md", "rollcast-gauge", tmp_path_factory.mktemp("gauge"))


def test_the_pages_tests_pass(plugin: PagePackage) -> None:
    assert plugin.count_passed() >= 30


def test_the_failure_is_the_one_shown(plugin: PagePackage) -> None:
    test = plugin.package / "tests" / "test_gauge.py"
    test.write_text(test.read_text().replace("    is_mean = False\n", ""))
    shown = plugin.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "weights_add_up", str(test), code=1)
    (line,) = re.findall(r"^E   AssertionError: .*$", PAGE.read_text(), re.MULTILINE)
    # pytest indents an error as deep as the line that raised it.
    assert re.sub(r"^E +", "E ", line) in re.sub(r"^E +", "E ", shown, flags=re.MULTILINE), shown


def test_the_tables_are_those_of_the_classes() -> None:
    page = PAGE.read_text()
    assert suite_tables.rewrite(page) == page, "run python tests/suite_tables.py"


def test_every_attribute_and_method_is_explained() -> None:
    for name, suite in suite_tables.suites().items():
        for attribute, kind, _, meaning in suite_tables.attributes(suite):
            assert kind, f"{name}.{attribute} has no type"
            assert meaning, f"{name}.{attribute} has no meaning: write a comment #: above it"
        for method, meaning in suite_tables.methods(suite):
            assert meaning, f"{name}.{method} has no docstring"


def test_every_group_has_a_suite_or_is_listed_as_without() -> None:
    tested = {f"rollcast.{group}" for group in suite_tables.GROUPS.values()}
    assert set(suite_tables.GROUPS) == set(suite_tables.suites())
    _, _, rest = PAGE.read_text().partition("## Groups without a suite")
    without = set(re.findall(r"`(rollcast\.\w+)`", rest))
    ours = {group for group in (*describe_groups(), *find_groups()) if group.startswith("rollcast.")}
    assert not tested & without
    assert {group for group in ours if group not in tested} <= without | {"rollcast.batch_types"}


def test_the_readme_names_every_suite() -> None:
    readme = (DOCS.parent / "plugins" / "rollcast-testing" / "README.md").read_text()
    exported = {name for name in rollcast_testing.__all__ if name.endswith("Suite")}
    rows = "\n".join(re.findall(r"^\| .*", readme, re.MULTILINE))
    assert set(re.findall(r"`(\w+Suite)`", rows)) == exported
    assert set(suite_tables.MODULES) <= set(re.findall(r"`(rollcast_\w+\.testing)`", readme)) | {"rollcast_testing"}
