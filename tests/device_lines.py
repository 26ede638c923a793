"""Lists the lines that run only where there is a device, and those of them that nothing has executed.

    python tests/device_lines.py coverage.json

The argument is the report of ``coverage json`` over dry runs and tests on a CPU; without it, the lines are counted. A line
counts if a condition that names a device decides about it: what follows ``if device.type != "cpu"``, or the rest of a
block after ``if not torch.cuda.is_available(): return``.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Names that are true, or not None, where there is a device, and their opposites.
ON_DEVICE = ("is_cuda", "is_available", "is_initialized", "is_asynchronous", "has_gpu", "use_gpu")
ON_CPU = ("on_cpu", "_on_cpu")
DEVICES = ("cuda", "nccl")
LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def truth(test: ast.expr) -> bool | None:
    """Return whether a condition is true where there is a device; None if it does not depend on one."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = truth(test.operand)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        decided = isinstance(test.op, ast.Or)  # one true part decides an `or`, one false part an `and`
        parts = [part for part in map(truth, test.values) if part is not None]
        return None if not parts else decided if decided in parts else not decided
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return compared(test.left, test.ops[0], test.comparators[0])
    if isinstance(test, ast.Call):
        return truth(test.func)
    name = test.attr if isinstance(test, ast.Attribute) else test.id if isinstance(test, ast.Name) else ""
    if name in ("is_available", "is_initialized") and not re.search(r"cuda|accelerator", ast.unparse(test)):
        return None  # of torch.distributed
    return True if name in ON_DEVICE else False if name in ON_CPU else None


def compared(left: ast.expr, operator: ast.cmpop, right: ast.expr) -> bool | None:
    """Return whether a comparison is true where there is a device; None if it does not depend on one."""
    equal = isinstance(operator, ast.Eq | ast.Is)
    value = right.value if isinstance(right, ast.Constant) else ""
    if value is None:
        inner = truth(left)
        return None if inner is None else inner != equal
    if value == "cpu" or (isinstance(right, ast.Attribute) and ast.unparse(right) == "CPU.name"):
        return not equal
    return equal if value in DEVICES else None


def device_lines(block: Sequence[ast.stmt], inside: bool = False) -> Iterator[int]:
    """Yield the first lines of the statements that run only where there is a device."""
    for statement in block:
        if inside and not isinstance(statement, ast.FunctionDef | ast.ClassDef):
            yield statement.lineno
        on_device = truth(statement.test) if isinstance(statement, ast.If) else None
        for name, part in ast.iter_fields(statement):
            if isinstance(part, list) and part and isinstance(part[0], ast.stmt | ast.excepthandler):
                branch = on_device is not None and on_device == (name == "body")
                bodies = [handler.body for handler in part] if isinstance(part[0], ast.excepthandler) else [part]
                for body in bodies:
                    yield from device_lines(body, inside or branch)
        if isinstance(statement, ast.If) and on_device is False and isinstance(statement.body[-1], LEAVES):
            inside = True


def main() -> None:
    """Print the lines that were not executed, and their share."""
    executed: dict[str, set[int]] = {}
    if len(sys.argv) > 1:
        report = json.loads(Path(sys.argv[1]).read_text())
        executed = {str(Path(name).resolve()): set(found["executed_lines"]) for name, found in report["files"].items()}
    count = missed = 0
    for file in sorted([*ROOT.glob("core/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]):
        if "rollcast-dryrun" in str(file):
            continue
        lines = sorted(set(device_lines(ast.parse(file.read_text()).body)))
        absent = [line for line in lines if line not in executed.get(str(file), set())]
        count, missed = count + len(lines), missed + len(absent)
        if absent:
            sys.stdout.write(f"{file.relative_to(ROOT)}: {', '.join(map(str, absent))}\n")
    sys.stdout.write(f"{count - missed} of {count} lines executed, {(count - missed) / count:.1%}\n")


if __name__ == "__main__":
    main()
