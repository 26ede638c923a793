"""The declared surface of the core and the contracts of other distributions: their signatures as text, and the API reference made from them.

``python tests/surface.py`` rewrites ``tests/surface.txt`` and ``docs/api.md``; ``test_surface.py`` keeps both current.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
SNAPSHOT = REPOSITORY / "tests" / "surface.txt"
REFERENCE = REPOSITORY / "docs" / "api.md"
COMMAND = "nox -s surface"

_TITLE = f"""# API reference

These are the names that a plugin may import: the declared surface of the core, and the contracts that other distributions
host. Everything else of the core is private. Every change of a signature is listed in the change log. `{COMMAND}`
generates this page.
"""


def modules() -> list[str]:
    """Return the names of the surface's modules: the core's, and the contracts that other distributions host."""
    contracts = importlib.import_module("rollcast.contracts")
    core = sorted(f"rollcast.contracts.{module.name}" for module in pkgutil.iter_modules(contracts.__path__))
    patterns = ("api.py", "contract.py", "contracts/[a-z]*.py")
    files = [file for pattern in patterns for file in REPOSITORY.glob(f"plugins/*/src/*/{pattern}")]
    hosted = sorted(".".join(file.relative_to(REPOSITORY).with_suffix("").parts[3:]) for file in files)
    return ["rollcast", "rollcast.errors", "rollcast.protocol", "rollcast.plugins", *core, *hosted]


def public_names(module: Any) -> list[str]:
    """Return a module's public names: its ``__all__``, or else the classes and functions that it defines."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return sorted(listed)
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return sorted(name for name in own if not name.startswith("_"))


def _annotation(value: Any) -> str:
    return value if isinstance(value, str) else inspect.formatannotation(value)


def _default(value: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def signature(function: Any) -> str:
    """Return a callable's signature with annotations as they are written; empty if there is none."""
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    parts: list[str] = []
    previous = None
    for parameter in found.parameters.values():
        if previous is parameter.POSITIONAL_ONLY and parameter.kind is not previous:
            parts.append("/")
        if parameter.kind is parameter.KEYWORD_ONLY and previous not in (
            parameter.KEYWORD_ONLY,
            parameter.VAR_POSITIONAL,
        ):
            parts.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        text = stars + parameter.name
        if parameter.annotation is not parameter.empty:
            text += f": {_annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {_default(parameter.default)}"
        parts.append(text)
        previous = parameter.kind
    returns = "" if found.return_annotation is found.empty else f" -> {_annotation(found.return_annotation)}"
    return f"({', '.join(parts)}){returns}"


def summary(value: Any) -> str:
    """Return the first sentence of a docstring that is the object's own; empty if there is none."""
    text = inspect.getdoc(value) if callable(value) or isinstance(value, property) else ""
    # A dataclass without a docstring has its signature for one.
    if not text or (isinstance(value, type) and text.startswith(f"{value.__name__}(")):
        return ""
    first = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) ", first)[0].removesuffix("::").rstrip()


def _is_public(owner: type) -> bool:
    return any(getattr(importlib.import_module(name), owner.__name__, None) is owner for name in modules())


def _members(owner: type) -> Iterator[tuple[str, str, str]]:
    # What a class inherits from a private base is part of the surface too.
    lines = [base for base in owner.__mro__ if base.__module__.startswith("rollcast")]
    own = [base for base in lines if base is owner or not _is_public(base)]
    found = {name: value for base in reversed(own) for name, value in vars(base).items()}
    fields = getattr(owner, "__dataclass_fields__", {})
    annotated = {name: note for base in reversed(own) for name, note in inspect.get_annotations(base).items()}
    for name, note in sorted(annotated.items()):
        if not name.startswith("_") and name not in fields:
            default = f" = {_default(found[name])}" if name in found and _is_plain(found[name]) else ""
            yield name, f": {_annotation(note)}{default}", ""
    for name, value in sorted(found.items()):
        if name.startswith("_") and not (name == "__call__" and inspect.isfunction(value)):
            continue
        if isinstance(value, Enum):
            yield name, f" = {value.value!r}", ""
        elif isinstance(value, property):
            returns = getattr(value.fget, "__annotations__", {}).get("return", "Any")
            yield name, f": {_annotation(returns)}", summary(value)
        elif isinstance(value, (classmethod, staticmethod)):
            yield name, signature(value.__func__), summary(value.__func__)
        elif inspect.isfunction(value):
            yield name, signature(value), summary(value)


