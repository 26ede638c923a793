"""Health check of the sandbox, with each kind of isolation that this machine has."""

from __future__ import annotations

from collections.abc import Iterator

from rollcast.contracts.health import BaseHealthCheck, Finding, HealthSetup, ok, problem, warning
from rollcast_rewards.sandbox import KINDS, PROMISED, isolation, mechanism

__all__ = ["SandboxCheck"]

_MEND = "permit user namespaces, install bubblewrap (apt-get install bubblewrap), or use Linux 5.13 with Landlock"


class SandboxCheck(BaseHealthCheck):
    """The isolation of programs by ``reward=code`` and the tool ``python``."""

    subject = "sandbox"

    def run(self, setup: HealthSetup) -> Iterator[Finding]:
        """Start an empty program and report each kind of isolation."""
        needs = setup.get("reward.name") == "code" or "python" in setup.get("agent.tools", {})
        allowed = {
            *setup.get("reward.reward_kwargs.allow_missing", []),
            *setup.get("agent.tools.python.allow_missing", []),
        }
        try:
            held_kinds = isolation()
        except OSError as error:
            yield (problem if needs else warning)("start", str(error), _MEND)
            return
        name, refused = mechanism()
        others = "".join(f"; not {other}: {why}" for other, why in refused.items())
        yield ok("mechanism", f"{name}{others}")
        for kind, held in held_kinds.items():
            if held:
                yield ok(kind, f"a program {KINDS[kind]}")
            elif needs and kind in PROMISED and kind not in allowed:
                yield problem(kind, f"not so: a program {KINDS[kind]}", f"{_MEND}; or allow_missing=[{kind}]")
            else:
                yield warning(kind, f"not so: a program {KINDS[kind]}", _MEND)
