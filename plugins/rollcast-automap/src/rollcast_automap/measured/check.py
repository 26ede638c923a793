"""Stage-by-stage comparison of a finished run with its prediction, for ``rollcast map --check``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollcast_automap.composition import predict
from rollcast_automap.contract import BaseCostModel
from rollcast_automap.measured.measured_run import MeasuredRun, worker_bytes

__all__ = ["Compared", "RunCheck", "as_dict", "check_run"]


@dataclass(frozen=True)
class Compared:
    """A predicted figure and the measured one.

    Attributes:
        predicted, measured: None if the figure was not predicted or not recorded.
        note: basis of the prediction, such as its extrapolation; empty if there is nothing to note.
    """

    predicted: float | None
    measured: float | None
    note: str = ""

    @property
    def error(self) -> float | None:
        """Ratio of predicted to measured figure, minus 1; None if a figure is missing or the measured one is 0."""
        return self.predicted / self.measured - 1 if self.predicted is not None and self.measured else None


@dataclass(frozen=True)
class RunCheck:
    """A run's predicted and measured figures.

    Attributes:
        folder: run directory.
        step: duration of a step in seconds.
        stages: stage → seconds, including ``weight_sync`` and ``controller``.
        memory: peak bytes of a worker of the trained role.
    """

    folder: Path
    step: Compared
    stages: dict[str, Compared]
    memory: Compared


def check_run(run: MeasuredRun, cost_model: BaseCostModel) -> RunCheck:
    """Predict the figures of a finished run and return them next to the measured ones."""
    prediction = predict(run.problem, cost_model, run.mapping)
    names = dict.fromkeys([*prediction.stages, *run.stages])
    stages = {
        name: Compared(
            prediction.stages[name].seconds if name in prediction.stages else None,
            run.stages.get(name),
            prediction.stages[name].note if name in prediction.stages else "",
        )
        for name in names
        if name != "controller"
    }
    controller = prediction.stages.get("controller")
    between = max(run.step_seconds - run.busy_seconds, 0.0)
    stages["controller"] = Compared(None if controller is None else controller.seconds, between)
    return RunCheck(
        folder=run.folder,
        step=Compared(prediction.step_seconds, run.step_seconds),
        stages=stages,
        memory=Compared(worker_bytes(run, prediction), run.peak_bytes),
    )


def as_dict(check: RunCheck) -> dict[str, Any]:
    """Return the figures of a run for JSON; each name ends with its unit."""

    def shown(pair: Compared, unit: str) -> dict[str, Any]:
        figures = {f"predicted_{unit}": pair.predicted, f"measured_{unit}": pair.measured, "error": pair.error}
        return {**figures, "note": pair.note}

    return {
        "run_dir": str(check.folder),
        "step": shown(check.step, "s"),
        "stages": {name: shown(pair, "s") for name, pair in check.stages.items()},
        "memory": shown(check.memory, "bytes"),
    }
