"""verl's scoring of programs, ``verl.utils.reward_score.prime_code``, by rollcast's sandbox.

Without a ``sandbox_fusion_url``, verl runs a program that the model wrote in a fork of the scoring process: with the
run's files, network and credentials. :func:`use_sandbox` puts a module of the same name in place of verl's, which also
needs no ``pyext``; whatever calls ``prime_code.compute_score`` then runs the program in the sandbox of the reward
``code``.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from types import ModuleType
from typing import Any, cast

from rollcast.contracts.reward import RewardResult, RewardSample, build_reward

__all__ = ["PROGRAMS", "use_sandbox"]

PROGRAMS = "verl.utils.reward_score.prime_code"
#: Number of tests of which verl returns the passed share.
_TESTS = 10


class _Sandboxed(ModuleType):
    """The module in place of verl's.

    Args:
        allow_missing: promised kinds of isolation without which programs may run on this machine.
    """

    def __init__(self, allow_missing: Collection[str]) -> None:
        super().__init__(PROGRAMS)
        self.allow_missing = tuple(allow_missing)

    def compute_score(self, completion: str, test_cases: Any, continuous: bool = False) -> tuple[float, list[Any]]:
        """Return a program's score, as verl does, and no metadata.

        Args:
            completion: response with a fenced block of Python, or a program alone.
            test_cases: tests as the reward ``code`` reads them: ``inputs``, ``outputs``, and ``fn_name`` for calls.
            continuous: return the passed share of the first ten tests instead of 1 for all tests.

        Raises:
            RewardError: there are no tests.
            ConfigError: a promised kind of isolation is missing on this machine.
        """
        limits = {"partial": True, "max_tests": _TESTS} if continuous else {}
        reward = build_reward("code", {**limits, "allow_missing": list(self.allow_missing)})
        response = completion if "```" in completion else f"```python\n{completion}\n```"
        scored = cast(RewardResult, reward.score(RewardSample("", response, test_cases)))
        return float(scored.score), []


def use_sandbox(allow_missing: Collection[str] = ()) -> None:
    """Replace verl's module in this process; see :class:`_Sandboxed` for the argument."""
    module: Any = sys.modules.get(PROGRAMS)
    if not isinstance(module, _Sandboxed) or module.allow_missing != tuple(allow_missing):
        module = _Sandboxed(allow_missing)
        sys.modules[PROGRAMS] = module
    package, _, name = PROGRAMS.rpartition(".")
    if package in sys.modules:
        setattr(sys.modules[package], name, module)
