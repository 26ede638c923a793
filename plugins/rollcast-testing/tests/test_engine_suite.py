"""EngineSuite notices an engine that ignores ``model.random_init``; the template's engine, changed, is that engine."""

from __future__ import annotations

import importlib.util
import types
from pathlib import Path
from typing import Any

import pytest

import rollcast_testing
from rollcast_testing import EngineSuite
from rollcast_testing.tiny import tiny_model_folder

SOURCE = Path(rollcast_testing.__file__).parent / "templates/engine/src/rollcast_my_plugin/engine.py"
ASKED = "if model.random_init:"


def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> type[Any]:
    """The template's engine, from ``text``."""
    package = types.ModuleType("rollcast_my_plugin")
    package.__path__ = [str(SOURCE.parent)]
    monkeypatch.setitem(__import__("sys").modules, "rollcast_my_plugin", package)
    file = tmp_path / "engine.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("engine_of_the_template", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: type[Any] = module.MyPluginEngine
    return found


@pytest.mark.parametrize("reads", [True, False])
def test_an_engine_that_ignores_random_init_is_caught(
    reads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = SOURCE.read_text()
    assert ASKED in text
    engine_class = load(tmp_path, monkeypatch, text if reads else text.replace(ASKED, "if model.lora_rank:"))
    folder = tiny_model_folder(tmp_path / "model", hidden=32)
    suite = EngineSuite()
    make = type(suite).build.__wrapped__ if hasattr(type(suite).build, "__wrapped__") else type(suite).build
    build = make(suite, engine_class, folder)
    if reads:
        suite.test_random_initial_weights(build)
        return
    with pytest.raises(AssertionError, match=r"with model\.random_init no weight is the folder's; these are: "):
        suite.test_random_initial_weights(build)
