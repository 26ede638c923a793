"""``report``: what it can tell without importing, and what only an import tells."""

from __future__ import annotations

import subprocess
import sys
import time
from textwrap import dedent
from typing import Any

import pytest

import rollcast.errors
from rollcast.plugins.diagnose import Diagnosis
from rollcast.plugins.metadata import PartInfo
from rollcast.plugins.registry import Registry, is_callable
from rollcast.plugins.reporting import PartReport, report
from rollcast.plugins.toplevel import read_top_level

GROUP = "rollcast.planners"


def rows_of(distribution: str, **kwargs: Any) -> dict[str, PartReport]:
    return {row.name: row for row in report(**kwargs) if row.distribution == distribution}


def diagnose(make_dist: Any, value: str, files: dict[str, str]) -> str | None:
    make_dist("p", {GROUP: {"a": value}}, files)
    part = PartInfo(GROUP, "a", value, "p", "1.0")
    return Diagnosis([part]).find_cause(part)


# --------------------------------------------------------------------------------- static

BROKEN = {
    "no module": ("tp_nowhere:f", {}, "no module 'tp_nowhere'"),
    "no submodule": ("tp_p.sub:f", {"tp_p/__init__.py": ""}, "no module 'tp_p.sub'"),
    "no attribute": ("tp_m:f", {"tp_m.py": "def g(): ..."}, "does not define 'f'"),
    "no such class": ("tp_m:C.f", {"tp_m.py": "D = 1"}, "does not define 'C'"),
    "only declared": ("tp_m:f", {"tp_m.py": "f: int"}, "does not define 'f'"),
    "deleted": ("tp_m:f", {"tp_m.py": "f = 1\ndel f"}, "does not define 'f'"),
    "only for type checkers": (
        "tp_m:f",
        {"tp_m.py": "import typing\nif typing.TYPE_CHECKING:\n    from os import getcwd as f"},
        "does not define 'f'",
    ),
    "namespace package": ("tp_ns:f", {"tp_ns/sub.py": "f = 1"}, "does not define 'f'"),
    "syntax": ("tp_m:f", {"tp_m.py": "x = 1\ndef f(:"}, "line 2: SyntaxError"),
    "syntax in the parent": (
        "tp_p.m:f",
        {"tp_p/__init__.py": "def", "tp_p/m.py": "f = 1"},
        "SyntaxError",
    ),
    "raise": ("tp_m:f", {"tp_m.py": "raise RuntimeError('not here')\nf = 1"}, "not here"),
    "exit": ("tp_m:f", {"tp_m.py": "import sys\nsys.exit(3)\nf = 1"}, "sys.exit(3)"),
    "assertion": ("tp_m:f", {"tp_m.py": "assert False\nf = 1"}, "line 1: its assertion"),
    "missing package": (
        "tp_m:f",
        {"tp_m.py": "import os\nimport tp_absent.sub as x\nf = 1"},
        "line 2: it imports 'tp_absent.sub', but 'tp_absent' is not installed. Try: pip install",
    ),
    "missing package, from": (
        "tp_m:f",
        {"tp_m.py": "from tp_absent import x\nf = 1"},
        "'tp_absent' is not installed",
    ),
    "missing package in the parent": (
        "tp_p.m:f",
        {"tp_p/__init__.py": "import tp_absent", "tp_p/m.py": "f = 1"},
        "'tp_absent' is not installed",
    ),
    "missing package two imports away": (
        "tp_p.m:f",
        {
            "tp_p/__init__.py": "",
            "tp_p/m.py": "from .a import x as f",
            "tp_p/a.py": "from tp_p import b\nx = 1",
            "tp_p/b.py": "import tp_absent",
        },
        "b.py, line 1: it imports 'tp_absent'",
    ),
    "import of a name that is not there": (
        "tp_p.m:f",
        {"tp_p/__init__.py": "", "tp_p/m.py": "from .a import y as f", "tp_p/a.py": "x = 1"},
        "'y' from 'tp_p.a', which does not define it",
    ),
    "import of a module that is not there": (
        "tp_p.m:f",
        {"tp_p/__init__.py": "", "tp_p/m.py": "from .a import f"},
        "there is no module 'tp_p.a'",
    ),
    "relative import beyond the top": (
        "tp_m:f",
        {"tp_m.py": "from .. import x as f"},
        "leaves its top-level package",
    ),
    "try that does not catch it": (
        "tp_m:f",
        {"tp_m.py": "try:\n    import tp_absent\nexcept ValueError:\n    pass\nf = 1"},
        "tp_absent",
    ),
    "try that raises again": (
        "tp_m:f",
        {"tp_m.py": "try:\n  import tp_absent\nexcept ImportError:\n  raise ValueError('x')\nf=1"},
        "tp_absent",
    ),
    "finally": (
        "tp_m:f",
        {"tp_m.py": "try:\n    x = 1\nfinally:\n    import tp_absent\nf = 1"},
        "tp_absent",
    ),
    "warnings caught": (
        "tp_m:f",
        {"tp_m.py": "import warnings\nwith warnings.catch_warnings():\n  import tp_absent\nf=1"},
        "tp_absent",
    ),
    "not a value": ("no good", {}, "not of the form"),
}

