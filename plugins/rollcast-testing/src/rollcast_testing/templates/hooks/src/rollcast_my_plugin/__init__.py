"""The hooks ``my_plugin``: the file ``step.txt`` in the run directory, for other programs to watch."""

from pathlib import Path
from typing import Any

from rollcast.contracts.hooks import hookimpl


class MyPlugin:
    """A listener that keeps the number of the last complete step in ``step.txt``."""

    def __init__(self) -> None:
        self.file: Path | None = None

    @hookimpl
    def on_configure(self, config: Any) -> None:
        """Remember the run directory, which the trainer makes later."""
        self.file = Path(config.run_dir) / "step.txt"

    @hookimpl
    def on_step_end(self, step: int) -> None:
        """Write the number of the step."""
        if self.file is not None and self.file.parent.is_dir():
            self.file.write_text(f"{step}\n")
