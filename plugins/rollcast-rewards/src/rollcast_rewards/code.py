"""The reward ``code``: tests of the program in the response, run in the sandbox.

The ground truth is one of:

- Python code with assertions about the program's functions and classes: ``assert add(1, 2) == 3``;
- a list of such codes, each a test of its own;
- ``{"test": code, "entry_point": name}``, as HumanEval has it: ``check(name)`` is called if the code defines ``check``;
- ``{"inputs": [...], "outputs": [...]}``: the program gets each input on standard input and has to print
  the output that goes with it (white space at the ends of lines and of the text aside);
- the same with ``"fn_name": name``: the function, or the method of a class ``Solution``, is called. An input is a list
  of arguments, or a text with the JSON of one argument a line; an output is a value, or its JSON for such a text.

A mapping or list may also come as JSON text, as it does from Parquet files. Tests and program run in two processes,
see :mod:`rollcast_rewards._sandbox_channel`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rollcast.contracts.reward import BaseReward, RewardResult, RewardSample
from rollcast.errors import RewardError
from rollcast_rewards.sandbox import SandboxLimits, check_allowed, run_sandboxed, run_tests

__all__ = ["CodeReward", "extract_program"]

_FENCE = re.compile(r"^```[ \t]*([\w+-]*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "python", "py", "python3")


def extract_program(response: str) -> str | None:
    """Return the last fenced block of Python in the response; None if there is none."""
    programs = [body for language, body in _FENCE.findall(response) if language.lower() in _PYTHON]
    return programs[-1] if programs else None


@dataclass(frozen=True)
class _Test:
    """One run of the program: its input and expected output, or calls as ``run_tests`` takes them."""

    calls: Mapping[str, Any] = field(default_factory=dict)
    stdin: str = ""
    stdout: str = ""


class CodeReward(BaseReward):
    """A reward for programs that pass tests: 1 if all pass, else 0; or the share of passed tests.

    The extra number ``passed`` is the share. A program that exceeds a limit fails its test; this is not an
    error of the reward.

    Args:
        partial: return the share of passed tests instead of 1 or 0.
        max_tests: maximum number of tests of a sample, the first ones; None for all.
        time_s, cpu_s, memory_mb, output_kb: limits of each test, see :class:`SandboxLimits`.
        allow_missing: promised kinds of isolation without which programs may run on this machine.

    Raises:
        ConfigError: a limit is not positive, or a kind of isolation is unknown.
    """

    def __init__(
        self,
        partial: bool = False,
        max_tests: int | None = None,
        time_s: float = 6.0,
        cpu_s: float = 5.0,
        memory_mb: int = 512,
        output_kb: int = 256,
        allow_missing: Collection[str] = (),
    ) -> None:
        self._partial = partial
        self._max_tests = max_tests
        self._limits = SandboxLimits(time_s, cpu_s, memory_mb, output_kb)
        self._allow_missing = check_allowed(allow_missing, "reward.reward_kwargs.allow_missing")

    def score(self, sample: RewardSample) -> RewardResult:
        """Run the tests.

        Raises:
            RewardError: the ground truth holds no tests.
            ConfigError: a promised kind of isolation is missing on this machine.
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
        if test.calls:
            return run_tests(program, test.calls, self._limits, self._allow_missing).passed
        result = run_sandboxed(program, test.stdin, self._limits, self._allow_missing)
        return result.status == "ok" and _lines(result.stdout) == _lines(test.stdout)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _read_tests(truth: Any) -> list[_Test]:
    if isinstance(truth, str) and truth.lstrip()[:1] in ("{", "["):
        with suppress(ValueError):  # Python that begins with a bracket
            truth = json.loads(truth)
    if isinstance(truth, Mapping):
        code, name = truth.get("test"), truth.get("entry_point")
        if isinstance(code, str) and code.strip() and isinstance(name, str) and name:
            call = f"\n\ncheck({name})\n" if re.search(r"^def check\b", code, re.MULTILINE) else ""
            return [_Test({"code": code + call, "entry_point": name})]
        inputs, outputs = _as_list(truth.get("inputs")), _as_list(truth.get("outputs"))
        if len(inputs) == len(outputs) > 0:
            pairs = zip(inputs, outputs, strict=True)
            if truth.get("fn_name"):
                return [_read_call(str(truth["fn_name"]), *pair) for pair in pairs]
            return [_Test(stdin=str(stdin), stdout=str(stdout)) for stdin, stdout in pairs]
    codes = [truth] if isinstance(truth, str) else _as_list(truth)
    if codes and all(isinstance(code, str) and code.strip() for code in codes):
        return [_Test({"code": code, "entry_point": None}) for code in codes]
    raise RewardError(
        "code needs tests as ground truth: code with assertions, a list of such, or a mapping with 'test' and "
        "'entry_point', or with 'inputs' and 'outputs' of one length (and optionally 'fn_name'); "
        f" this is {str(truth)[:100]!r}"
    )


def _read_call(name: str, call_input: Any, output: Any) -> _Test:
    """Return the test of one call, of whose expected values one has to be returned."""
    try:
        arguments = (
            [json.loads(line) for line in call_input.split("\n")]
            if isinstance(call_input, str)
            else _as_list(call_input)
        )
        expected = [json.loads(output) if isinstance(call_input, str) and isinstance(output, str) else output]
    except ValueError as error:
        raise RewardError(f"code needs JSON in the tests of the function {name}; {call_input!r}"[:200]) from error
    if not isinstance(call_input, str) and isinstance(output, list) and len(output) == 1:
        expected.append(output[0])  # some data sets wrap the value in a list
    return _Test({"fn_name": name, "arguments": arguments, "expected": expected})


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else []
