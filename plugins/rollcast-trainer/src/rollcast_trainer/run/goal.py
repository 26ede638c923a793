"""The end of a run before its last step: at a value of a validation's metric, or when the metric rises no more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollcast.errors import ConfigError
from rollcast_trainer.schemas import StopAtConfig

__all__ = ["Goal"]


class Goal:
    """The state of ``trainer.stop_at`` in a run.

    Args:
        settings: the section.
    """

    def __init__(self, settings: StopAtConfig) -> None:
        self._settings = settings
        self._highest = float("-inf")
        self._without_rise = 0

    def check_files(self, val_files: list[str]) -> None:
        """Refuse a goal without a validation.

        Raises:
            ConfigError: there are no validation files.
        """
        key, metric = self._settings.set_key, self._settings.metric
        if key and not val_files:
            value = getattr(self._settings, key)
            raise ConfigError(
                f"trainer.stop_at.{key} is {value:g}, but data.val_files is empty, so {metric} is never measured; give "
                f"at least one file, or leave trainer.stop_at.{key} empty"
            )

    def see(self, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a validation.

        Raises:
            ConfigError: the metric is not among them.
        """
        name = self._settings.metric
        if name in metrics:
            rises = metrics[name] > self._highest
            self._without_rise = 0 if rises else self._without_rise + 1
            self._highest = max(self._highest, metrics[name])
        elif self._settings.set_key:
            raise ConfigError(
                f"trainer.stop_at.metric is {name!r}, which the validation does not measure; "
                f"it measures {', '.join(sorted(metrics))}"
            )

    @property
    def reason(self) -> str:
        """The reason to end the run now; empty if there is none."""
        name, value, patience = self._settings.metric, self._settings.value, self._settings.patience
        if value is not None and self._highest >= value:
            return f"{name} is {self._highest:.4g}, and trainer.stop_at.value is {value:g}"
        if patience is not None and self._without_rise >= patience:
            return (
                f"{name} did not rise above {self._highest:.4g} in {self._without_rise} validations, and "
                f"trainer.stop_at.patience is {patience}"
            )
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON."""
        highest = self._highest if self._highest > float("-inf") else None
        return {"metric": self._settings.metric, "highest": highest, "without_rise": self._without_rise}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; nothing if the metric is another now."""
        if state.get("metric") == self._settings.metric and state["highest"] is not None:
            self._highest, self._without_rise = float(state["highest"]), int(state["without_rise"])
