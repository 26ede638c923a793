"""``report``: what it can tell without importing, and what only an import tells."""

from __future__ import annotations

import subprocess
import sys
import time
from textwrap import dedent
from typing import Any

import pytest

import rollcast.errors
from rollcast.plugins import Registry, is_callable
from rollcast.plugins.health import PluginReport, report

GROUP = "rollcast.testparts"


def rows_of(distribution: str, **kwargs: Any) -> dict[str, PluginReport]:
    return {row.name: row for row in report(**kwargs) if row.distribution == distribution}


# ------------------------------------------------------------------------------- metadata


@pytest.mark.parametrize(
    ("value", "requires", "piece"),
    [
        ("tp m:f", (), "'tp m:f' is not of the form 'module:attribute'"),
        ("tp_nowhere.sub:f", (), "no module 'tp_nowhere'"),
        ("tp_m:f", ("tp-absent>=2", "tp-other; python_version < '3'", "packaging"), "pip install 'tp-absent>=2'"),
    ],
)
def test_metadata_shows_what_cannot_load(make_dist, value: str, requires: tuple[str, ...], piece: str) -> None:
    make_dist("p", {GROUP: {"a": value}}, {"tp_m.py": "f = len"}, requires=requires)
    row = rows_of("p")["a"]
    assert row.state == "broken"
    assert piece in row.cause
    assert "tp-other" not in row.cause
    assert "packaging" not in row.cause


def test_requirements_of_extras_are_not_missed(make_dist) -> None:
    make_dist("p", {GROUP: {"a": "tp_m:f"}}, {"tp_m.py": "f = len"}, requires=("tp-absent; extra == 'all'",))
    assert rows_of("p")["a"].state == "ok"


def test_a_group_of_a_strangers_own_is_no_mistake(make_dist) -> None:
    make_dist("p", {"rollcast.zithers": {"a": "tp_m:f"}}, {"tp_m.py": "f = len"})
    assert rows_of("p")["a"].state == "ok"


def test_report_tells_every_state(make_dist, core_version, monkeypatch) -> None:
    monkeypatch.setattr("rollcast.plugins.discovery.find_core_version", lambda: "0.1.0")
    code = {"tp_m.py": "def f(): ..."}
    make_dist("fine", {GROUP: {"ok": "tp_m:f", "twice": "tp_m:f"}}, code, version="1.1")
    make_dist("other", {GROUP: {"bad": "tp_nowhere:f", "twice": "tp_m:f"}})
    make_dist("newer", {GROUP: {"new": "tp_m:f"}}, requires=("rollcast>=5",))
    make_dist("typo", {"rollcast.testpart": {"x": "tp_m:f"}})
    planners: Registry[Any] = _declare(GROUP)
    planners.register("mine", len)
    rows = [row for row in report() if row.group in (GROUP, "rollcast.testpart")]
    states = {(row.name, row.distribution): row.state for row in rows}
    assert states == {
        ("bad", "other"): "broken",
        ("mine", ""): "in-process",
        ("new", "newer"): "incompatible",
        ("ok", "fine"): "ok",
        ("twice", "fine"): "conflict",
        ("twice", "other"): "conflict",
        ("x", "typo"): "broken",
    }
    by_name = {row.name: row for row in rows}
    assert "rollcast>=5" in by_name["new"].cause
    assert "0.1.0" in by_name["new"].cause
    assert "did its author mean 'rollcast.testparts'" in by_name["x"].cause
    assert "fine 1.1" in by_name["twice"].cause
    assert "other 1.0" in by_name["twice"].cause
    assert by_name["mine"].value == "builtins:len"
    assert (by_name["ok"].version, by_name["ok"].value, by_name["ok"].cause) == (
        "1.1",
        "tp_m:f",
        "",
    )
    assert [row.name for row in rows if row.group == GROUP] == sorted(row.name for row in rows if row.group == GROUP)
    assert "tp_m" not in sys.modules


def _declare(group: str) -> Registry[Any]:
    from rollcast.plugins import registry

    registry._registries.pop(group, None)
    return Registry(group, is_callable())


