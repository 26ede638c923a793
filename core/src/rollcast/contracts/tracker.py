"""Contract of trackers, which send a run's metrics to another system.

A tracker is a set of hook implementations (see :mod:`rollcast.contracts.hooks`). Example::

    class Bell(BaseTracker):
        @hookimpl
        def on_checkpoint_saved(self, trainer, step, path):
            self.logger.info("saved %s", path)
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from rollcast.contracts.hooks import find_hook_mistake
from rollcast.plugins import Registry, subclass_of

__all__ = ["BaseTracker", "trackers"]


class BaseTracker:
    """Base class of trackers.

    Further keyword arguments of a subclass come from ``tracker_kwargs.<name>``. An exception in a tracker is logged
    and never stops the run, except in :meth:`check_requirements`.

    Args:
        run_dir: existing directory of the run.
        config: resolved config as plain dicts and lists.
        start_step: step from which the run continues; 0 for a new run. A tracker that appends must drop the
            records that an earlier, interrupted run wrote after this step.
    """

    def __init__(self, run_dir: Path, config: dict[str, Any], start_step: int = 0) -> None:
        self.run_dir = run_dir
        self.config = config
        self.start_step = start_step
        self.logger = logging.getLogger(f"rollcast.trackers.{type(self).__name__}")

    @classmethod
    def check_requirements(cls) -> None:
        """Check that the tracker can work, before the run starts.

        Raises:
            PluginLoadError: a library is missing; names the pip command that installs it.
        """

    def close(self) -> None:
        """Flush records and release resources; called once, also after an error."""


trackers: Registry[type[BaseTracker]] = Registry(
    "rollcast.trackers",
    subclass_of(BaseTracker),
    "trackers",
    description="destinations of metrics",
    probe=find_hook_mistake,
)
