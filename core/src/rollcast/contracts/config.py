"""Contract of configuration: a plugin declares each of its keys once, in a frozen dataclass.

A field declares a key's name, type, range and default. The string below the field is its documentation, shown by the
docs and by ``rollcast config --docs``::

    @config
    class WallClockConfig:
        folder: str = "clocks"
        \"\"\"Folder of the files.\"\"\"
        every: Positive = 10
        \"\"\"Steps between two files.\"\"\"

    SCHEMAS = (ConfigSchema(path="clock", schema=WallClockConfig),)

Define ``SCHEMAS`` in a package of the entry-point group ``rollcast.configs``, beside YAML files that contain only
values that differ from these defaults. The package must not import torch. Pydantic validates the values when a
section is built (:func:`rollcast.build_section`) and is not imported before.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
from collections.abc import Callable, Mapping
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
    "LocalPath",
    "Lt",
    "NonNegative",
    "OnAccelerator",
    "OnThisMachine",
    "OptionOf",
    "OrInfinity",
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
Temperature = Annotated[float, Ge(0)]
"""A sampling temperature of at least 0; 0 is greedy."""
Fraction = Annotated[float, Ge(0), Le(1)]
"""A number from 0 to 1."""


@dataclass(frozen=True)
class OnThisMachine:
    """A marker for a config field with a path that cannot be a URL; see :data:`LocalPath`."""


LocalPath = Annotated[str, OnThisMachine()]
"""A path of a file system that is mounted on this machine. A URL such as `s3://bucket/run` is refused."""


@dataclass(frozen=True)
class OrInfinity:
    """A marker for a number that may be `inf`, such as a limit without effect. Every other number must be finite."""


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def config(cls: type[T]) -> type[T]:
    """Make ``cls`` a frozen dataclass that rejects unknown keys and accepts numbers for strings."""
    cls.__pydantic_config__ = {  # type: ignore[attr-defined]
        "extra": "forbid",
        "coerce_numbers_to_str": True,
        "arbitrary_types_allowed": True,
    }
    return dataclass(frozen=True)(cls)


@dataclass(frozen=True)
class Hosts:
    """A marker for a field whose schema depends on the chosen option of a config group, such as a role's ``engine``.

    Write ``engine: Annotated[dict[str, Any], Hosts("engine", like="actor.engine")]``. The section's own ``name``
    selects the option whose schema applies; without ``name``, the option of ``like`` applies, or the group's choice.

    Attributes:
        group: Name of the config group.
        like: Path of the section whose values are the defaults of this section if both have the same option.
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


@dataclass(frozen=True)
class OnAccelerator:
    """A key's default in a run on an accelerator, if it differs from the field's default, which is for a CPU.

    Write ``packs: Annotated[bool, OnAccelerator(True, "padding takes as long as tokens")] = False``. The default is
    chosen by ``placement.device`` when the config is composed, so a run's ``config.yaml`` holds the chosen value.

    Attributes:
        value: Default on every device except ``cpu``.
        reason: Reason for the other default, shown by ``rollcast config`` and ``rollcast plan``.
        applies: Function of the keys that the configuration sets in the section; False keeps the field's default, for
            a key that excludes another one. None to always apply.
    """

    value: Any
    reason: str
    applies: Callable[[Mapping[str, Any]], bool] | None = None


@dataclass(frozen=True, kw_only=True)
class ConfigSchema:
    """The schema of a config section.

    Attributes:
        schema: Dataclass decorated with :func:`config`.
        path: Dotted path of the section. Empty if the fields are themselves top-level sections, as for a trainer.
            None to apply to every section that hosts ``group`` (:class:`Hosts`).
        group: Config group for whose choice the schema applies; empty if the schema always applies.
        option: Option of the group for which the schema applies; empty for any option.
    """

    schema: type
    path: str | None = None
    group: str = ""
    option: str = ""


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted key → leaf; empty mappings and lists are leaves."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree} if prefix else {}
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return leaves


def field_docs(schema: type) -> dict[str, str]:
    """Return the documentation of a schema's fields by name, read from the strings below them in the source."""
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