def describe(module: str) -> Iterator[tuple[int, str, str]]:
    """Yield depth, text and first sentence of each name of a module, and of the members of its classes."""
    loaded = importlib.import_module(module)
    for name in public_names(loaded):
        value = getattr(loaded, name)
        home = _home(module, name, value)
        if home != module:
            yield 0, f"{name} = {home}.{name}", ""
        elif inspect.isclass(value):
            bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
            yield 0, f"class {name}{f'[{bases}]' if bases else ''}{_class_signature(value)}", summary(value)
            for member, text, sentence in _members(value):
                yield 1, f"{member}{text}", sentence
        elif inspect.isroutine(value):
            yield 0, f"{name}{signature(value)}", summary(value)
        elif name == "__version__":
            yield 0, "__version__: str", ""
        elif hasattr(value, "group"):
            yield 0, f"{name} = Registry({value.group!r})", ""
        else:
            yield 0, f"{name}: {_default(value) if len(_default(value)) < 200 else type(value).__name__}", ""


def _home(module: str, name: str, value: Any) -> str:
    """Return the public module that describes a name: its own, or the one that the facade takes it from."""
    own = getattr(value, "__module__", module)
    others = modules()[1:] if module == "rollcast" else [own] if own in modules() else []
    for other in others:
        loaded = importlib.import_module(other)
        if name in public_names(loaded) and getattr(loaded, name) is value:
            return other
    return module


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, tuple, type(None)))


def _class_signature(owner: type) -> str:
    if issubclass(owner, (Enum, BaseException)) or getattr(owner, "_is_protocol", False):
        return ""
    return signature(owner)


def render_snapshot() -> str:
    """Return the text that freezes the surface."""
    lines: list[str] = []
    for module in modules():
        lines.append(f"[{module}]")
        lines += [f"{'    ' * depth}{text}" for depth, text, _ in describe(module)]
        lines.append("")
    return "\n".join(lines)


def render_reference() -> str:
    """Return the page ``docs/api.md``."""
    blocks = [_TITLE]
    for module in modules():
        loaded = importlib.import_module(module)
        blocks.append(f"## `{module}`\n")
        blocks.append(f"{summary_of_module(loaded)}\n")
        hidden = False
        for depth, text, sentence in describe(module):
            # The keys of a section are on the page of all keys.
            hidden = hidden and depth > 0
            if hidden:
                continue
            name = text.removeprefix("class ").partition("(")[0].partition("[")[0]
            if depth == 0 and hasattr(getattr(loaded, name, None), "__pydantic_config__"):
                hidden, text = True, f"class {name}"
            tail = f"  \n{'  ' * depth}  {_escape(sentence)}" if sentence else ""
            blocks.append(f"{'  ' * depth}- `{text}`{tail}")
        blocks.append("")
    return "\n".join(blocks).rstrip() + "\n"


def summary_of_module(module: Any) -> str:
    """Return the first paragraph of a module's docstring, as one line."""
    return _escape(" ".join((inspect.getdoc(module) or "").split("\n\n")[0].split()).removesuffix("::"))


def _escape(text: str) -> str:
    """Turn the docstrings' reStructuredText into Markdown."""
    text = re.sub(r":\w+:`~?([^`]+)`", lambda match: f"`{match[1].rpartition('.')[2]}`", text)
    return re.sub(r"``([^`]*)``", r"`\1`", text)


def write() -> None:
    """Write the snapshot and the page."""
    SNAPSHOT.write_text(render_snapshot())
    REFERENCE.write_text(render_reference())


if __name__ == "__main__":
    write()
