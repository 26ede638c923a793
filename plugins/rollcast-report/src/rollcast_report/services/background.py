"""The base class of the trackers, which calls the library in a separate thread."""

from __future__ import annotations

import importlib
import importlib.util
import json
import queue
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rollcast.contracts.files import replace_file
from rollcast.contracts.hooks import hookimpl
from rollcast.contracts.tracker import BaseTracker
from rollcast.errors import ConfigError, PluginLoadError

__all__ = ["BackgroundTracker"]

_MOST_WAITING = 1000


class BackgroundTracker(BaseTracker):
    """Base class of trackers whose library uses a server or a disk that may be slow or unavailable.

    Hooks put calls into a queue; a thread runs them in order. So exceptions of the library are logged, and a
    library that hangs does not delay the run. If more than a thousand calls wait, further calls are dropped and
    counted. :meth:`close` waits up to ``close_timeout_s`` for the remaining calls.

    A subclass implements :meth:`open_run`, :meth:`log_metrics` and :meth:`finish`, all called in that thread.

    Args:
        run_dir, config, start_step: see :class:`BaseTracker`.
        project_name: project or experiment that the run belongs to.
        experiment_name: name of the run; None for the name of its directory.
        max_samples: number of samples of each validation to log, if the tracker can show samples.
        close_timeout_s: time in seconds that the end of the run waits for the library.

    Raises:
        ConfigError: an option is out of range.
    """

    #: The module to import, and its name as an extra of this distribution.
    library: ClassVar[str]

    def __init__(
        self,
        run_dir: Path,
        config: dict[str, Any],
        start_step: int = 0,
        project_name: str = "rollcast",
        experiment_name: str | None = None,
        max_samples: int = 16,
        close_timeout_s: float = 60.0,
    ) -> None:
        super().__init__(run_dir, config, start_step)
        if max_samples < 0 or close_timeout_s < 0:
            raise ConfigError(f"tracker_kwargs.{self.library}: max_samples and close_timeout_s are not negative")
        self.project_name = project_name
        self.experiment_name = experiment_name or run_dir.absolute().name
        self._max_samples = max_samples
        self._close_timeout_s = close_timeout_s
        self._error: BaseException | None = None
        self._failures = 0
        self._left_out = 0
        self._is_open = False
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(_MOST_WAITING)
        # A daemon thread, so that a library that never returns cannot keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"rollcast-{self.library}", daemon=True)
        self._thread.start()
        self._submit(self._open)

    @classmethod
    def check_requirements(cls) -> None:
        if importlib.util.find_spec(cls.library) is None:
            raise PluginLoadError(
                f"trackers: {cls.library} needs the package {cls.library!r}, which is not installed; "
                f"pip install 'rollcast-trackers[{cls.library}]'"
            )

    # -- methods of a subclass, called in the thread --------------------------------------------------

    @abstractmethod
    def open_run(self, library: Any) -> None:
        """Begin or continue the run and log the config; if this raises, no other method is called."""

    @abstractmethod
    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of one step."""

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log samples of one validation; by default, do nothing."""

    @abstractmethod
    def finish(self, error: BaseException | None) -> None:
        """Close the run; ``error`` is the exception that ended it, or None."""

    # -- hooks --------------------------------------------------------------------------------

    @hookimpl
    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue the metrics of one step."""
        copy = dict(metrics)
        self._submit(lambda: self.log_metrics(step, copy))

    @hookimpl
    def on_validation_end(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Queue samples of one validation; its metrics are among those of the step."""
        copies = [dict(sample) for sample in samples[: self._max_samples]]
        if copies:
            self._submit(lambda: self.log_samples(step, copies))

    @hookimpl
    def on_fit_end(self, error: BaseException | None) -> None:
        """Save the error that ended the run, if any."""
        self._error = error

    def close(self) -> None:
        """Wait up to ``close_timeout_s`` for the queued calls; may be called again."""
        if self._thread.is_alive():
            try:
                self._queue.put(None, timeout=self._close_timeout_s)
                self._thread.join(self._close_timeout_s)
            except queue.Full:
                self._left_out += 1
        if self._thread.is_alive():
            self.logger.warning(
                "%s did not end within %g s and is left behind; what it shows is not complete",
                self.library,
                self._close_timeout_s,
            )
        if self._failures > 1 or self._left_out:
            self.logger.warning("%s failed %d times, %d calls left out", self.library, self._failures, self._left_out)
            self._failures = self._left_out = 0

    # -- state that a continued run needs -----------------------------------------------------

    def load_id(self) -> str | None:
        """Return the id that :meth:`save_id` saved, if this run continues an earlier one; else None."""
        file = self._id_file
        return str(json.loads(file.read_text())["id"]) if self.start_step and file.is_file() else None

    def save_id(self, run_id: str) -> None:
        """Save the library's id of the run in the run directory, for a continued run."""
        self._id_file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._id_file, json.dumps({"id": run_id}) + "\n")

    @property
    def _id_file(self) -> Path:
        return self.run_dir / "trackers" / f"{self.library}.json"

    # -- the thread ---------------------------------------------------------------------------

    def _submit(self, call: Callable[[], None]) -> None:
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            self._left_out += 1

    def _open(self) -> None:
        self.open_run(importlib.import_module(self.library))
        self._is_open = True

    def _work(self) -> None:
        self._try(self._queue.get())
        while (call := self._queue.get()) is not None:
            if self._is_open:
                self._try(call)
            else:
                self._left_out += 1
        if self._is_open:
            self._try(lambda: self.finish(self._error))

    def _try(self, call: Callable[[], None] | None) -> None:
        if call is None:
            return
        try:
            call()
        except Exception as error:
            self._failures += 1
            if self._failures == 1:
                reason = f"{type(error).__name__}: {error}"
                self.logger.warning("%s failed, and the run goes on (%s)", self.library, reason, exc_info=error)