FINE = {
    "function": ("tp_m:f", "def f(): ..."),
    "async function": ("tp_m:f", "async def f(): ..."),
    "class attribute": ("tp_m:f.g", "class f:\n    g = 1"),
    "tuple": ("tp_m:f", "(f, g), *h = (1, 2), 3"),
    "annotated": ("tp_m:f", "f: int = 1"),
    "imported": ("tp_m:f", "from os import getcwd as f"),
    "imported module": ("tp_m:os", "import os.path"),
    "star": ("tp_m:getcwd", "from os import *"),
    "module getattr": ("tp_m:f", "def __getattr__(name): return 1"),
    "globals": ("tp_m:f", "globals()['f'] = 1"),
    "globals in a function": ("tp_m:f", "def g():\n    globals()['f'] = 1\ng()"),
    "global statement": ("tp_m:f", "def g():\n    global f\n    f = 1\ng()"),
    "if": ("tp_m:f", "import os\nif os.name == 'x':\n    f = 1\nelse:\n    f = 2"),
    "try": ("tp_m:f", "try:\n    import tp_absent as f\nexcept ImportError:\n    f = None"),
    "bare except": ("tp_m:f", "try:\n    import tp_absent\nexcept:\n    pass\nf = 1"),
    "tuple except": (
        "tp_m:f",
        "try:\n    import tp_absent\nexcept (KeyError, ModuleNotFoundError):\n    pass\nf = 1",
    ),
    "else of try": (
        "tp_m:f",
        "try:\n    import tp_absent\nexcept ImportError:\n    f = 1\nelse:\n    import tp_absent.x",
    ),
    "with": ("tp_m:f", "import io\nwith io.StringIO() as f: pass"),
    "suppress": (
        "tp_m:f",
        "import contextlib\nwith contextlib.suppress(ImportError):\n    import tp_absent\nf = 1",
    ),
    "for": ("tp_m:f", "for f in (1, 2):\n    pass"),
    "while": ("tp_m:f", "while True:\n    f = 1\n    break"),
    "walrus": ("tp_m:f", "if (f := 1):\n    pass"),
    "match": ("tp_m:f", "match [1, 2]:\n    case [_, *f]:\n        pass"),
    "type checking": (
        "tp_m:f",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import tp_absent\nf = 1",
    ),
    "import in a function": ("tp_m:f", "def f():\n    import tp_absent"),
    "conditional raise": ("tp_m:f", "import sys\nif not sys.path:\n    raise OSError\nf = 1"),
    "caught raise": ("tp_m:f", "try:\n    raise ValueError\nexcept ValueError:\n    f = 1"),
    "standard library": ("tp_m:f", "import xml.dom.minidom, __future__, sys\nf = 1"),
    "true assertion": ("tp_m:f", "assert True\nf = 1"),
    "the module itself": ("tp_m", "x = 1"),
    "dunder": ("tp_m:__doc__", "'doc'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_static_diagnosis_finds(make_dist, case: str) -> None:
    value, files, piece = BROKEN[case]
    cause = diagnose(make_dist, value, files)
    assert cause is not None
    assert piece in cause


@pytest.mark.parametrize("case", BROKEN)
def test_what_static_diagnosis_finds_really_fails(make_dist, case: str) -> None:
    value, files, _ = BROKEN[case]
    make_dist("p", {"rollcast.testparts": {"a": value}}, files)
    registry: Registry[Any] = Registry("rollcast.testparts", lambda obj: None)
    with pytest.raises(rollcast.errors.PluginLoadError):
        registry.get("a")


@pytest.mark.parametrize("case", FINE)
def test_static_diagnosis_has_no_false_alarm(make_dist, case: str) -> None:
    value, source = FINE[case]
    assert diagnose(make_dist, value, {"tp_m.py": source}) is None
    assert "tp_m" not in sys.modules
    registry: Registry[Any] = Registry("rollcast.testparts", lambda obj: None)
    make_dist("q", {"rollcast.testparts": {"a": value}})
    registry.get("a")  # and it really loads


def test_static_diagnosis_accepts_packages_of_many_kinds(make_dist) -> None:
    files = {
        "tp_p/__init__.py": "from . import sub\nfrom .sub import deep",
        "tp_p/sub/__init__.py": "from .. import other\nfrom .deep import f as f",
        "tp_p/sub/deep.py": "from ..other import g\nf = g",
        "tp_p/other.py": "from tp_p import sub\ng = 1",  # a circle that Python can walk
        "tp_path/__init__.py": "__path__ = ['elsewhere']",
        "tp_conf/a.yaml": "",
    }
    assert diagnose(make_dist, "tp_p.sub.deep:f", files) is None
    assert diagnose(make_dist, "tp_p:sub.deep", {}) is None
    assert diagnose(make_dist, "tp_path.unknown:f", {}) is None
    assert diagnose(make_dist, "tp_conf", {}) is None
    assert diagnose(make_dist, "math:sqrt", {}) is None
    assert diagnose(make_dist, "json.decoder:JSONDecoder", {}) is None


def test_an_import_of_a_sibling_package_is_followed(make_dist) -> None:
    files = {"tp_one.py": "from tp_two import f", "tp_two.py": "import tp_absent\nf = 1"}
    make_dist("p", {GROUP: {"a": "tp_one:f", "b": "tp_two:f"}}, files)
    rows = rows_of("p")
    assert "tp_two.py, line 1" in rows["a"].cause


def test_an_editable_install_by_a_pth_entry_is_followed(make_dist, tmp_path, monkeypatch) -> None:
    make_dist("p", {GROUP: {"a": "tp_edit.m:f", "b": "tp_edit.m:g"}})
    (tmp_path / "work/src/tp_edit").mkdir(parents=True)
    (tmp_path / "work/src/tp_edit/m.py").write_text("f = 1")
    monkeypatch.syspath_prepend(str(tmp_path / "work/src"))
    rows = rows_of("p")
    assert rows["a"].state == "ok"
    assert rows["b"].state == "broken"


def test_report_tells_every_state(make_dist, core_version, monkeypatch) -> None:
    monkeypatch.setattr("rollcast.plugins.loader.find_core_version", lambda: "0.1.0")
    code = {"tp_m.py": "def f(): ..."}
    make_dist("fine", {GROUP: {"ok": "tp_m:f", "twice": "tp_m:f"}}, code, version="1.1")
    make_dist("other", {GROUP: {"bad": "tp_m:nothing", "twice": "tp_m:f"}})
    make_dist("newer", {GROUP: {"new": "tp_m:f"}}, requires=("rollcast>=5",))
    make_dist("typo", {"rollcast.planer": {"x": "tp_m:f"}})
    planners: Registry[Any] = _declare(GROUP)
    planners.register("mine", len)
    rows = [row for row in report() if row.group in (GROUP, "rollcast.planer")]
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
    assert "did its author mean 'rollcast.planners'" in by_name["x"].cause
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


def test_config_packages_are_looked_for_but_never_imported(make_dist) -> None:
    files = {"tp_c/__init__.py": "", "tp_c/conf/a.yaml": "x: 1"}
    make_dist("c", {"rollcast.configs": {"good": "tp_c.conf", "bad": "tp_c.gone"}}, files)
    for check in (False, True):
        rows = rows_of("c", check=check, groups=["rollcast.configs"])
        assert rows["good"].state == "ok"
        assert rows["bad"].state == "broken"


def test_top_level_of_an_unreadable_source() -> None:
    with pytest.raises((SyntaxError, ValueError)):
        read_top_level(b"x = 1\0", "x.py")


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
    assert not [name for name in sys.modules if name.startswith("tp_")]


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
    rows = rows_of("p", groups=[GROUP], check=True, registries=[])
    assert time.perf_counter() - begin < 30
    assert "exit status 3" in rows["a_fork"].cause
    assert "cut the process off" in rows["b_close"].cause
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
    assert "hookimpl" in rows_of("p", groups=["rollcast.hooks"], check=True)["h"].cause


def test_check_says_so_when_the_child_cannot_start(make_dist, monkeypatch) -> None:
    make_dist("p", {GROUP: {"a": "tp_m:f"}}, {"tp_m.py": "f = len"})
    monkeypatch.setattr("rollcast.plugins.check._BOOT", "raise SystemExit('cannot boot')")
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
        plugins.report()
        plugins.build_hook_manager
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
        "module 'rollcast.plugins' has no attribute 'nothing'",
    ], done.stderr
