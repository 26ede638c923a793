"""The contract of trackers: something that watches a run and writes it down elsewhere.

A tracker is a set of hook implementations (see :mod:`rollcast.contracts.hooks`) built from the
run's config; it implements only the events that it wants.

Example::

    from rollcast.contracts.tracker import BaseTracker
    from rollcast.contracts.hooks import hookimpl

    class Bell(BaseTracker):
        @hookimpl
        def on_checkpoint_saved(self, trainer, step, path):
            self.logger.info("saved %s", path)
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from rollcast.plugins import Registry, subclass_of

__all__ = ["BaseTracker", "trackers"]


class BaseTracker:
    """Base of all trackers.

    Args:
        run_dir: the run's directory; exists.
        config: the resolved config as plain dicts and lists.
        start_step: the step that the run continues from; 0 for a fresh run. A tracker that
            appends must drop what it wrote after this step in an earlier, interrupted run.

    Further keyword arguments of a subclass are the config's ``tracker_kwargs.<name>``. What a tracker
    raises, other than in :meth:`check_requirements`, is logged and never stops the run.
    """

    def __init__(self, run_dir: Path, config: dict[str, Any], start_step: int = 0) -> None:
        self.run_dir = run_dir
        self.config = config
        self.start_step = start_step
        self.logger = logging.getLogger(f"rollcast.trackers.{type(self).__name__}")

    @classmethod
    def check_requirements(cls) -> None:
        """Called before anything of the run is started.

        Raises:
            PluginLoadError: a library is missing; names the pip command.
        """

    def close(self) -> None:
        """Flush and release; called once, also after an error."""


trackers: Registry[type[BaseTracker]] = Registry(
    "rollcast.trackers", subclass_of(BaseTracker), "trackers", description="destinations of metrics"
)
