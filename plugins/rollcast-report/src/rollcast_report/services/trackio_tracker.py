"""The tracker ``trackio``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollcast_report.services.background import BackgroundTracker

__all__ = ["TrackioTracker"]


class TrackioTracker(BackgroundTracker):
    """A run of Trackio, in its local database or a Hugging Face Space; ``trackio show`` opens the dashboard.

    A continued run continues the run of the same name in Trackio.

    Args:
        run_dir, config, start_step: see :class:`BaseTracker`.
        space_id: id of the Space to send to; None for the local database.
        init_kwargs: further arguments of ``trackio.init``.
        **kwargs: see :class:`BackgroundTracker`.
    """

    library = "trackio"

    def __init__(
        self,
        run_dir: Path,
        config: dict[str, Any],
        start_step: int = 0,
        space_id: str | None = None,
        init_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._init = {"space_id": space_id, **(init_kwargs or {})}
        super().__init__(run_dir, config, start_step, **kwargs)

    def open_run(self, library: Any) -> None:
        self._run = library.init(
            project=self.project_name,
            name=self.experiment_name,
            config=self.config,
            resume="allow" if self.start_step else "never",
            **{key: value for key, value in self._init.items() if value is not None},
        )

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        # Trackio counts steps itself and reserves the name.
        self._run.log({name: value for name, value in metrics.items() if name != "step"}, step=step)

    def finish(self, error: BaseException | None) -> None:
        self._run.finish()
