"""The tracker ``swanlab``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollcast_report.services.background import BackgroundTracker

__all__ = ["SwanlabTracker"]


class SwanlabTracker(BackgroundTracker):
    """An experiment of SwanLab; its files are in ``<run_dir>/swanlab``.

    Args:
        run_dir, config, start_step: see :class:`BaseTracker`.
        mode: ``cloud``, ``local``, ``offline`` or ``disabled``; None for SwanLab's own setting.
        init_kwargs: further arguments of ``swanlab.init``.
        **kwargs: see :class:`BackgroundTracker`.
    """

    library = "swanlab"

    def __init__(
        self,
        run_dir: Path,
        config: dict[str, Any],
        start_step: int = 0,
        mode: str | None = None,
        init_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._init = {**({} if mode is None else {"mode": mode}), **(init_kwargs or {})}
        super().__init__(run_dir, config, start_step, **kwargs)

    def open_run(self, library: Any) -> None:
        earlier = self.load_id()
        again = {"id": earlier, "resume": "allow"} if earlier else {}
        folder = self.run_dir / "swanlab"
        folder.mkdir(exist_ok=True)
        self._library = library
        run = library.init(
            project=self.project_name,
            experiment_name=self.experiment_name,
            config=self.config,
            logdir=str(folder),
            **again,
            **self._init,
        )
        run_id = getattr(run, "id", None)
        if run_id:
            self.save_id(str(run_id))

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._library.log(dict(metrics), step=step)

    def finish(self, error: BaseException | None) -> None:
        if error is None:
            self._library.finish()
        else:
            self._library.finish(state="crashed", error=f"{type(error).__name__}: {error}")
