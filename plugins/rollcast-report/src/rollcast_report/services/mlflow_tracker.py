"""The tracker ``mlflow``."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollcast.contracts.config import flatten
from rollcast_report.services.background import BackgroundTracker

__all__ = ["MlflowTracker", "clean_name"]

_MOST_METRICS, _MOST_PARAMS, _LONGEST_PARAM = 1000, 100, 6000


def clean_name(name: str) -> str:
    """Return a metric's name in the characters that MLflow allows: ``val/mean@4`` becomes ``val/mean_at_4``."""
    return re.sub(r"[^\w\-. /:]", "_", name.replace("@", "_at_"))


class MlflowTracker(BackgroundTracker):
    """A run of MLflow in the experiment ``project_name``; the config's keys are its parameters.

    A continued run continues the run in MLflow. Validation samples are artifacts, ``samples/step_<n>.jsonl``.

    Args:
        run_dir, config, start_step: see :class:`BaseTracker`.
        tracking_uri: server, database or folder; None for MLflow's own setting (``MLFLOW_TRACKING_URI``).
        tags: tags of the run.
        **kwargs: see :class:`BackgroundTracker`.
    """

    library = "mlflow"

    def __init__(
        self,
        run_dir: Path,
        config: dict[str, Any],
        start_step: int = 0,
        tracking_uri: str | None = None,
        tags: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        self._tracking_uri = tracking_uri
        self._tags = dict(tags or {})
        super().__init__(run_dir, config, start_step, **kwargs)

    def open_run(self, library: Any) -> None:
        # The client is used because the module's functions keep one current run per thread.
        self._entities = library.entities
        self._client = library.MlflowClient(self._tracking_uri)
        earlier = self.load_id()
        if earlier is not None:
            self._run_id = earlier
            self._client.update_run(earlier, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(self.project_name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(self.project_name)
        run = self._client.create_run(number, run_name=self.experiment_name, tags=self._tags)
        self._run_id = str(run.info.run_id)
        self.save_id(self._run_id)
        leaves = flatten(self.config).items()
        params = [library.entities.Param(clean_name(key), str(value)[:_LONGEST_PARAM]) for key, value in leaves]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + _MOST_PARAMS])

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        entries = [self._entities.Metric(clean_name(name), float(value), now, step) for name, value in metrics.items()]
        for start in range(0, len(entries), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=entries[start : start + _MOST_METRICS])

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        lines = [json.dumps(sample, default=str, ensure_ascii=False) for sample in samples]
        self._client.log_text(self._run_id, "\n".join(lines) + "\n", f"samples/step_{step}.jsonl")

    def finish(self, error: BaseException | None) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if error is None else "FAILED")
