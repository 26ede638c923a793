"""Copy every distribution to a folder for its release, with a README whose links work on a package index.

python .ci/package_pages.py FOLDER [--repository https://github.com/OWNER/NAME]

A relative link of a README becomes a link to the file in the repository at the version's tag, and the repository is
added as a project URL. Without --repository, the address is that of the running workflow, or of git's remote `origin`;
without either, links become plain text.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from release import ROOT, projects, versions

#: A link or picture whose target is neither absolute nor on the same page: its text, its target, its fragment.
_RELATIVE = re.compile(r"!?\[([^\]]*)\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def find_repository() -> str | None:
    """Return the address of the repository's page; None if neither the environment nor git knows one."""
    if name := os.environ.get("GITHUB_REPOSITORY"):
        return f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{name}"
    git = shutil.which("git")
    if git is None:
        return None
    command = [git, "-C", str(ROOT), "remote", "get-url", "origin"]
    remote = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return remote.removesuffix(".git") if remote.startswith("https://") else None


def link_absolutely(readme: Path, base: str | None) -> str:
    """Return a README's text with its relative links pointing below ``base``; as plain text if that is None.

    Raises:
        ValueError: the target of a link does not exist.
    """

    def replace(found: re.Match[str]) -> str:
        text, target, fragment = found[1], found[2], found[3] or ""
        path = (readme.parent / target).resolve()
        if not path.exists():
            raise ValueError(f"{readme.relative_to(ROOT)} links to {target}, which does not exist")
        return f"[{text}]({base}/{path.relative_to(ROOT)}{fragment})" if base else text

    return _RELATIVE.sub(replace, readme.read_text("utf-8"))


def copy(folder: Path, target: Path, repository: str | None, version: str) -> None:
    """Copy what a distribution is built from."""
    shutil.copytree(folder / "src", target / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(folder / "LICENSE", target)
    base = f"{repository}/blob/v{version}" if repository else None
    (target / "README.md").write_text(link_absolutely(folder / "README.md", base), "utf-8")
    project = (folder / "pyproject.toml").read_text("utf-8")
    if repository:
        project += f'\n[project.urls]\nRepository = "{repository}"\nChangelog = "{base}/CHANGELOG.md"\n'
    (target / "pyproject.toml").write_text(project, "utf-8")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repository")
    options = parser.parse_args()
    repository = options.repository or find_repository()
    version = versions()["rollcast"]
    try:
        for path in projects():
            copy(path.parent, options.folder / path.parent.name, repository, version)
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
