"""Recovery of a run that has lost worker processes: a bounded number of restarts from the last checkpoint."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from rollcast import WorkerGroup
from rollcast.contracts.runtime import CallFailed
from rollcast.errors import WorkerError
from rollcast_trainer.run.run import Run

__all__ = ["RECOVERIES_FILE", "Recoveries", "Recovery", "describe_loss"]

logger = logging.getLogger(__name__)
#: File in the run directory with one JSON line per recovery.
RECOVERIES_FILE = "recoveries.jsonl"
#: Seconds to wait for a death to be noticed. A failure that it causes elsewhere, such as a broken collective, is often
#: seen first: a runtime's heartbeat needs up to six seconds.
_NOTICE_S = 7.0
_LOOK_S = 0.05
_CONFIRM_S = 60.0
_MAX_REASON = 500


@dataclass(frozen=True)
class Recovery:
    """One recovery of a run.

    Attributes:
        number: number of this recovery, counted from 1.
        limit: ``trainer.max_recoveries``.
        failed_step: training steps that were complete when the processes were lost.
        step: step that the run continues from.
        reason: the lost processes, in one line.
        when: time of the failure, in seconds since the epoch.
    """

    number: int
    limit: int
    failed_step: int
    step: int
    reason: str
    when: float

    def describe(self) -> str:
        """Return a one-line description for logs."""
        source = f"checkpoints/step_{self.step}" if self.step else "the beginning, as there is no checkpoint yet"
        return f"recovery {self.number} of {self.limit} after step {self.failed_step}, from {source}: {self.reason}"

    def metrics(self) -> dict[str, float]:
        """Return the metrics to record with the first step after the recovery."""
        return {
            "recovery/count": float(self.number),
            "recovery/seconds": time.time() - self.when,
            "recovery/steps_repeated": float(self.failed_step - self.step),
        }


class Recoveries:
    """Decision whether a run goes on after a failure, at most ``trainer.max_recoveries`` times.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._limit = run.settings.trainer.max_recoveries
        self._number = 0
        self._reason = ""
        self._when = 0.0

    def accept(self, error: BaseException) -> bool:
        """Return True if the run has lost processes and may go on; then call :meth:`begin`.

        The next trainer starts like ``rollcast train`` on the same run directory, so data position, random states and
        metrics are those of an interrupted run.
        """
        when = time.time()
        reason = describe_loss(error, self._run.groups.values(), _NOTICE_S) if self._limit else None
        if reason is None:
            return False
        if self._number == self._limit:
            error.add_note(f"the run ends here: all recoveries are used (trainer.max_recoveries={self._limit})")
            return False
        self._number, self._reason, self._when = self._number + 1, reason, when
        if not _died_at_start(error):
            _await_death(self._run.groups.values())
        return True

    def begin(self, failed_step: int) -> Recovery:
        """Shut down the rest of the failed trainer, and return the recovery that begins.

        Args:
            failed_step: training steps that the failed trainer had completed.
        """
        self._run.begin_again()
        step = self._run.start_step
        # A trainer that failed during setup had not yet resumed from its checkpoint.
        recovery = Recovery(self._number, self._limit, max(failed_step, step), step, self._reason, self._when)
        logger.warning("%s", recovery.describe())
        _write(self._run.settings.run_dir, recovery)
        return recovery


def describe_loss(error: BaseException, groups: Iterable[WorkerGroup], notice_s: float = 0.0) -> str | None:
    """Describe in one line which processes a run has lost; return None if it has lost none.

    Args:
        error: error that ended the run.
        groups: worker groups of the run.
        notice_s: seconds to wait for a death that may have caused ``error`` and is not noticed yet.
    """
    chain = _worker_errors(error)
    for link in chain:
        if link.cause_type == CallFailed.DIED:
            return _one_line(str(link))
    groups = list({group.name: group for group in groups}.values())
    # A group of one process cannot fail because of another's death.
    if not chain or sum(group.world_size for group in groups) < 2:
        notice_s = 0.0
    deadline = time.monotonic() + notice_s
    while True:
        for group in groups:
            lost = group.lost_ranks
            if lost:
                return _one_line(f"{group.name} lost {'rank' if len(lost) == 1 else 'ranks'} {lost}: {error}")
        if time.monotonic() >= deadline:
            return None
        time.sleep(_LOOK_S)


def _worker_errors(error: BaseException) -> list[WorkerError]:
    """Return the worker errors among an error and its causes."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and not any(current is other for other in seen):
        seen.append(current)
        current = current.__cause__ or current.__context__
    return [item for item in seen if isinstance(item, WorkerError)]


def _died_at_start(error: BaseException) -> bool:
    """Return True if a process died during start-up; its group then does not exist and cannot report the loss."""
    return any(
        failure.method == "__init__" and failure.cause_type == CallFailed.DIED for failure in _worker_errors(error)
    )


def _await_death(groups: Iterable[WorkerGroup]) -> None:
    """Wait until the runtime knows about the dead processes.

    A cluster takes a while to drop a silent node, and until then would place the new processes there again.
    """
    groups, deadline = list(groups), time.monotonic() + _CONFIRM_S
    while groups and time.monotonic() < deadline and not any(group.lost_ranks for group in groups):
        time.sleep(_LOOK_S)


def _one_line(text: str) -> str:
    return " ".join(text.partition("\n")[0].split())[:_MAX_REASON]


def _write(run_dir: Path, recovery: Recovery) -> None:
    try:
        with open(run_dir / RECOVERIES_FILE, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(recovery)) + "\n")
    except OSError as error:
        # A failed note must not end the run.
        logger.warning("%s cannot be written: %s", run_dir / RECOVERIES_FILE, error)