def test_report_imports_no_plugin(make_dist) -> None:
    body = "\n".join(f"def f{i}(x):\n    y = x + {i}\n    return y" for i in range(60))
    names = [f"m{i}" for i in range(60)]
    files = {f"tp_big/{name}.py": "from . import common\n" + body for name in names}
    files |= {"tp_big/__init__.py": "", "tp_big/common.py": body}
    make_dist("big", {GROUP: {name: f"tp_big.{name}:f0" for name in names}}, files)
    rows = rows_of("big")
    assert {row.state for row in rows.values()} == {"ok"}
    assert not [name for name in sys.modules if name.startswith("tp_big")]


def test_config_packages_are_checked_like_any_plugin(make_dist) -> None:
    packages = {"tp_c/__init__.py": "", "tp_c/conf/__init__.py": "", "tp_c/conf/a.yaml": "x: 1"}
    points = {"good": "tp_c.conf", "bad": "tp_c.gone", "bare": "tp_c.bare"}
    make_dist("c", {"rollcast.configs": points}, {**packages, "tp_c/bare/a.yaml": "x: 1"})
    rows = rows_of("c", check=True, groups=["rollcast.configs"], registries=["rollcast.config.sources"])
    assert rows["good"].state == "ok"
    assert rows["bad"].state == "broken"
    assert rows["bare"].state == "broken"  # its files are not on the search path
    assert "has no __init__.py" in rows["bare"].cause


def test_files_of_config_packages_are_checked(make_dist) -> None:
    empty = {"__init__.py": ""}
    files = {
        "tp_torn": {**empty, "recipe/torn.yaml": "a: [1"},
        "tp_one": {**empty, "recipe/same.yaml": "a: 1", "recipe/one.yaml": "a: 1"},
        "tp_two": {**empty, "recipe/same.yaml": "a: 2", "recipe/two.yaml": "a: 1"},
        "tp_three": {**empty, "recipe/three.yaml": "a: 1"},
    }
    for name, content in files.items():
        packaged = {f"{name}/{path}": text for path, text in content.items()}
        make_dist(name, {"rollcast.configs": {name: name}}, packaged)
    rows = report(check=True, groups=["rollcast.configs"], registries=["rollcast.config.sources"])
    found = {row.name: row for row in rows}
    assert {name: found[name].state for name in files} == {
        "tp_torn": "broken",
        "tp_one": "broken",
        "tp_two": "broken",
        "tp_three": "ok",
    }
    assert "has recipe/torn.yaml, which is not YAML" in found["tp_torn"].cause
    assert "has recipe/same.yaml, as tp-two 1.0 (tp_two) has: recipe=same is refused" in found["tp_one"].cause


# ---------------------------------------------------------------------------- check=True


def test_check_really_imports_in_a_process_of_its_own(make_dist) -> None:
    files = {
        "tp_good.py": "print('noise on stdout')\nimport os\nos.write(1, b'more\\n')\nf = len",
        "tp_cond.py": "if True:\n    raise RuntimeError('only at run time')",
        "tp_kill.py": "import os\nos.write(2, b'last words')\nos._exit(7)",
        "tp_sig.py": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        "tp_stop.py": "raise KeyboardInterrupt",
        "tp_ask.py": "try:\n    input()\nexcept EOFError:\n    pass\nf = len",
        "tp_wrong.py": "f = 3",
        "tp_home.py": f"""
            from rollcast.plugins import Registry, is_callable
            parts = Registry({GROUP!r}, is_callable())
        """,
        "tp_last.py": "f = len",
    }
    names = ("good", "cond", "kill", "sig", "stop", "ask", "wrong", "last")
    make_dist("p", {GROUP: {name: f"tp_{name}:f" for name in names}}, files)
    rows = rows_of("p", groups=[GROUP], check=True, registries=["tp_home"])
    states = {name: rows[name].state for name in names}
    assert states == {
        "good": "ok",
        "cond": "broken",
        "kill": "broken",
        "sig": "broken",
        "stop": "broken",
        "ask": "ok",
        "wrong": "broken",
        "last": "ok",
    }
    assert "only at run time" in rows["cond"].cause
    assert "exit status 7" in rows["kill"].cause
    assert "last words" in rows["kill"].cause
    assert "SIGKILL" in rows["sig"].cause
    assert "type int" in rows["wrong"].cause
    assert not {f"tp_{name}" for name in names} & set(sys.modules)


