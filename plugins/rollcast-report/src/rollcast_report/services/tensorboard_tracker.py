"""The tracker ``tensorboard``."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollcast_report.services.background import BackgroundTracker

__all__ = ["TensorboardTracker"]


class TensorboardTracker(BackgroundTracker):
    """Event files in ``<run_dir>/tensorboard``; see them with ``tensorboard --logdir runs``.

    A continued run hides the events that an interrupted run wrote after its checkpoint. ``project_name`` and
    ``experiment_name`` have no effect: TensorBoard names a run by its folder.
    """

    library = "tensorboard"

    def open_run(self, library: Any) -> None:
        purge = self.start_step + 1 if self.start_step else None
        folder = str(self.run_dir / "tensorboard")
        self._writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(folder, purge_step=purge)
        self._writer.add_text("config", _as_code(self.config), self.start_step)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self._writer.add_text("val/samples", "\n\n".join(_as_code(sample) for sample in samples), step)

    def finish(self, error: BaseException | None) -> None:
        self._writer.close()


def _as_code(value: Any) -> str:
    # Four spaces make the text a block of code, in which Markdown is not interpreted.
    text = json.dumps(value, indent=2, default=str, ensure_ascii=False)
    return "\n".join(f"    {line}" for line in text.splitlines())
