"""The tracker ``wandb``: Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollcast_report.services.background import BackgroundTracker

__all__ = ["WandbTracker"]


class WandbTracker(BackgroundTracker):
    """A run of Weights & Biases; its files are in ``<run_dir>/wandb``.

    A continued run continues the run in wandb. The x axis is the metric ``step``. Server and key come from
    wandb's own settings (``wandb login``, ``WANDB_*``).

    Args:
        run_dir, config, start_step: see :class:`BaseTracker`.
        entity: user or team.
        mode: ``online``, ``offline`` or ``disabled``; None for wandb's own setting.
        init_kwargs: further arguments of ``wandb.init``.
        **kwargs: see :class:`BackgroundTracker`.
    """

    library = "wandb"

    def __init__(
        self,
        run_dir: Path,
        config: dict[str, Any],
        start_step: int = 0,
        entity: str | None = None,
        mode: str | None = None,
        init_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._init = {"entity": entity, "mode": mode, **(init_kwargs or {})}
        super().__init__(run_dir, config, start_step, **kwargs)

    def open_run(self, library: Any) -> None:
        earlier = self.load_id()
        again = {"id": earlier, "resume": "allow"} if earlier else {}
        self._library = library
        self._run = library.init(
            project=self.project_name,
            name=self.experiment_name,
            dir=str(self.run_dir),
            config=self.config,
            **again,
            **{key: value for key, value in self._init.items() if value is not None},
        )
        self.save_id(str(self._run.id))
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        columns = sorted({name for sample in samples for name in sample})
        table = self._library.Table(columns=columns)
        for sample in samples:
            table.add_data(*(_plain(sample.get(name)) for name in columns))
        self._run.log({"val/samples": table, "step": step})

    def finish(self, error: BaseException | None) -> None:
        self._run.finish(exit_code=0 if error is None else 1)


def _plain(value: Any) -> Any:
    # A column of a table must have one type.
    return value if isinstance(value, bool | int | float) else str(value)
