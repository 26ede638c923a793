"""The contract of configuration: a plugin declares each of its keys once, in a frozen dataclass.

A field holds everything there is to say about a key: its name, type, range, default and, in the string below it,
the sentence that the docs and ``rollcast config --docs`` show::

    @config
    class WallClockConfig:
        folder: str = "clocks"
        \"\"\"Folder of the files.\"\"\"
        every: Positive = 10
        \"\"\"Steps between two files.\"\"\"

    SCHEMAS = (ConfigSchema(path="clock", schema=WallClockConfig),)

``SCHEMAS`` stands in a package of the entry point group ``rollcast.configs``, beside YAML files that hold only what
differs from these defaults. Nothing there may import torch. Values are validated by pydantic when a section is built
(:func:`rollcast.build_section`); pydantic itself is not imported before.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import math
import textwrap
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

from annotated_types import Ge, Gt, Le, Len, Lt

__all__ = [
    "ConfigSchema",
    "Fraction",
    "Ge",
    "Gt",
    "Hosts",
    "Le",
    "Len",
    "Lt",
    "NonNegative",
    "OptionOf",
    "Positive",
    "PositiveOrOff",
    "Seconds",
    "Temperature",
    "config",
    "field_docs",
    "flatten",
]

T = TypeVar("T")

Positive = Annotated[int, Ge(1)]
"""An integer of at least 1."""
NonNegative = Annotated[int, Ge(0)]
"""An integer of at least 0."""
PositiveOrOff = Literal[-1] | Annotated[int, Ge(1)]
"""An integer of at least 1, or -1 for "off" or "all"."""
Seconds = Annotated[float, Gt(0)]
"""A duration in seconds, above 0."""
Temperature = Annotated[float, Ge(0), Lt(math.inf)]
"""A sampling temperature: a finite number of at least 0, which is greedy."""
Fraction = Annotated[float, Ge(0), Le(1)]
"""A number from 0 to 1."""


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def config(cls: type[T]) -> type[T]:
    """Make a frozen dataclass whose sections refuse unknown keys and take numbers for strings."""
    cls.__pydantic_config__ = {  # type: ignore[attr-defined]
        "extra": "forbid",
        "coerce_numbers_to_str": True,
        "arbitrary_types_allowed": True,
    }
    return dataclass(frozen=True)(cls)


@dataclass(frozen=True)
class Hosts:
    """A field whose section follows the chosen option of a config group, such as any role's ``engine``.

    Written ``engine: Annotated[dict[str, Any], Hosts("engine", like="actor.engine")]``. The section's own ``name``
    decides which option's schema holds; without one the option is that of ``like``, or the group's choice.

    Attributes:
        group: Name of the config group.
        like: Path of the section whose values hold where this one sets none and has the same option.
    """

    group: str
    like: str = ""


@dataclass(frozen=True)
class OptionOf:
    """A field that names an option of a config group, or null, such as the recipe of a warm start.

    Written ``warm_start: Annotated[str | None, OptionOf("recipe")] = None``. An option that no installed package has
    is refused when the config is composed.

    Attributes:
        group: Name of the config group.
    """

    group: str


@dataclass(frozen=True, kw_only=True)
class ConfigSchema:
    """The dataclass that a section of the config follows.

    Attributes:
        schema: A class made by :func:`config`.
        path: Dotted path of the section. Empty if the fields are themselves sections at the top of the tree, as of a
            trainer. None for every section that hosts ``group`` (:class:`Hosts`).
        group: Config group whose choice switches the schema on; empty if it always holds.
        option: Option of the group; empty for any.
    """

    schema: type
    path: str | None = None
    group: str = ""
    option: str = ""


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return dotted key → leaf of nested mappings; empty mappings and lists are leaves."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree} if prefix else {}
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return leaves


def field_docs(schema: type) -> dict[str, str]:
    """Return the doc sentences of a schema's fields by name: the strings below them, read from the source."""
    docs: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):
            continue  # built in, or made without a source file
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for statement, below in itertools.pairwise(body):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                text: Any = below.value.value if _is_string(below) else None  # type: ignore[attr-defined]
                docs |= {statement.target.id: " ".join(text.split())} if text else {}
    return docs


def _is_string(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
