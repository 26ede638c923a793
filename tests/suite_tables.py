"""The tables of docs/conformance.md, made from the classes of the conformance suites.

``python tests/suite_tables.py`` rewrites them; ``test_conformance_page.py`` keeps the page current.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "conformance.md"
BEGIN, END = "<!-- suites: begin -->", "<!-- suites: end -->"
#: Modules that export suites.
MODULES = (
    "rollcast_testing",
    *("rollcast_agents.testing", "rollcast_algorithms.testing", "rollcast_automap.testing", "rollcast_data.testing"),
    *("rollcast_engine.testing", "rollcast_serving.testing"),
)
#: Suite → the groups of plugins that it tests.
GROUPS = {
    "AdmissionSuite": "admissions",
    "AdvantageSuite": "advantages",
    "AgentLoopSuite": "agent_loops",
    "CommandSuite": "commands",
    "CostModelSuite": "cost_models",
    "DatasetSuite": "datasets",
    "DispatchSuite": "dispatch_modes",
    "EngineSuite": "engines",
    "EnvironmentSuite": "environments",
    "HealthCheckSuite": "health_checks",
    "HooksSuite": "hooks",
    "KlControllerSuite": "kl_controllers",
    "KlPenaltySuite": "kl_penalties",
    "LossAggregationSuite": "loss_aggregations",
    "OptimizerSuite": "optimizers",
    "PlannerSuite": "planners",
    "PolicyLossSuite": "policy_losses",
    "PreprocessorSuite": "preprocessors",
    "RecipeSuite": "configs",
    "RendererSuite": "renderers",
    "RewardManagerSuite": "reward_managers",
    "RewardSuite": "rewards",
    "RolloutSuite": "rollouts",
    "RuntimeSuite": "runtimes",
    "StageSuite": "stages",
    "ToolSuite": "tools",
    "TrackerSuite": "trackers",
    "TrainerSuite": "trainers",
    "WeightSyncSuite": "weight_syncs",
}


def suites() -> dict[str, type]:
    """Return every suite by name, sorted."""
    found = {}
    for module in MODULES:
        package = importlib.import_module(module)
        found |= {name: getattr(package, name) for name in package.__all__ if name.endswith("Suite")}
    return dict(sorted(found.items()))


def render() -> str:
    """Return the part of the page between its marks."""
    return "\n".join(line for name, suite in suites().items() for line in _section(name, suite))


def _section(name: str, suite: type) -> Iterator[str]:
    module = next(each for each in MODULES if name in importlib.import_module(each).__all__)
    tests = [each for each in dir(suite) if each.startswith("test_")]
    yield f"### {name}"
    yield ""
    yield f"`from {module} import {name}` · plugins of `rollcast.{GROUPS[name]}` · {len(tests)} checks"
    yield ""
    yield _plain(_first_sentence(inspect.getdoc(suite) or ""))
    yield ""
    yield "| attribute | type | default | meaning |"
    yield "|---|---|---|---|"
    for attribute, kind, default, meaning in attributes(suite):
        yield f"| `{attribute}` | {_code(kind)} | {_code(default)} | {_plain(meaning)} |"
    yield ""
    rows = list(methods(suite))
    if rows:
        yield "| method or fixture | what it returns or does |"
        yield "|---|---|"
        for method, meaning in rows:
            yield f"| `{method}` | {_plain(meaning)} |"
        yield ""


def attributes(suite: type) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, type, default and meaning of the class attributes that a suite declares, also in its bases."""
    seen = set()
    listed = {name: text for cls in suite.__mro__[-2::-1] for name, text in _listed(cls.__doc__ or "").items()}
    for cls in suite.__mro__[:-1]:
        lines = inspect.getsource(cls).splitlines()
        (node,) = ast.parse(textwrap.dedent("\n".join(lines))).body
        for statement in node.body if isinstance(node, ast.ClassDef) else ():
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            name = statement.target.id
            if name in seen or name.startswith("_"):
                continue
            seen.add(name)
            kind = ast.unparse(statement.annotation).removeprefix("ClassVar")
            kind = kind[1:-1] if kind.startswith("[") else kind
            above = _comment_above(lines, statement.lineno - 1)
            default = "" if statement.value is None else ast.unparse(statement.value)
            meaning = above or listed.get(name, "") or _tolerance(name)
            yield name, kind, default if len(default) <= 40 else "see the class", meaning


def _tolerance(name: str) -> str:
    return {"rtol": "Relative tolerance of comparisons.", "atol": "Absolute tolerance of comparisons."}.get(name, "")


def _comment_above(lines: list[str], number: int) -> str:
    texts: list[str] = []
    for line in reversed(lines[:number]):
        if not line.strip().startswith("#:"):
            break
        texts.insert(0, line.strip().removeprefix("#:").strip())
    return " ".join(texts)


def _listed(doc: str) -> dict[str, str]:
    """Return the entries of the section ``Attributes:`` of a docstring."""
    _, _, section = inspect.cleandoc(doc).partition("Attributes:\n")
    found: dict[str, str] = {}
    for line in section.splitlines():
        if not line.startswith("    "):
            if line.strip():
                break
            continue
        entry = re.match(r"    (\w+(?:, \w+)*): (.+)", line)
        if entry and not line.startswith("     "):
            names = entry[1].split(", ")
            found |= dict.fromkeys(names, entry[2])
        elif found:
            for name in names:
                found[name] += f" {line.strip()}"
    return {name: text[:1].upper() + text[1:] for name, text in found.items()}


def methods(suite: type) -> Iterator[tuple[str, str]]:
    """Yield name and meaning of the fixtures and methods that a test class may override."""
    for name in dir(suite):
        if name.startswith(("_", "test_")):
            continue
        value: Any = inspect.getattr_static(suite, name)
        fixture = getattr(value, "_fixture_function", None)
        function = inspect.unwrap(fixture or value)
        if inspect.isfunction(function):
            yield name if fixture else f"{name}()", _first_sentence(inspect.getdoc(function) or "")


def _first_sentence(doc: str) -> str:
    paragraph = " ".join(doc.partition("\n\n")[0].split())
    return paragraph.removesuffix("::")


def _plain(text: str) -> str:
    """Return text of a docstring as Markdown for a cell of a table."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    return re.sub(r"(?<!\\)\|", r"\\|", text)


def _code(text: str) -> str:
    return "`" + re.sub(r"\|", r"\\|", text) + "`" if text else ""


def rewrite(page: str) -> str:
    """Return the page with its generated part replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{render()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(rewrite(PAGE.read_text("utf-8")), "utf-8")
