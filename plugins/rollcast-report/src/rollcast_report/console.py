"""The tracker ``console``: live progress on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcast.contracts.command import format_clock
from rollcast.contracts.hooks import hookimpl
from rollcast.contracts.tracker import BaseTracker
from rollcast_report.samples import text_of

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

__all__ = ["ConsoleTracker"]

# Metrics shown for a step, in this order, as metric, label and format.
_SHOWN = (
    ("reward/mean", "reward", "{:.3f}"),
    ("sft/loss", "loss", "{:.4f}"),
    ("actor/kl", "kl", "{:.2g}"),
    ("actor/entropy", "entropy", "{:.3g}"),
    ("rollout/tokens_per_s", "tok/s", "{:.0f}"),
    ("sft/tokens_per_s", "tok/s", "{:.0f}"),
)
_RECENT_STEPS = 20
#: Prompts whose first and last answers are shown when a run ends, and the most characters of a prompt and an answer.
_COMPARED = 4
_LONGEST_PROMPT, _LONGEST_ANSWER = 40, 100
_REFRESH_PER_SECOND = 4


def _step_values(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return label and text of each metric that a step shows; absent metrics are left out."""
    return [(label, form.format(metrics[key])) for key, label, form in _SHOWN if metrics.get(key) is not None]


def _validation_values(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the label and text of a validation's accuracy, or of its reward, score or loss."""
    validated = {key: value for key, value in metrics.items() if key.startswith("val/")}
    bare = {key.removeprefix("val/"): value for key, value in (validated or metrics).items()}
    for names in (("accuracy",), ("reward/mean", "reward", "score", "loss"), tuple(bare)[:1]):
        values = [(name.split("/")[0], f"{bare[name]:.3f}") for name in names if bare.get(name) is not None]
        if values:
            return values
    return []


def _line(text: str) -> str:
    return " ".join(text.split())


def _clipped(text: str) -> str:
    line = _line(text)
    return line if len(line) <= _LONGEST_ANSWER else f"{line[: _LONGEST_ANSWER - 1]}…"


class ConsoleTracker(BaseTracker):
    """A tracker that shows the progress and the metrics of a run.

    Args:
        run_dir, config, start_step: see :class:`BaseTracker`.
        console: console to write to; None for standard output.
    """

    def __init__(
        self, run_dir: Path, config: dict[str, Any], start_step: int = 0, console: Console | None = None
    ) -> None:
        super().__init__(run_dir, config, start_step)
        if console is None:
            from rich.console import Console

            console = Console()
        self._console = console
        self._live: Live | None = None
        self._total: int | None = None
        self._name = ""
        self._step = start_step
        self._metrics: dict[str, float] = {}
        self._validation = ""
        self._validated_step: int | None = None
        self._answers: dict[int, dict[str, str]] = {}
        self._ends: deque[float] = deque(maxlen=_RECENT_STEPS + 1)
        self._started = time.monotonic()

    @hookimpl
    def on_fit_start(self, trainer: object) -> None:
        """Read the run's length; start the live display on a terminal."""
        self._total = getattr(trainer, "total_steps", None)
        self._name = str(getattr(trainer, "run_name", "") or self.run_dir.name)
        self._started = time.monotonic()
        self._ends.append(self._started)
        if self._console.is_terminal and not self._console.is_dumb_terminal and self._live is None:
            from rich.live import Live

            self._live = Live(
                console=self._console, get_renderable=self._render, refresh_per_second=_REFRESH_PER_SECOND
            )
            self._live.start()

    @hookimpl
    def on_metrics(self, trainer: object, step: int, metrics: Mapping[str, float]) -> None:
        """Show one step."""
        self._step = step
        if step != self._validated_step:
            validation = {key: value for key, value in metrics.items() if key.startswith("val/")}
            self._show_validation(step, validation, None)
        if step <= 0:  # the validation before training is not a step: time starts to count now
            self._ends.clear()
            self._ends.append(time.monotonic())
            return
        self._ends.append(time.monotonic())
        self._metrics = dict(metrics)
        if self._live is None:
            self._say(step, self._line(metrics))

    @hookimpl
    def on_validation_end(
        self, trainer: object, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]]
    ) -> None:
        """Show one validation."""
        self._show_validation(step, metrics, len(samples))
        self._keep_answers(step, samples)

    @hookimpl
    def on_checkpoint_saved(self, trainer: object, step: int, path: Path) -> None:
        """Print the path of the checkpoint."""
        path = Path(path)
        shown = path.relative_to(self.run_dir) if path.is_relative_to(self.run_dir) else path
        self._say(step, f"checkpoint {shown}")

    @hookimpl
    def on_recovery(self, trainer: object, step: int, message: str) -> None:
        """Print the cause of a recovery and the step from which the run continues."""
        self._say(step, message)

    @hookimpl
    def on_fit_end(self, trainer: object, error: BaseException | None) -> None:
        """Restore the terminal and print how the run ended."""
        self.close()
        if error is None:
            self._compare_answers()
        took = format_clock(time.monotonic() - self._started)
        # The message of an error is left to whoever reports it, so that it is not shown twice.
        self._say(self._step, f"finished in {took}" if error is None else f"stopped after {took}")

    @hookimpl
    def on_exception(self, trainer: object, error: BaseException) -> None:
        """Restore the terminal before the error is printed."""
        self.close()

    def close(self) -> None:
        """Stop the live display and restore the terminal; may be called again."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _say(self, step: int, text: str) -> None:
        """Print a permanent line, above the live display if there is one."""
        self._console.print(f"{self._count(step)}  {text}", markup=False, highlight=False, soft_wrap=True)

    def _count(self, step: int) -> str:
        return f"step {step}/{self._total}" if self._total else f"step {step}"

    def _line(self, metrics: Mapping[str, float]) -> str:
        seconds = metrics.get("time/step_s")
        parts = [] if seconds is None else [f"{seconds:.2f} s"]
        return "  ".join(parts + [f"{label} {text}" for label, text in _step_values(metrics)])

    def _show_validation(self, step: int, metrics: Mapping[str, float], count: int | None) -> None:
        values = _validation_values(metrics)
        if not values:
            return
        self._validated_step = step
        text = "  ".join(f"{label} {value}" for label, value in values)
        self._validation = f"val {text} (step {step})"
        self._say(step, f"validation {text}" + (f" ({count} sample{'s' if count > 1 else ''})" if count else ""))

    def _keep_answers(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Keep the answers to a few prompts of the first and of the last validation."""
        answers: dict[str, str] = {}
        for sample in samples:
            prompt, response = sample.get("prompt"), sample.get("response")
            if prompt and isinstance(response, str):
                answers.setdefault(text_of(prompt), response)
            if len(answers) == _COMPARED:
                break
        if answers:
            first = min(self._answers, default=step)
            self._answers = {key: value for key, value in self._answers.items() if key == first} | {step: answers}

    def _compare_answers(self) -> None:
        """Print the kept answers side by side."""
        if len(self._answers) < 2:
            return
        from rich.table import Table
        from rich.text import Text

        (before, old), (after, new) = sorted(self._answers.items())
        table = Table("prompt", f"step {before}", f"step {after}", title="held-out answers", title_justify="left")
        for prompt in (common for common in old if common in new):
            # The end of a prompt is what differs: a system message and examples come first.
            shown = _line(prompt)
            shown = shown if len(shown) <= _LONGEST_PROMPT else f"…{shown[1 - _LONGEST_PROMPT :]}"
            table.add_row(*map(Text, (shown, _clipped(old[prompt]), _clipped(new[prompt]))))
        self._console.print(table)

    def _remaining(self) -> str:
        """Return the remaining time, estimated by the wall clock so that validations and checkpoints count."""
        if not self._total or len(self._ends) < 2:
            return "-:--"
        per_step = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        since = min(time.monotonic() - self._ends[-1], per_step)
        return format_clock(max(0.0, per_step * (self._total - self._step) - since))

    def _render(self) -> RenderableType:
        """Return the live display: a line with the progress and a line with the metrics."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        head = Table.grid(padding=(0, 2), expand=False)
        for _ in range(5):
            head.add_column(no_wrap=True)
        seconds = self._metrics.get("time/step_s")
        head.add_row(
            Text(self._name, style="bold", overflow="ellipsis"),
            ProgressBar(
                total=self._total,
                completed=self._step,
                width=max(8, min(40, self._console.width - 60)),
                complete_style="cyan",
                finished_style="green",
            ),
            Text(f"{self._step}/{self._total or '?'}"),
            Text("" if seconds is None else f"{seconds:.2f} s/step", style="cyan"),
            Text(f"ETA {self._remaining()}", style="cyan") if self._total else Text(""),
        )
        line = Text(no_wrap=True, overflow="ellipsis")
        shown = [f"{label} {text}" for label, text in _step_values(self._metrics)]
        for part in [*shown[:1], *([self._validation] if self._validation else []), *shown[1:]]:
            line.append("  ·  " if line else "", style="dim")
            line.append(part, style="" if line else "green")
        return Group(head, line or Text("waiting for the first step", style="dim"))
