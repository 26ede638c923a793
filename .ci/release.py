"""Write a version into every distribution and the change log, or check what a release is made of.

python .ci/release.py 0.2.0          # pyproject.toml of all distributions; CHANGELOG.md from the files in changes/
python .ci/release.py --tag v0.2.0   # exit code 1 unless every distribution has this version
python .ci/release.py --fragments    # exit code 1 unless the files in changes/ are well-formed
"""

from __future__ import annotations

import argparse
import datetime as dt
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).parents[1]
#: The line of the distribution's own version, and pins of other distributions of this repository.
_OWN = re.compile(r'^version = "[^"]+"$', re.MULTILINE)
_PIN = re.compile(r"(\"rollcast(?:-[a-z]+)?(?:\[[a-z,]+\])?\s*(?:==|~=)\s*)[^\",;]+")
#: A list item or a heading at the start of a fragment, or a heading anywhere, which would end its section.
_MISPLACED = re.compile(r"\A\s*(?:[-*+#]|\Z)|^#+ ", re.MULTILINE)


def projects(root: Path = ROOT) -> list[Path]:
    """Return every distribution's ``pyproject.toml``."""
    return [root / "core" / "pyproject.toml", *sorted(root.glob("[cp]*/rollcast-*/pyproject.toml"))]


def versions(root: Path = ROOT) -> dict[str, str]:
    """Return the version of each distribution, by name."""
    found = (tomllib.loads(path.read_text("utf-8"))["project"] for path in projects(root))
    return {project["name"]: project["version"] for project in found}


def fragments(root: Path = ROOT) -> list[Path]:
    """Return the files whose text the next release adds to the change log."""
    return sorted(path for path in (root / "changes").iterdir() if path.name != "README.md")


def write_version(version: str, day: dt.date, root: Path = ROOT) -> None:
    """Write the version into every ``pyproject.toml``, pins included, and move the fragments into the change log.

    Raises:
        ValueError: the version is invalid or below the present one, there is no fragment, or one is not well-formed.
    """
    try:
        new = Version(version)
    except InvalidVersion:
        raise ValueError(f"{version!r} is no version; write one such as 0.2.0") from None
    present = max(map(Version, versions(root).values()))
    if new < present:
        raise ValueError(f"{version} is below {present}, which the distributions have")
    if not fragments(root):
        raise ValueError("changes/ has no fragment, so the change log would have an empty part; see changes/README.md")
    check_fragments(root)
    _run_towncrier(root, "--yes", "--version", str(new), "--date", day.isoformat())
    for path in projects(root):
        text = _OWN.sub(f'version = "{new}"', path.read_text("utf-8"), count=1)
        path.write_text(_PIN.sub(rf"\g<1>{new}", text), "utf-8")


def check_fragments(root: Path = ROOT) -> None:
    """Check that each fragment has a known type and holds sentences without a bullet of its own.

    Raises:
        ValueError: a fragment is not well-formed; says which, and what is wrong.
    """
    _run_towncrier(root, "--draft", "--version", "next")
    for path in fragments(root):
        if path.suffix != ".md" or _MISPLACED.search(path.read_text("utf-8")):
            raise ValueError(
                f"changes/{path.name} is not well-formed: its name ends with .md, and it starts with a sentence, not "
                "with a bullet, and has no heading; see changes/README.md"
            )


def _run_towncrier(root: Path, *options: str) -> None:
    command = [sys.executable, "-m", "towncrier", "build", "--dir", str(root), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"towncrier says: {(done.stderr or done.stdout).strip()}")


def check_tag(tag: str, root: Path = ROOT) -> None:
    """Check that the tag is ``v`` and the version of every distribution.

    Raises:
        ValueError: It is not; says which distributions differ.
    """
    others = [f"{name} {version}" for name, version in versions(root).items() if f"v{version}" != tag]
    if others:
        raise ValueError(f"the tag is {tag}, but the repository has {', '.join(others)}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", nargs="?")
    parser.add_argument("--tag")
    parser.add_argument("--fragments", action="store_true")
    options = parser.parse_args()
    try:
        if options.version:
            write_version(options.version, dt.datetime.now(dt.UTC).date())
        if options.tag:
            check_tag(options.tag)
        if options.fragments:
            check_fragments()
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
