"""The algorithms against verl's functions of the same names: the same numbers, and how long they take.

Both sides get the same random batches, and the differences of all that they compute are taken here. The
deliberate differences, which the batches avoid, are in docs/algorithms.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch
from _algorithm_cases import draw_case
from _report import Comparison, write_report
from _side import Side, peer_version

HERE = Path(__file__).parent
TIMED = ("grpo", "rloo", "reinforce_plus_plus_baseline", "opo")
#: What the largest difference must stay under.
_DIFFERENCE = 1e-5
_OUR_CALLS, _THEIR_CALLS, _WARM_UP = 15, 5, 2


def largest_differences(ours: Path, theirs: Path) -> dict[str, float]:
    """Of each function, over all cases and outputs; a number on one side and none on the other is infinite."""
    mine, other = torch.load(ours), torch.load(theirs)
    if mine.keys() != other.keys():
        raise RuntimeError(f"only one side has {', '.join(sorted(mine.keys() ^ other.keys()))}")
    found: dict[str, float] = {}
    for name, cases in mine.items():
        largest = 0.0
        for one, another in zip(cases, other[name], strict=True):
            if one.keys() != another.keys():
                raise RuntimeError(f"{name}: {sorted(one)} on our side, {sorted(another)} on the other")
            for key, value in one.items():
                gap = (value.double() - another[key].double()).abs().nan_to_num(float("inf"), float("inf"))
                largest = max(largest, float(gap.max()) if gap.numel() else 0.0)
        found[name] = largest
    return found


def seconds(side: Side, action: str, calls: int) -> float:
    """The best of some calls, so that other processes of the machine count as little as they can."""
    return min([side.run(action) for _ in range(_WARM_UP + calls)][_WARM_UP:])


def speed(ours: Side, other: Side) -> tuple[list[Comparison], list[str]]:
    """Milliseconds at 8192 x 2048 against verl's, and against one pass over as many bytes."""
    once = seconds(ours, "pass", _OUR_CALLS)
    comparisons = []
    for name in TIMED:
        mine, theirs = seconds(ours, name, _OUR_CALLS), seconds(other, name, _THEIR_CALLS)
        comparisons.append(Comparison(f"{name} at 8192 x 2048 (ms)", mine * 1e3, theirs * 1e3, at_most=0.1))
        comparisons.append(Comparison(f"{name}, other: one pass (ms)", mine * 1e3, once * 1e3, at_most=5))
    notes = [
        f"verl's {name}: {seconds(other, name, _THEIR_CALLS) * 1e3:.0f} ms"
        for name in ("grpo_vectorized", "rloo_vectorized")
    ]
    notes.append("times are the best of some; a pass reads the rewards and writes a new tensor of their size")
    return comparisons, notes


def main() -> None:
    """Run both sides and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verl-python", required=True, help="the Python of an environment with verl")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/verl_algorithms.json"))
    options = parser.parse_args()
    version = peer_version(options.verl_python, "verl")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save([draw_case(seed) for seed in range(options.cases)], folder / "cases.pt")
        results = [folder / "ours.pt", folder / "theirs.pt"]
        scripts = ("side_rollcast_algorithms.py", "side_verl_algorithms.py")
        sides: list[Side] = []
        try:
            for python, script, result in zip((sys.executable, options.verl_python), scripts, results, strict=True):
                command = [python, str(HERE / script), str(folder / "cases.pt"), str(result)]
                sides.append(Side(command, folder / f"{script}.log"))
            for side in sides:
                side.run("parity")
            differences = largest_differences(*results)
            comparisons, notes = speed(*sides)
        finally:
            for side in sides:
                side.close()
    parity = [
        Comparison(f"{name}: largest difference, other: goal", gap, _DIFFERENCE, at_most=1)
        for name, gap in differences.items()
    ]
    notes.append(
        f"{options.cases} random batches each; load of the machine before: {load:.1f} on {os.cpu_count()} cores"
    )
    write_report(f"rollcast's algorithms against verl {version}", [*parity, *comparisons], notes, options.output)


if __name__ == "__main__":
    main()
