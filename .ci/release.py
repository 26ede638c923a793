"""Write a version into every distribution and the change log, or check that a tag names the version that is there.

python .ci/release.py 0.2.0          # pyproject.toml of all distributions, CHANGELOG.md
python .ci/release.py --tag v0.2.0   # exit code 1 unless every distribution has this version
"""

from __future__ import annotations

import argparse
import datetime as dt
import re
import sys
import tomllib
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).parents[1]
#: The line of the distribution's own version, and pins of other distributions of this repository.
_OWN = re.compile(r'^version = "[^"]+"$', re.MULTILINE)
_PIN = re.compile(r"(\"rollcast(?:-[a-z]+)?(?:\[[a-z,]+\])?\s*(?:==|~=)\s*)[^\",;]+")
_UNRELEASED = re.compile(r"^## \S+ \(unreleased\)$", re.MULTILINE)


def projects(root: Path = ROOT) -> list[Path]:
    """Return every distribution's ``pyproject.toml``."""
    return [root / "core" / "pyproject.toml", *sorted(root.glob("[cp]*/rollcast-*/pyproject.toml"))]


def versions(root: Path = ROOT) -> dict[str, str]:
    """Return the version of each distribution, by name."""
    found = (tomllib.loads(path.read_text("utf-8"))["project"] for path in projects(root))
    return {project["name"]: project["version"] for project in found}


def write_version(version: str, day: dt.date, root: Path = ROOT) -> None:
    """Write the version into every ``pyproject.toml``, pins included, and date the change log's newest part.

    Raises:
        ValueError: It is no version, not above the present one, or the change log has no unreleased part.
    """
    try:
        new = Version(version)
    except InvalidVersion:
        raise ValueError(f"{version!r} is no version; write one such as 0.2.0") from None
    released = not _UNRELEASED.search((root / "CHANGELOG.md").read_text("utf-8"))
    present = max(map(Version, versions(root).values()))
    if released:
        raise ValueError("CHANGELOG.md has no part that is headed '## VERSION (unreleased)'")
    if new < present:
        raise ValueError(f"{version} is below {present}, which the distributions have")
    for path in projects(root):
        text = _OWN.sub(f'version = "{new}"', path.read_text("utf-8"), count=1)
        path.write_text(_PIN.sub(rf"\g<1>{new}", text), "utf-8")
    log = root / "CHANGELOG.md"
    log.write_text(_UNRELEASED.sub(f"## {new} ({day.isoformat()})", log.read_text("utf-8"), count=1), "utf-8")


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
    options = parser.parse_args()
    try:
        if options.version:
            write_version(options.version, dt.datetime.now(dt.UTC).date())
        if options.tag:
            check_tag(options.tag)
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
