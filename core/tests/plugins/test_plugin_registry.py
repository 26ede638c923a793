"""Registry: laziness, every error at the moment of asking, and stevedore's traps."""

from __future__ import annotations

import abc
import importlib.metadata
import json
import pickle
import sys
from pathlib import Path
from typing import Any, Protocol

import pytest

from rollcast.errors import (
    PluginConflictError,
    PluginError,
    PluginLoadError,
    PluginNotFoundError,
    PluginTypeError,
    PluginVersionError,
)
from rollcast.plugins import registry as registry_module
from rollcast.plugins.checks import any_of, instance_of, is_callable, subclass_of
from rollcast.plugins.inprocess import generation
from rollcast.plugins.registry import Registry, find_registries, find_registry

GROUP = "rollcast.testparts"


@pytest.fixture
def parts() -> Registry[Any]:
    return Registry(GROUP, is_callable(), config_key="algorithm.part")


def function(x: object) -> object:
    return x


# ------------------------------------------------------------------------------- laziness


def test_names_find_and_contains_import_nothing(make_dist, parts) -> None:
    make_dist("p", {GROUP: {"b": "tp_b:f", "a": "tp_a:f"}}, {"tp_a.py": "1/0", "tp_b.py": "1/0"})
    assert parts.names() == ("a", "b")
    assert list(parts) == ["a", "b"]
    assert len(parts) == 2
    assert "a" in parts
    assert "c" not in parts
    assert parts.find("a").value == "tp_a:f"
    assert not {"tp_a", "tp_b"} & set(sys.modules)


def test_get_imports_only_what_was_asked_for_and_only_once(make_dist, parts) -> None:
    files = {
        "tp_a.py": "import builtins\nbuiltins.tp_count = getattr(builtins, 'tp_count', 0) + 1\ndef f(): return 'a'\n",
        "tp_b.py": "raise RuntimeError('nobody asked for me')",
    }
    make_dist("p", {GROUP: {"a": "tp_a:f", "b": "tp_b:f"}}, files)
    try:
        first = parts.get("a")
        assert first() == "a"
        assert "tp_b" not in sys.modules
        del sys.modules["tp_a"]
        assert parts.get("a") is first
        assert sys.modules["builtins"].tp_count == 1  # type: ignore[attr-defined]
    finally:
        del sys.modules["builtins"].tp_count  # type: ignore[attr-defined]


def test_a_module_and_a_nested_attribute_can_be_parts(make_dist) -> None:
    source = "class Outer:\n    @staticmethod\n    def inner(): return 7\n"
    make_dist("p", {GROUP: {"m": "tp_a", "n": "tp_a:Outer.inner"}}, {"tp_a.py": source})
    anything: Registry[Any] = Registry(GROUP, lambda obj: None)
    assert anything.get("m").__name__ == "tp_a"
    assert anything.get("n")() == 7


# --------------------------------------------------------------------------------- errors


def test_not_found_says_what_was_asked_by_whom_and_what_exists(make_dist, parts) -> None:
    make_dist("some-plugin", {GROUP: {"alpha": "tp_a:f", "beta": "tp_a:g"}}, version="3.1")
    parts.register("local", function)
    with pytest.raises(PluginNotFoundError) as caught:
        parts.get("alpa")
    text = str(caught.value)
    assert "'alpa'" in text
    assert GROUP in text
    assert "algorithm.part" in text
    assert "alpha (some-plugin 3.1), beta (some-plugin 3.1), local (in-process)" in text
    assert "Did you mean 'alpha'?" in text
    with pytest.raises(PluginNotFoundError, match=r"asked for by: my\.key"):
        parts.get("alpa", requested_by="my.key")
    assert isinstance(caught.value, LookupError)
    for odd in (None, 3, ["alpha"]):
        assert odd not in parts
        with pytest.raises(PluginNotFoundError, match="no plugin"):
            parts.get(odd)  # type: ignore[arg-type]


