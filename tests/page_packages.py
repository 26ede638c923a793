"""Tools for tests of the documentation's own packages: built as they stand on the page, installed and run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Collection
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
_BLOCK = re.compile(r'^```\w+ title="(?P<file>[^"]+)"\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL)
_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def titled_blocks(page: str) -> dict[str, str]:
    """The page's blocks of code by the files that their titles name."""
    return {found["file"]: found["text"] for found in _BLOCK.finditer((DOCS / page).read_text())}


class PagePackage:
    """A page's package, in a virtual environment that sees what is installed here.

    Args:
        page: below docs; its titled blocks are the files of the package.
        name: of the distribution, ``rollcast-...``.
        folder: an empty one.
        beside: files that belong beside the package, not into it.
    """

    def __init__(self, page: str, name: str, folder: Path, beside: Collection[str] = ()) -> None:
        self.folder = folder
        self.package = folder / name
        self.python = self._make_environment()
        self.add(page, name, beside)

    def add(self, page: str, name: str, beside: Collection[str] = ()) -> None:
        """Install the package of another page in the same environment."""
        package = self.folder / name
        for file, text in titled_blocks(page).items():
            path = (self.folder if file in beside else package) / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for source in (package / "src").glob("*/"):
            (source / "__init__.py").touch()
        self._install(package)

    def _make_environment(self) -> Path:
        place = self.folder / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
        here = [sysconfig.get_path("purelib"), *(entry for entry in sys.path if entry.endswith("src"))]
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        # addsitedir rather than a plain path: what is installed here may itself come by .pth files.
        lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in here)
        (place / "lib" / version / "site-packages" / "parent.pth").write_text(lines)
        return place / "bin" / "python"

    def _install(self, package: Path) -> None:
        build = ["wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(self.folder), str(package)]
        subprocess.run([*_PIP, *build], check=True, timeout=120)
        (wheel,) = self.folder.glob(f"{package.name.replace('-', '_')}-*.whl")
        install = ["--python", str(self.python), "install", "-q", "--no-deps", "--no-index", str(wheel)]
        subprocess.run([*_PIP, *install], check=True, timeout=120)

    def run(self, *arguments: str, code: int = 0, timeout: float = 240.0) -> str:
        """What Python says with these arguments, in the folder; it has to end with ``code``."""
        done = subprocess.run(
            [str(self.python), *arguments],
            cwd=self.folder,
            env={**os.environ, "COLUMNS": "300", "OMP_NUM_THREADS": "1", "RAY_ADDRESS": ""},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == code, done.stdout[-6000:] + done.stderr[-3000:]
        return done.stdout

    def rollcast(self, *arguments: str) -> str:
        """What the command says."""
        return self.run("-m", "rollcast", *arguments)

    def count_passed(self, timeout: float = 240.0) -> int:
        """Run the package's own tests, all of which have to pass, and count them."""
        tests = f"{self.package.name}/tests"
        summary = self.run("-m", "pytest", "-q", "-p", "no:cacheprovider", tests, timeout=timeout).splitlines()[-1]
        found = re.search(r"(\d+) passed", summary)
        assert found is not None, summary
        return int(found[1])
