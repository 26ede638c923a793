"""Throwaway distributions on ``sys.path``."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import dedent

import pytest

from rollcast.plugins import discovery

MakeDist = Callable[..., Path]


@pytest.fixture
def make_dist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeDist:
    """Build an installed distribution in a folder of its own, first on ``sys.path``.

    ``points`` is group → name → value; ``files`` is path → source.
    """
    counter = itertools.count()

    def make(
        name: str,
        points: Mapping[str, Mapping[str, str]] | str,
        files: Mapping[str, str] | None = None,
        version: str = "1.0",
        requires: tuple[str, ...] = (),
        folder: Path | None = None,
    ) -> Path:
        site = folder or tmp_path / f"site{next(counter)}"
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {each}" for each in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        if not isinstance(points, str):
            sections = [
                f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in parts.items())
                for group, parts in points.items()
            ]
            points = "\n".join(sections)
        (info / "entry_points.txt").write_text(points)
        for path, source in (files or {}).items():
            target = site / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(dedent(source))
        if str(site) not in sys.path:
            monkeypatch.syspath_prepend(str(site))
        discovery.refresh()
        return site

    return make
