"""The controller's data plane against verl's, each in its own environment with the same Ray, torch and tensordict.

The sides take turns, so that whatever slows the machine down for a while slows both.
Both start a Ray of their own as they do by default.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from _report import Comparison, write_report
from _side import Side, peer_version

HERE = Path(__file__).parent
#: Of each action: calls in a block.
_CALLS = {"nothing": 40, "small": 6, "echo": 6}
_BLOCKS = 3
_WARM_UP = 2


def medians(ours: Side, other: Side, action: str) -> tuple[float, float]:
    """Seconds of the action on either side; the sides take turns in blocks, of which the first calls do not count."""
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(_BLOCKS):
        for side, seconds in zip((ours, other), found, strict=True):
            seconds += [side.run(action) for _ in range(_WARM_UP + _CALLS[action])][_WARM_UP:]
    return statistics.median(found[0]), statistics.median(found[1])


def measure(ours: Side, other: Side, spawns: int) -> list[Comparison]:
    """All comparisons; times in milliseconds."""
    started: list[tuple[float, float]] = []
    with_rows: list[tuple[float, float]] = []
    for number in range(spawns):
        first = [(side.run("spawn"), side.run("first")) for side in (ours, other)]
        started.append((first[0][0], first[1][0]))
        with_rows.append((sum(first[0]), sum(first[1])))
        if number < spawns - 1:
            for side in (ours, other):
                side.run("shutdown")
    found = {
        "spawn of 4 workers to the first answer (ms)": (
            [statistics.median(x) for x in zip(*started, strict=True)],
            0.5,
        ),
        "spawn of 4 workers to the first rows back (ms)": (
            [statistics.median(x) for x in zip(*with_rows, strict=True)],
            0.5,
        ),
    }
    for action, goal, name in (
        ("small", 0.25, "117 MB to 4 workers, a small column back (ms)"),
        ("echo", 0.25, "117 MB to 4 workers and back whole (ms)"),
        ("nothing", 1.15, "an empty call on 4 workers (ms)"),
    ):
        found[name] = (list(medians(ours, other, action)), goal)
    return [Comparison(name, a * 1e3, b * 1e3, at_most=goal) for name, ((a, b), goal) in found.items()]


def main() -> None:
    """Run both sides and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verl-python", required=True, help="the Python of an environment with verl")
    parser.add_argument("--spawns", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/verl.json"))
    options = parser.parse_args()
    version = peer_version(options.verl_python, "verl")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        sides = []
        try:
            for python, script in ((sys.executable, "side_rollcast.py"), (options.verl_python, "side_verl.py")):
                sides.append(Side([python, str(HERE / script)], Path(folder) / f"{script}.log"))
            comparisons = measure(sides[0], sides[1], options.spawns)
        finally:
            for side in sides:
                side.close()
    notes = [f"medians; load of the machine before: {load:.1f} on {os.cpu_count()} cores"]
    write_report(f"rollcast against verl {version}", comparisons, notes, options.output)


if __name__ == "__main__":
    main()
