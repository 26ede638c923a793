"""The tracker ``clearml``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollcast_report.services.background import BackgroundTracker

__all__ = ["ClearmlTracker"]


class ClearmlTracker(BackgroundTracker):
    """A task of ClearML; the config is its configuration object ``rollcast``.

    A continued run continues the task. ClearML's own recording of frameworks and arguments is off, because
    it would record only the trainer's process.

    Args:
        run_dir, config, start_step: see :class:`BaseTracker`.
        offline: log into a local session instead of the server.
        init_kwargs: further arguments of ``Task.init``.
        **kwargs: see :class:`BackgroundTracker`.
    """

    library = "clearml"

    def __init__(
        self,
        run_dir: Path,
        config: dict[str, Any],
        start_step: int = 0,
        offline: bool = False,
        init_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._offline = offline
        self._init = dict(init_kwargs or {})
        super().__init__(run_dir, config, start_step, **kwargs)

    def open_run(self, library: Any) -> None:
        if self._offline:
            library.Task.set_offline(offline_mode=True)
        earlier = self.load_id()
        self._task = library.Task.init(
            project_name=self.project_name,
            task_name=self.experiment_name,
            **{
                "continue_last_task": earlier or False,
                "reuse_last_task_id": False,
                "auto_connect_arg_parser": False,
                "auto_connect_frameworks": False,
                "auto_connect_streams": False,
                "auto_resource_monitoring": False,
                **self._init,
            },
        )
        self.save_id(str(self._task.id))
        self._task.connect_configuration(self.config, name="rollcast")

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        logger = self._task.get_logger()
        for name, value in metrics.items():
            title, _, series = name.rpartition("/")
            logger.report_scalar(title or name, series, value, step)

    def finish(self, error: BaseException | None) -> None:
        if error is not None:
            self._task.mark_failed(status_reason=f"{type(error).__name__}: {error}"[:200])
        self._task.close()
