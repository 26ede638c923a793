"""Print the names of the sessions that did not succeed, from the file that ``nox --report`` wrote."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def failed_sessions(report: str) -> list[str]:
    """Return the names of the sessions that failed or were aborted, in the order of the report.

    Args:
        report: text of the report; empty if nox ended before it wrote one.
    """
    if not report.strip():
        return ["nox itself"]
    return [each["name"] for each in json.loads(report)["sessions"] if each["result"] not in {"success", "skipped"}]


if __name__ == "__main__":
    sys.stdout.write(" ".join(failed_sessions(Path(sys.argv[1]).read_text())) + "\n")
