"""Print which share of each distribution's source lines was run, from the combined data of coverage.py.

python .ci/coverage_table.py           # the table, and the files with the most lines that were not run
python .ci/coverage_table.py --write   # the table into docs/coverage.md
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from coverage import Coverage

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "coverage.md"
_SENTENCES = re.compile(r"(?<=## Figures\n\n).*?(?=<!-- table -->)", re.DOTALL)
_TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end of table -->)", re.DOTALL)


@dataclass
class Lines:
    """Counts of a file's or a distribution's lines that hold a statement."""

    all: int = 0
    run: int = 0

    @property
    def share(self) -> str:
        return f"{100 * self.run / max(1, self.all):.1f} %"


def count_lines() -> dict[Path, Lines]:
    """Return the counts of each source file, by its path from the repository's root."""
    measured = Coverage()
    measured.load()
    found = {}
    for path in sorted({*ROOT.glob("core/src/**/*.py"), *ROOT.glob("*/*/src/**/*.py"), *ROOT.glob("contrib/*/*.py")}):
        if "templates" in path.parts or "tests" in path.parts:
            continue
        _, statements, _, missing, _ = measured.analysis2(str(path))
        found[path.relative_to(ROOT)] = Lines(len(statements), len(statements) - len(missing))
    return found


def by_distribution(files: dict[Path, Lines]) -> dict[str, Lines]:
    """Return the sums over each distribution's files, by its name."""
    found: dict[str, Lines] = defaultdict(Lines)
    for path, lines in files.items():
        name = "rollcast" if path.parts[0] == "core" else path.parts[1]
        found[name].all += lines.all
        found[name].run += lines.run
    return found


def build_table(distributions: dict[str, Lines]) -> str:
    """Return the table in Markdown, with the sum in its last row."""
    whole = Lines(sum(each.all for each in distributions.values()), sum(each.run for each in distributions.values()))
    text = io.StringIO()
    text.write("| distribution | lines | run |\n|---|--:|--:|\n")
    for name, lines in [*sorted(distributions.items()), ("**all**", whole)]:
        text.write(f"| {name} | {lines.all:,} | {lines.share} |\n")
    return text.getvalue()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    files = count_lines()
    table = build_table(by_distribution(files))
    sys.stdout.write(f"{table}\n")
    least = sorted(files.items(), key=lambda each: each[1].run - each[1].all)[:30]
    sys.stdout.writelines(f"{lines.all - lines.run:5} not run, {lines.share:>7} run: {path}\n" for path, lines in least)
    if options.write:
        page = _SENTENCES.sub(
            "The share of each distribution's lines that all tests together run.\n\n", PAGE.read_text("utf-8")
        )
        PAGE.write_text(_TABLE.sub(lambda _: table, page), "utf-8")


if __name__ == "__main__":
    main()
