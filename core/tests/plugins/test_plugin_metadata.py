"""What is read from metadata: owners, duplicates, ranges; and never from stale caches."""

from __future__ import annotations

import logging
import os
import runpy
import sys
from pathlib import Path

import pytest

from rollcast.plugins import discovery
from rollcast.plugins.discovery import (
    PluginInfo,
    describe_groups,
    find_claims,
    find_groups,
    find_known,
    find_plugins,
    refresh,
)

GROUP = "rollcast.testparts"


def test_a_part_carries_everything_its_distribution_says(make_dist) -> None:
    make_dist(
        "Some_Plugin",
        {GROUP: {"b": "tp_mod:attr.sub", "a": "tp_mod"}},
        version="2.3",
        requires=("rollcast[testing]~=0.1.0", "torch>=2", "rollcast-fsdp==9"),
    )
    assert find_plugins(GROUP) == (
        PluginInfo(GROUP, "a", "tp_mod", "some-plugin", "2.3", "~=0.1.0"),
        PluginInfo(GROUP, "b", "tp_mod:attr.sub", "some-plugin", "2.3", "~=0.1.0"),
    )
    part = find_plugins(GROUP)[1]
    assert (part.module, part.owner) == ("tp_mod", "some-plugin 2.3")
    assert GROUP in find_groups()
    assert "tp_mod" not in sys.modules


@pytest.mark.parametrize(
    ("requires", "expected"),
    [
        ((), None),
        (("rollcast",), None),
        (("rollcast>=0.1; extra == 'all'",), None),
        (("rollcast>=0.1; python_version < '3'", "rollcast<0.5"), "<0.5"),
        (("Rollcast>=0.1", "rollcast!=0.1.5"), ">=0.1,!=0.1.5"),
        (("rollcast-data>=7",), None),
    ],
)
def test_the_range_of_the_core(make_dist, requires: tuple[str, ...], expected: str | None) -> None:
    make_dist("p", {GROUP: {"a": "tp_mod:a"}}, requires=requires)
    assert find_plugins(GROUP)[0].requires_core == expected


def test_the_first_copy_on_the_path_wins_silently(make_dist) -> None:
    make_dist("my.plugin", {GROUP: {"a": "tp_old:a", "gone": "tp_old:g"}}, version="1.0")
    make_dist("my_plugin", {GROUP: {"a": "tp_new:a"}}, version="2.0")  # first on the path
    assert [(p.name, p.value, p.version) for p in find_plugins(GROUP)] == [("a", "tp_new:a", "2.0")]


def test_a_first_copy_without_parts_hides_a_later_one_that_has_some(make_dist) -> None:
    make_dist("p", {GROUP: {"a": "tp_old:a"}}, version="1.0")
    make_dist("p", {"other": {"x": "y"}}, version="2.0")
    assert find_plugins(GROUP) == ()


def test_the_same_folder_twice_on_the_path_is_one_distribution(make_dist, monkeypatch) -> None:
    site = make_dist("p", {GROUP: {"a": "tp_mod:a"}})
    monkeypatch.syspath_prepend(str(site) + os.sep)
    assert len(find_claims(GROUP, "a")) == 1


def test_two_distributions_with_one_name_are_both_claims(make_dist) -> None:
    make_dist("p", {GROUP: {"a": "tp_mod:a"}})
    make_dist("q", {GROUP: {"a": "tp_mod:a"}})
    assert [part.distribution for part in find_claims(GROUP, "a")] == ["q", "p"]


def test_an_edited_file_is_seen_after_refresh_even_with_the_same_time(make_dist) -> None:
    site = make_dist("p", {GROUP: {"old": "tp_mod:a"}})
    assert [part.name for part in find_plugins(GROUP)] == ["old"]
    path = next(site.glob("*.dist-info")) / "entry_points.txt"
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    path.write_text(f"[{GROUP}]\nnew = tp_mod:a\n")
    os.utime(path, ns=times)
    refresh()
    assert [part.name for part in find_plugins(GROUP)] == ["new"]


def test_a_new_entry_of_sys_path_needs_no_refresh(make_dist, monkeypatch, tmp_path) -> None:
    site = make_dist("p", {GROUP: {"a": "tp_mod:a"}})
    assert find_plugins(GROUP)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(site)])
    assert find_plugins(GROUP) == ()


def test_malformed_neighbours_are_skipped_with_a_warning(make_dist, caplog) -> None:
    make_dist("good", {GROUP: {"a": "tp_mod:a"}}, requires=("rollcast ~~ nonsense",))
    make_dist("bad", f"[{GROUP}]\nthis line means nothing\n")
    nameless = make_dist("nameless", {GROUP: {"n": "tp_mod:n"}})
    (next(nameless.glob("*.dist-info")) / "METADATA").write_text("Metadata-Version: 2.1\n")
    binary = make_dist("binary", "")
    (next(binary.glob("*.dist-info")) / "entry_points.txt").write_bytes(b"\xff\xfe\xff rollcast")
    refresh()
    with caplog.at_level(logging.WARNING, logger="rollcast.plugins"):
        assert [part.name for part in find_plugins(GROUP)] == ["a"]
    text = caplog.text
    assert "bad" in text
    assert "without a name" in text
    assert "unreadable" in text
    assert "nonsense" in text


def test_reading_is_cached(make_dist, monkeypatch) -> None:
    make_dist("p", {GROUP: {"a": "tp_mod:a"}})
    first = find_plugins(GROUP)
    monkeypatch.setattr("importlib.metadata.distributions", lambda: pytest.fail("read again"))
    assert find_plugins(GROUP) == first
    refresh()
    with pytest.raises(pytest.fail.Exception, match="read again"):
        find_plugins(GROUP)


def test_the_index_is_what_the_repository_says() -> None:
    root = Path(__file__).resolve().parents[3]
    script = root / ".ci/index.py"
    if not script.is_file():
        pytest.skip("not in the repository")
    index = runpy.run_path(str(script))
    shipped = Path(discovery.__file__).with_name("known.json").read_text()
    assert shipped == index["build"](), "the index is stale: nox -s index"


def test_the_index_names_the_registries_and_their_descriptions() -> None:
    from rollcast.contracts.engine import engines

    assert describe_groups()[engines.group] == engines.description != ""
    assert find_known("rollcast.engines")["fsdp"] == "rollcast-fsdp"
    assert find_known("rollcast.nothing") == {}


def test_a_qualified_name_picks_a_distribution(make_dist) -> None:
    make_dist("Some.Plugin", {GROUP: {"a": "tp_mod:a"}})
    make_dist("q", {GROUP: {"a": "tp_mod:a"}})
    assert [plugin.distribution for plugin in find_claims(GROUP, "some_plugin:a")] == ["some-plugin"]
    assert [plugin.distribution for plugin in find_claims(GROUP, "q:a")] == ["q"]
    assert find_claims(GROUP, "r:a") == find_claims(GROUP, "q:b") == ()
