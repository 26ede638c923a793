"""The reward ``code``: tests of the program in the response, run in the sandbox.

The ground truth is one of:

- Python code with assertions, which runs after the response's program: ``assert add(1, 2) == 3``;
- a list of such codes, each a test of its own;
- ``{"inputs": [...], "outputs": [...]}``: the program gets each input on standard input and has to print
  the output that goes with it (white space at the ends of lines and of the text aside).

A mapping or list may also come as JSON text, as it does from Parquet files.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rollcast.contracts.reward import BaseReward, RewardResult, RewardSample
from rollcast.errors import RewardError
from rollcast_rewards.sandbox import SandboxLimits, run_sandboxed

__all__ = ["CodeReward", "extract_program"]

_FENCE = re.compile(r"^```[ \t]*([\w+-]*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "python", "py", "python3")


def extract_program(response: str) -> str | None:
    """Return the last fenced block of Python in the response; None if there is none."""
    found = [body for language, body in _FENCE.findall(response) if language.lower() in _PYTHON]
    return found[-1] if found else None


@dataclass(frozen=True)
class _Test:
    """One run of the program: code that follows it, its input and its expected output."""

    code: str = ""
    stdin: str = ""
    stdout: str | None = None


class CodeReward(BaseReward):
    """A reward for programs that pass tests: 1 if all pass, else 0; or the share of passed tests.

    The extra number ``passed`` is the share. A program that exceeds a limit fails its test; this is not an
    error of the reward.

    Args:
        partial: return the share of passed tests instead of 1 or 0.
        max_tests: maximum number of tests of a sample, the first ones; None for all.
        time_s, cpu_s, memory_mb, output_kb: limits of each test, see :class:`SandboxLimits`.

    Raises:
        ConfigError: a limit is not positive.
    """

    def __init__(
        self,
        partial: bool = False,
        max_tests: int | None = None,
        time_s: float = 6.0,
        cpu_s: float = 5.0,
        memory_mb: int = 512,
        output_kb: int = 256,
    ) -> None:
        self._partial = partial
        self._max_tests = max_tests
        self._limits = SandboxLimits(time_s, cpu_s, memory_mb, output_kb)

    def score(self, sample: RewardSample) -> RewardResult:
        """Run the tests.

        Raises:
            RewardError: the ground truth holds no tests.
            OSError: the sandbox cannot be started.
        """
        tests = _read_tests(sample.ground_truth)[: self._max_tests]
        program = extract_program(sample.response)
        passed = 0
        if program is not None:
            for test in tests:
                ok = self._passes(program, test)
                passed += ok
                if not ok and not self._partial:
                    break
        share = passed / len(tests)
        return RewardResult(share if self._partial else float(share == 1.0), share == 1.0, {"passed": share})

    def _passes(self, program: str, test: _Test) -> bool:
        if test.stdout is not None:
            result = run_sandboxed(program, test.stdin, self._limits)
            return result.status == "ok" and _lines(result.stdout) == _lines(test.stdout)
        # Printed after the last assertion, so that a program that only exits with status 0 does not pass.
        token = secrets.token_hex(16)
        result = run_sandboxed(f"{program}\n\n{test.code}\n\nprint({token!r})\n", "", self._limits)
        return result.status == "ok" and result.stdout.rstrip().endswith(token)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _read_tests(truth: Any) -> list[_Test]:
    if isinstance(truth, str) and truth.lstrip()[:1] in ("{", "["):
        with suppress(ValueError):  # Python that begins with a bracket
            truth = json.loads(truth)
    if isinstance(truth, Mapping):
        inputs, outputs = _as_list(truth.get("inputs")), _as_list(truth.get("outputs"))
        if len(inputs) == len(outputs) > 0:
            return [_Test(stdin=str(given), stdout=str(wanted)) for given, wanted in zip(inputs, outputs, strict=True)]
    codes = [truth] if isinstance(truth, str) else _as_list(truth)
    if codes and all(isinstance(code, str) and code.strip() for code in codes):
        return [_Test(code=code) for code in codes]
    raise RewardError(
        "code needs tests as ground truth: code with assertions, a list of such, or a mapping with 'inputs' and "
        f"'outputs' of one length; this is {str(truth)[:100]!r}"
    )


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else []
