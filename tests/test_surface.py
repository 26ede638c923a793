"""The declared surface is what its snapshot says, and docs/api.md shows it."""

from __future__ import annotations

import difflib
import sys
import types

import pytest
import surface


def require_current(found: str, file: str, text: str) -> None:
    difference = list(difflib.unified_diff(text.splitlines(), found.splitlines(), file, "the code", lineterm="", n=1))
    if difference:
        pytest.fail("\n".join([*difference[:60], f"run `{surface.COMMAND}` and add a file to changes/"]), pytrace=False)


def test_signatures_are_frozen() -> None:
    require_current(surface.render_snapshot(), surface.SNAPSHOT.name, surface.SNAPSHOT.read_text())


def test_the_reference_is_current() -> None:
    require_current(surface.render_reference(), surface.REFERENCE.name, surface.REFERENCE.read_text())


def test_every_public_name_resolves_and_is_frozen() -> None:
    text = surface.SNAPSHOT.read_text()
    for module in surface.modules():
        assert f"[{module}]\n" in text
    for name in ("AdvantageInputs", "BaseEngine", "RollcastError", "DataProto", "Registry", "BaseRollout"):
        assert f"class {name}" in text


def test_a_changed_signature_fails_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollcast.contracts import weights

    monkeypatch.setattr(weights.AdapterWeights, "config_json", lambda self, indent: "")
    with pytest.raises(pytest.fail.Exception, match="nox -s surface` and add a file to changes/"):
        test_signatures_are_frozen()


def test_signatures_are_as_written() -> None:
    def plain(a: int, /, b: str = "x", *rest: float, c: bool = True, **more: object) -> None: ...

    def keywords(*, first: int) -> int: ...

    assert surface.signature(plain) == (
        "(a: int, /, b: str = 'x', *rest: float, c: bool = True, **more: object) -> None"
    )
    assert surface.signature(keywords) == "(*, first: int) -> int"


def test_a_module_without_a_list_has_the_names_that_it_defines(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("lonely")
    exec("import os\nclass A: pass\nclass _B: pass\ndef c(): pass\n", module.__dict__)
    monkeypatch.setitem(sys.modules, "lonely", module)
    assert surface.public_names(module) == ["A", "c"]
