"""The conformance suite of health checks.

Example, in a plugin's tests::

    from rollcast_testing import HealthCheckSuite

    class TestLicence(HealthCheckSuite):
        name = "licence"
        faults = [({"licence": {"host": "nowhere.invalid"}}, "server")]
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rollcast.contracts.health import BaseHealthCheck, Finding, HealthSetup, health_checks

__all__ = ["HealthCheckSuite"]


class HealthCheckSuite:
    """Checks of every health check; subclass it, and name the check.

    Attributes:
        name: name of the check in ``rollcast.health_checks``.
        configs: configurations that it has to bear, besides none at all and an empty one.
        faults: configurations with a fault, each with the name of the finding that has to report it.
    """

    name: ClassVar[str] = ""
    configs: ClassVar[Sequence[Mapping[str, Any]]] = ()
    faults: ClassVar[Sequence[tuple[Mapping[str, Any], str]]] = ()

    @pytest.fixture
    def check(self) -> BaseHealthCheck:
        """The check under test; override it to build one that is not announced."""
        return health_checks.get(self.name)()

    def test_it_can_be_listed(self, check: BaseHealthCheck) -> None:
        """A check has a subject, a time limit, and a docstring that says what it looks at."""
        assert isinstance(check.subject, str)
        assert check.subject
        assert check.timeout_s > 0
        assert inspect.getdoc(type(check))

    def test_findings_are_complete(self, check: BaseHealthCheck) -> None:
        """With any configuration a check ends in its time limit, with findings whose texts are single lines."""
        for config in (None, {}, *self.configs):
            start = time.monotonic()
            findings = list(check.run(HealthSetup(config)))
            assert time.monotonic() - start < check.timeout_s
            for finding in findings:
                assert isinstance(finding, Finding)
                for text in (finding.name, finding.message, finding.fix):
                    assert "\n" not in text, f"the finding {finding.name!r} has a line break in {text!r}"

    def test_it_leaves_nothing_behind(
        self, check: BaseHealthCheck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No file in the working directory, no other working directory, no other variables of the environment."""
        monkeypatch.chdir(tmp_path)
        before = dict(os.environ)
        list(check.run(HealthSetup({"run_dir": str(tmp_path / "run")})))
        assert Path.cwd() == tmp_path
        assert not list(tmp_path.iterdir())
        # Libraries set variables for themselves at import; none that was there may change.
        assert {name: os.environ.get(name) for name in before} == before

    def test_faults_are_found(self, check: BaseHealthCheck) -> None:
        """Each planted fault is reported under its name, with what to do about it."""
        for config, name in self.faults:
            problems = [finding for finding in check.run(HealthSetup(config)) if finding.state != "ok"]
            assert name in [finding.name for finding in problems], f"{config} gave {problems}"
            assert all(finding.fix for finding in problems)