def test_not_found_says_which_first_party_distribution_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"rollcast.rollouts": {"warpdrive": "rollcast-warpdrive"}}  # one that is certainly not installed
    monkeypatch.setattr(registry_module, "find_known", lambda group: known.get(group, {}))
    registry_module._registries.pop("rollcast.rollouts", None)  # where the contract is imported already
    rollouts: Registry[Any] = Registry("rollcast.rollouts", is_callable())
    find_registry("rollcast.rollouts")
    with pytest.raises(PluginNotFoundError, match=r"pip install rollcast-warpdrive"):
        rollouts.get("warpdrive")
    with pytest.raises(PluginNotFoundError, match=r"mean 'warpdrive'\?\n.*pip install rollcast-warpdrive"):
        rollouts.get("warpdriv")
    with pytest.raises(PluginNotFoundError) as caught:
        rollouts.get("zzz")
    assert "pip install" not in str(caught.value)


def test_a_failing_import_names_everything_and_chains_the_cause(make_dist, parts) -> None:
    make_dist(
        "bad-plugin",
        {GROUP: {"bad": "tp_bad:f"}},
        {"tp_bad.py": "raise RuntimeError('the moon is wrong')"},
        version="4.5",
    )
    with pytest.raises(PluginLoadError) as caught:
        parts.get("bad", requested_by="algorithm.adv_estimator")
    text = str(caught.value)
    for piece in ("bad-plugin 4.5", "tp_bad:f", "'bad'", GROUP, "RuntimeError: the moon is wrong"):
        assert piece in text
    assert "algorithm.adv_estimator" in text
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert isinstance(caught.value, ImportError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == text


def test_a_broken_part_that_nobody_asks_for_is_harmless(make_dist, parts) -> None:
    points = {"bad": "tp_bad:f", "good": "tp_good:f", "odd": "not a value"}
    make_dist("p", {GROUP: points}, {"tp_bad.py": "1/0", "tp_good.py": "def f(): return 1"})
    assert parts.get("good")() == 1
    assert "bad" in parts.names()


@pytest.mark.parametrize(
    ("value", "piece"),
    [
        ("tp_nowhere:f", "tp_nowhere"),
        ("tp_mod:nothing", "nothing"),
        ("tp mod:f", "not of the form"),
        ("tp_mod.py/f:g", "not of the form"),
    ],
)
def test_an_entry_point_that_leads_nowhere(make_dist, parts, value: str, piece: str) -> None:
    make_dist("p", {GROUP: {"a": value}}, {"tp_mod.py": ""})
    with pytest.raises(PluginLoadError, match=piece) as caught:
        parts.get("a")
    assert "pip install" not in str(caught.value)  # the fault is the plugin's own


@pytest.mark.parametrize(
    ("requires", "hint"),
    [
        (("tp-absent>=2.0",), "pip install 'tp-absent>=2.0'"),
        (("tp_absent>=2.0; extra == 'fast'",), r"pip install 'p\[fast\]'"),
        ((), "pip install tp_absent"),
    ],
)
def test_a_missing_third_party_module_comes_with_a_hint(make_dist, parts, requires, hint) -> None:
    source = "try:\n  import tp_absent.sub\nexcept ImportError:\n  raise ValueError"
    make_dist("p", {GROUP: {"a": "tp_mod:f"}}, {"tp_mod.py": source}, requires=requires)
    with pytest.raises(PluginLoadError, match=hint):
        parts.get("a")


def test_a_missing_submodule_of_an_installed_package_is_not_answered_with_pip(make_dist, parts) -> None:
    make_dist("p", {GROUP: {"a": "tp_mod:f"}}, {"tp_mod.py": "import json.nothing"})
    with pytest.raises(PluginLoadError, match=r"json is installed, but has no module json\.nothing"):
        parts.get("a")


def test_a_stub_without_a_spec_does_not_break_the_message(make_dist, parts, monkeypatch) -> None:
    stub = type(sys)("tp_stub")
    stub.__spec__ = None
    monkeypatch.setitem(sys.modules, "tp_stub", stub)
    make_dist("p", {GROUP: {"a": "tp_mod:f"}}, {"tp_mod.py": "import tp_stub.nothing"})
    with pytest.raises(PluginLoadError, match=r"tp_stub is installed, but has no module"):
        parts.get("a")


def test_two_distributions_with_one_name_conflict_before_any_import(make_dist, parts) -> None:
    make_dist("first", {GROUP: {"a": "tp_a:f"}}, {"tp_a.py": "1/0"}, version="1.1")
    make_dist("second", {GROUP: {"a": "tp_b:f"}}, {"tp_b.py": "1/0"}, version="2.2")
    with pytest.raises(PluginConflictError) as caught:
        parts.get("a")
    text = str(caught.value)
    assert "first 1.1 (tp_a:f)" in text
    assert "second 2.2 (tp_b:f)" in text
    assert "algorithm.part" in text
    assert not {"tp_a", "tp_b"} & set(sys.modules)
    with pytest.raises(PluginConflictError):
        parts.find("a")


def test_a_qualified_name_settles_a_conflict(make_dist, parts) -> None:
    make_dist("first", {GROUP: {"a": "tp_a:f"}}, {"tp_a.py": "def f(): return 'first'"})
    make_dist("second", {GROUP: {"a": "tp_b:f"}}, {"tp_b.py": "def f(): return 'second'"})
    with pytest.raises(PluginConflictError, match="Ask for first:a or second:a"):
        parts.get("a")
    assert parts.get("first:a")() == "first"
    assert parts.get("second:a")() == "second"
    assert "first:a" in parts
    assert "third:a" not in parts
    assert parts.names() == ("a",)
    with parts.temporarily("a", function):  # what is registered here has the plain name only
        assert parts.get("a") is function
        assert parts.get("first:a")() == "first"
    with pytest.raises(PluginNotFoundError, match=r"'frist:a'(.|\n)*Did you mean 'first:a'"):
        parts.get("frist:a")


def test_the_wrong_type_is_refused(make_dist, parts) -> None:
    make_dist("p", {GROUP: {"a": "tp_a:f"}}, {"tp_a.py": "f = 3"})
    with pytest.raises(PluginTypeError, match=r"p 1\.0 \(tp_a:f\).*object of type int"):
        parts.get("a")
    with pytest.raises(PluginTypeError, match="in-process"):
        parts.register("b", 3)
    assert "b" not in parts


@pytest.mark.parametrize(
    ("core", "requires", "fits"),
    [
        ("0.1.0", "~=0.1.0", True),
        ("0.1.9", "~=0.1.0", True),
        ("0.2.0", "~=0.1.0", False),
        ("0.0.9", "~=0.1.0", False),
        ("0.1.5rc1", "~=0.1.0", True),
        ("0.1.0.dev4", "~=0.1.0", True),
        ("0.2.0.dev1", ">=0.1,<0.2", False),
        (None, "~=9.0", True),
    ],
)
def test_the_range_of_core_versions(
    make_dist, parts, core_version, core: str | None, requires: str, fits: bool
) -> None:
    files = {"tp_a.py": "def f(): return 1"}
    make_dist("p", {GROUP: {"a": "tp_a:f"}}, files, requires=(f"rollcast{requires}",))
    core_version(core)
    if fits:
        assert parts.get("a")() == 1
        return
    with pytest.raises(PluginVersionError) as caught:
        parts.get("a")
    assert f"rollcast {core} is installed" in str(caught.value)
    assert ">=0.1" in str(caught.value) or "~=0.1.0" in str(caught.value)
    assert "p 1.0" in str(caught.value)
    assert "tp_a" not in sys.modules


# ---------------------------------------------------------------------- stevedore's traps


def test_trap_duplicates_that_are_not_adjacent(make_dist, parts) -> None:
    files = {"tp_a.py": "def f(): return 1\ndef g(): return 2"}
    text = f"[{GROUP}]\nx = tp_a:f\ny = tp_a:f\nx = tp_a:g\n"
    make_dist("p", text, files)
    with pytest.raises(PluginConflictError, match=r"entry_points\.txt is broken"):
        parts.get("x")
    assert parts.get("y")() == 1


def test_trap_the_same_line_twice_is_no_conflict(make_dist, parts) -> None:
    make_dist("p", f"[{GROUP}]\nx = tp_a:f\nx = tp_a:f\n", {"tp_a.py": "def f(): return 1"})
    assert parts.get("x")() == 1


@pytest.mark.parametrize(
    "statement",
    ["assert 1 == 2, 'sums'", "import sys; sys.exit('sums')", "raise GeneratorExit('sums')"],
)
def test_trap_errors_that_escape_an_import(make_dist, parts, caplog, statement: str) -> None:
    make_dist("p", {GROUP: {"a": "tp_a:f"}}, {"tp_a.py": statement})
    with pytest.raises(PluginLoadError, match="sums") as caught:
        parts.get("a")
    assert caught.value.__cause__ is not None
    assert not [record for record in caplog.records if record.name.startswith("stevedore")]


def test_an_interrupt_during_an_import_passes(make_dist, parts) -> None:
    make_dist("p", {GROUP: {"a": "tp_a:f"}}, {"tp_a.py": "raise KeyboardInterrupt"})
    with pytest.raises(KeyboardInterrupt):
        parts.get("a")


def test_trap_stale_caches_of_stevedore_are_never_consulted(
    make_dist, parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stevedore import ExtensionManager, NamedExtensionManager, _cache

    make_dist("p", {GROUP: {"a": "tp_new:f"}}, {"tp_new.py": "def f(): return 'new'"})
    # What an earlier run would have left on disk, with an mtime that hashes the same.
    cache = _cache.Cache(str(tmp_path / "cache"))
    cache._disable_caching = False
    digest, _ = _cache._hash_settings_for_path(tuple(sys.path))
    stale = {"groups": {GROUP: [("a", "tp_old:f", GROUP)]}, "path_values": []}
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / digest).write_text(json.dumps(stale))
    monkeypatch.setattr(_cache, "get_group_all", cache.get_group_all)
    monkeypatch.setattr(ExtensionManager, "ENTRY_POINT_CACHE", {})
    # The trap is real: stevedore by itself believes the file …
    trapped = NamedExtensionManager(GROUP, [])
    assert [point.value for point in trapped.list_entry_points()] == ["tp_old:f"]
    # … and we do not, with that file and with stevedore's table of this process in place.
    assert ExtensionManager.ENTRY_POINT_CACHE[GROUP]
    assert parts.get("a")() == "new"
    assert parts.names() == ("a",)


def test_loading_writes_no_cache(make_dist, parts, tmp_path, monkeypatch) -> None:
    from stevedore import ExtensionManager, _cache

    cache = _cache.Cache(str(tmp_path / "cache"))
    cache._disable_caching = False
    monkeypatch.setattr(_cache, "get_group_all", cache.get_group_all)
    monkeypatch.setattr(ExtensionManager, "ENTRY_POINT_CACHE", {})
    make_dist("p", {GROUP: {"a": "tp_a:f"}}, {"tp_a.py": "def f(): return 1"})
    parts.get("a")
    assert not (tmp_path / "cache").exists()
    assert ExtensionManager.ENTRY_POINT_CACHE == {}


def test_trap_a_falsy_object_is_returned_itself(make_dist) -> None:
    source = "class Empty:\n    def __len__(self): return 0\nempty = Empty()\n"
    make_dist("p", {GROUP: {"a": "tp_a:empty"}}, {"tp_a.py": source})
    anything: Registry[Any] = Registry(GROUP, lambda obj: None)
    assert type(anything.get("a")).__name__ == "Empty"
    with anything.temporarily("zero", 0):
        assert anything.get("zero") == 0


def test_stevedore_does_the_loading(make_dist, parts, monkeypatch) -> None:
    from stevedore.extension import ExtensionManager

    loaded: list[str] = []
    original = ExtensionManager._load_one_plugin

    def spy(self: Any, point: importlib.metadata.EntryPoint, *args: Any) -> Any:
        loaded.append(point.name)
        return original(self, point, *args)

    monkeypatch.setattr(ExtensionManager, "_load_one_plugin", spy)
    files = {"tp_a.py": "def f(): return 1"}
    make_dist("p", {GROUP: {"a": "tp_a:f", "b": "tp_a:f"}}, files)
    parts.get("a")
    assert loaded == ["a"]


# ----------------------------------------------------------------------------- in-process


def test_register_get_unregister_and_generation(parts) -> None:
    start = generation()
    assert parts.register("f", function) is function
    assert parts.get("f") is function
    assert parts.find("f").distribution == ""
    assert parts.find("f").value == f"{__name__}:function"
    assert generation() == start + 1
    parts.unregister("f")
    assert generation() == start + 2
    assert "f" not in parts
    with pytest.raises(PluginNotFoundError, match="'f' is not registered in-process"):
        parts.unregister("f")


def test_register_as_a_decorator(parts) -> None:
    @parts.register("deco")
    def decorated() -> int:
        return 5

    assert decorated() == 5
    assert parts.get("deco") is decorated


def test_register_does_not_silently_replace(make_dist, parts) -> None:
    make_dist("p", {GROUP: {"a": "tp_a:f"}}, {"tp_a.py": "def f(): return 'installed'"})
    with pytest.raises(PluginConflictError, match=r"p 1\.0 .*replace=True"):
        parts.register("a", function)
    assert parts.get("a")() == "installed"
    parts.register("a", function, replace=True)
    assert parts.get("a") is function
    parts.unregister("a")
    assert parts.get("a")() == "installed"

    parts.register("mine", function)
    parts.register("mine", function)  # the same object again
    with pytest.raises(PluginConflictError, match="test_plugin_registry:function"):
        parts.register("mine", lambda: None)
    parts.register("mine", len, replace=True)
    assert parts.get("mine") is len


@pytest.mark.parametrize("name", ["", None, 3, "dist:name"])
def test_register_needs_a_plain_name(parts, name: Any) -> None:
    with pytest.raises(PluginTypeError, match="needs a name without a colon"):
        parts.register(name, function)


def test_a_module_may_both_announce_and_register_a_part(make_dist, parts) -> None:
    source = (
        "from rollcast.plugins.registry import find_registry\n"
        f"@find_registry({GROUP!r}).register('a')\n"
        "def f(): return 1\n"
    )
    make_dist("p", {GROUP: {"a": "tp_a:f"}}, {"tp_a.py": source})
    assert parts.get("a")() == 1
    assert parts.find("a").distribution == "p"


def test_temporarily_restores_what_was_there(make_dist, parts) -> None:
    make_dist("p", {GROUP: {"a": "tp_a:f"}}, {"tp_a.py": "def f(): return 'installed'"})
    parts.register("mine", function)
    with pytest.raises(ValueError, match="inside"), parts.temporarily("a", len) as given:
        assert given is len
        assert parts.get("a") is len
        raise ValueError("inside")
    assert parts.get("a")() == "installed"
    with parts.temporarily("mine", len):
        assert parts.get("mine") is len
    assert parts.get("mine") is function
    with parts.temporarily("new", len):
        assert "new" in parts
    assert "new" not in parts


def test_hidden_takes_a_name_away_and_brings_it_back(make_dist, parts) -> None:
    make_dist("p", {GROUP: {"a": "tp_a:f"}}, {"tp_a.py": "def f(): return 'installed'"})
    parts.register("mine", function)
    start = generation()
    with parts.hidden("a"), parts.hidden("mine"):
        assert generation() > start
        assert parts.names() == ()
        assert "a" not in parts
        with pytest.raises(PluginNotFoundError, match="Available: nothing"):
            parts.get("mine")
    assert parts.get("a")() == "installed"
    assert parts.get("mine") is function


def test_one_registry_per_group(parts) -> None:
    assert find_registry(GROUP) is parts
    assert parts in find_registries()
    again: Registry[Any] = Registry(GROUP, is_callable())  # the same module, as in a reload
    assert find_registry(GROUP) is again
    parts.register("x", function)
    assert again.get("x") is function
    namespace = {"__name__": "some.other.module", "Registry": Registry}
    with pytest.raises(PluginConflictError, match=r"some\.other\.module.*test_plugin_registry"):
        exec(f"Registry[int]({GROUP!r}, lambda obj: None)", namespace)
    assert find_registry(GROUP) is again
    with pytest.raises(PluginNotFoundError, match=r"Did you mean 'rollcast\.trainers'\?"):
        find_registry("rollcast.trainer")


# ---------------------------------------------------------------------------- expectations


class Base(abc.ABC):
    @abc.abstractmethod
    def run(self) -> int: ...


class Good(Base):
    def run(self) -> int:
        return 1


class Half(Base):
    pass


class Shape(Protocol):
    size: int

    def area(self) -> int: ...


class Caller(Protocol):
    def __call__(self, x: int) -> int: ...


class Square:
    def __init__(self) -> None:
        self.size = 2

    def area(self) -> int:
        return 4


class CallableSquare(Square):
    def __call__(self, x: int) -> int:
        return x


@pytest.mark.parametrize(
    ("check", "obj", "complaint"),
    [
        (subclass_of(Base), Good, None),
        (subclass_of(Base), Half, "does not implement run"),
        (subclass_of(Base), Square, "the class Square, not a subclass of Base"),
        (subclass_of(Base), Good(), "object of type Good, not a subclass"),
        (subclass_of(Base), function, "the function function"),
        (subclass_of(Base), sys, "the module sys"),
        (subclass_of(Shape), Square, None),
        (subclass_of(Shape), Good, "lacks area of Shape"),
        (subclass_of(Caller), Square, "lacks __call__"),
        (subclass_of(Caller), CallableSquare, None),
        (instance_of(Base), Good(), None),
        (instance_of(Base), Good, "the class Good, not an instance of Base"),
        (instance_of(Base), 3, "type int, not an instance"),
        (instance_of(Shape), Square(), None),
        (instance_of(Shape), Good(), "lacks area, size"),
        (is_callable(), function, None),
        (is_callable(1), function, None),
        (is_callable(2), function, "takes 1 positional arguments, but is called with 2"),
        (is_callable(2), lambda *a: a, None),
        (is_callable(1), lambda *, a: a, "takes 0"),
        (is_callable(1), 3, "cannot be called"),
        (is_callable(1), lambda a, b: a, None),
        (is_callable(1, exact=True), lambda a, b=1, *, c=2: a, None),
        (
            is_callable(1, exact=True),
            lambda a, b: a,
            "requires the argument 'b', but is called with 1 positional ones alone",
        ),
        (is_callable(1, exact=True), lambda a, *, c: a, "requires the argument 'c'"),
        (is_callable(1), print, None),
        (any_of(subclass_of(Base), is_callable(1)), function, None),
        (
            any_of(subclass_of(Base), instance_of(Base)),
            3,
            "not a subclass of Base and is an object",
        ),
        (any_of(), 3, "no check"),
    ],
)
def test_expectations(check: Any, obj: object, complaint: str | None) -> None:
    found = check(obj)
    if complaint is None:
        assert found is None
    else:
        assert found is not None
        assert complaint in found


def test_all_errors_are_plugin_errors() -> None:
    for kind in (PluginLoadError, PluginNotFoundError, PluginTypeError, PluginVersionError):
        assert issubclass(kind, PluginError)
