"""Parts registered in-process: their way to another process."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

import rollcast.errors
from rollcast.errors import PluginError, PluginLoadError
from rollcast.plugins import Registry, inprocess, is_callable
from rollcast.plugins.inprocess import generation, install_snapshot, snapshot

GROUP = "rollcast.testparts"
SOURCE = str(Path(rollcast.errors.__file__).parents[1])


@pytest.fixture
def parts() -> Registry[Any]:
    return Registry(GROUP, is_callable())


def run_python(code: str, *args: str, paths: tuple[str, ...] = ()) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([SOURCE, *paths])}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *args],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_nothing_registered_is_none(parts) -> None:
    assert snapshot() is None
    parts.register("x", len)
    assert snapshot() is not None
    parts.unregister("x")
    assert snapshot() is None


def test_a_script_sends_its_own_functions_to_another_process(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    path = str(tmp_path / "snapshot")
    run_python(
        f"""
        import sys
        from pathlib import Path
        from rollcast.plugins import Registry, is_callable
        from rollcast.plugins.inprocess import snapshot

        parts = Registry({GROUP!r}, is_callable(1))
        factor = 3

        @parts.register("triple")
        def triple(x):
            return factor * x

        @parts.register("box")
        class Box:
            def __init__(self, x):
                self.x = x

        Path(sys.argv[1]).write_bytes(snapshot())
        """,
        path,
    )
    out = run_python(
        f"""
        import sys
        from pathlib import Path
        from rollcast.plugins import Registry, is_callable
        from rollcast.plugins.inprocess import generation, install_snapshot

        data = Path(sys.argv[1]).read_bytes()
        before = generation()
        install_snapshot(data)            # before the registry exists
        install_snapshot(data)            # and once more
        assert generation() == before + 1
        parts = Registry({GROUP!r}, is_callable(1))
        print(parts.names(), parts.get("triple")(5), parts.get("box")(8).x,
              parts.get("triple") is parts.get("triple"))
        """,
        path,
    )
    assert out == "('box', 'triple') 15 8 True"


def test_an_unpicklable_part_is_named_with_advice(parts) -> None:
    lock = threading.Lock()
    parts.register("fine", len)
    parts.register("locked", lambda: lock)
    with pytest.raises(PluginError) as caught:
        snapshot()
    text = str(caught.value)
    assert "'locked'" in text
    assert GROUP in text
    assert "importable module" in text
    assert "entry point" in text
    assert "lock" in str(caught.value.__cause__)


def test_without_cloudpickle_main_is_refused_and_modules_travel(parts, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    monkeypatch.setattr(inprocess.importlib.util, "find_spec", lambda name: None if name == "cloudpickle" else name)
    parts.register("fine", textwrap.dedent)
    data = snapshot()
    assert data is not None
    install_snapshot(data)
    assert parts.get("fine") is textwrap.dedent

    def fake() -> None: ...

    fake.__module__ = "__main__"
    parts.register("mine", fake)
    with pytest.raises(PluginError, match=r"'mine'.*__main__"):
        snapshot()


def test_a_snapshot_replaces_the_one_before_and_leaves_own_parts(parts) -> None:
    parts.register("a", len)
    parts.register("b", max)
    first = snapshot()
    parts.unregister("a")
    second = snapshot()
    parts.unregister("b")

    parts.register("own", min)
    install_snapshot(first)
    assert parts.names() == ("a", "b", "own")
    install_snapshot(second)
    assert parts.names() == ("b", "own")
    install_snapshot(None)
    assert parts.names() == ("own",)


def test_what_arrived_can_be_sent_on_and_counts_as_a_change(parts) -> None:
    parts.register("a", len)
    data = snapshot()
    parts.unregister("a")
    before = generation()
    install_snapshot(data)
    assert generation() > before
    assert snapshot() == data


def test_parts_are_unpickled_only_when_asked_for(make_dist, parts) -> None:
    site = make_dist("p", {}, {"tp_far.py": "def f(): return 'far'\ndef g(): return 'g'\n"})
    import tp_far  # type: ignore[import-not-found]

    parts.register("far", tp_far.f)
    parts.register("near", len)
    data = snapshot()
    assert data is not None
    parts.unregister("far")
    parts.unregister("near")
    del sys.modules["tp_far"]
    install_snapshot(data)
    assert parts.find("far").value == "tp_far:f"
    assert "tp_far" not in sys.modules
    assert parts.get("near") is len
    assert parts.get("far")() == "far"

    # In a process that cannot import the module, only the one who asks for the part is told.
    sys.modules.pop("tp_far")
    (site / "tp_far.py").unlink()
    (site / "__pycache__").exists() and [f.unlink() for f in (site / "__pycache__").iterdir()]
    install_snapshot(None)
    install_snapshot(data)
    assert parts.get("near") is len
    with pytest.raises(PluginLoadError, match=r"'far'.*driver.*tp_far"):
        parts.get("far")


def test_a_part_that_arrives_is_checked_by_its_registry() -> None:
    wide: Registry[Any] = Registry(GROUP, lambda obj: None)
    wide.register("number", 3)
    data = snapshot()
    wide.unregister("number")
    install_snapshot(data)
    narrow: Registry[Any] = Registry(GROUP, is_callable())
    with pytest.raises(rollcast.errors.PluginTypeError, match="type int"):
        narrow.get("number")


def test_a_module_that_registers_its_part_can_be_rebuilt_from_a_snapshot(make_dist, parts) -> None:
    source = (
        "from rollcast.plugins.registry import find_registry\n"
        f"@find_registry({GROUP!r}).register('self')\n"
        "def f(): return 'self'\n"
    )
    make_dist("p", {}, {"tp_self.py": source})
    import tp_self  # type: ignore[import-not-found]  # noqa: F401

    data = snapshot()
    assert data is not None
    parts.unregister("self")
    del sys.modules["tp_self"]
    install_snapshot(data)
    assert parts.get("self")() == "self"


def test_a_snapshot_is_a_plain_pickle_of_bytes(parts) -> None:
    parts.register("a", len)
    data = snapshot()
    assert data is not None
    ((group, name, pickled, location),) = pickle.loads(data)
    assert (group, name) == (GROUP, "a")
    assert pickle.loads(pickled) is len
    assert location == "builtins:len"


def test_a_hidden_name_is_hidden_where_the_snapshot_arrives(parts) -> None:
    parts.register("a", len)
    with parts.hidden("a"):
        data = snapshot()
    parts.unregister("a")
    install_snapshot(data)
    assert "a" not in parts
    assert snapshot() == data
    install_snapshot(None)
    parts.register("a", max)
    assert parts.get("a") is max