def test_check_ends_a_part_that_hangs_and_goes_on(make_dist) -> None:
    files = {"tp_hang.py": "import time\ntime.sleep(600)", "tp_ok.py": "f = len"}
    make_dist("p", {GROUP: {"a_hang": "tp_hang:f", "b_ok": "tp_ok:f"}}, files)
    begin = time.perf_counter()
    rows = rows_of("p", groups=[GROUP], check=True, registries=[], timeout=2)
    assert time.perf_counter() - begin < 20
    assert rows["a_hang"].state == "broken"
    assert "2 seconds" in rows["a_hang"].cause
    assert rows["b_ok"].state == "ok"


def test_check_is_not_held_up_by_what_a_plugin_leaves_running(make_dist) -> None:
    files = {
        "tp_fork.py": "import os, time\nif os.fork() == 0:\n    time.sleep(300)\nos._exit(3)",
        "tp_close.py": "import os, time\nos.closerange(1, 99)\ntime.sleep(300)",
        "tp_thread.py": "import threading, time\nthreading.Thread(target=time.sleep, args=(300,)).start()\nf = len",
    }
    points = {"a_fork": "tp_fork:f", "b_close": "tp_close:f", "c_thread": "tp_thread:f"}
    make_dist("p", {GROUP: points}, files)
    begin = time.perf_counter()
    rows = rows_of("p", groups=[GROUP], check=True, registries=[], timeout=4)
    assert time.perf_counter() - begin < 30
    assert "exit status 3" in rows["a_fork"].cause
    assert "4 seconds" in rows["b_close"].cause
    assert rows["c_thread"].state == "ok"


def test_check_uses_the_registries_of_this_process_by_default(make_dist) -> None:
    home = f"""
        from rollcast.plugins import Registry, is_callable
        parts = Registry({GROUP!r}, is_callable())
    """
    make_dist("p", {GROUP: {"a": "tp_m:f"}}, {"tp_m.py": "f = 3", "tp_home.py": home})
    from rollcast.plugins import registry

    registry._registries.pop(GROUP, None)
    __import__("tp_home")
    assert "type int" in rows_of("p", groups=[GROUP], check=True)["a"].cause


def test_check_warns_of_a_registry_module_that_fails(make_dist, caplog) -> None:
    make_dist("p", {GROUP: {"a": "tp_m:f"}}, {"tp_m.py": "f = 3", "tp_home.py": "1/0"})
    rows = rows_of("p", groups=[GROUP], check=True, registries=["tp_home"])
    assert rows["a"].state == "ok"
    assert "tp_home" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_check_checks_hooks_and_versions(make_dist) -> None:
    files = {"tp_m.py": "class NoHooks: ..."}
    make_dist("p", {"rollcast.hooks": {"h": "tp_m:NoHooks"}}, files)
    rows = rows_of("p", groups=["rollcast.hooks"], check=True, registries=["rollcast.contracts.hooks"])
    assert "hookimpl" in rows["h"].cause


def test_check_says_so_when_the_child_cannot_start(make_dist, monkeypatch) -> None:
    make_dist("p", {GROUP: {"a": "tp_m:f"}}, {"tp_m.py": "f = len"})
    monkeypatch.setattr("rollcast.plugins.health._BOOT", "raise SystemExit('cannot boot')")
    with pytest.raises(rollcast.errors.PluginError, match="cannot boot"):
        report(check=True, groups=[GROUP])
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(rollcast.errors.PluginError, match="executable"):
        report(check=True, groups=[GROUP])


def test_importing_the_package_is_light() -> None:
    source = str(__import__("pathlib").Path(rollcast.errors.__file__).parents[1])
    code = dedent(
        f"""
        import sys
        sys.path.insert(0, {source!r})
        import rollcast.plugins as plugins
        heavy = ("torch", "ray", "tensordict", "transformers", "stevedore", "pluggy", "cloudpickle")
        print([name for name in heavy if name in sys.modules])
        for name in plugins.__all__:
            getattr(plugins, name)
        assert set(plugins.__all__) <= set(dir(plugins))
        from rollcast.contracts import hooks
        from rollcast.plugins.health import report
        report()
        hooks.build_hook_manager
        print([name for name in heavy[:5] if name in sys.modules])
        try:
            plugins.nothing
        except AttributeError as error:
            print(error)
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == [
        "[]",
        "[]",
        "module 'rollcast.plugins' has no attribute 'nothing'; it exports Check, PluginInfo, Registry, any_of, "
        "find_registry, instance_of, is_callable, is_class, subclass_of",
    ], done.stderr
