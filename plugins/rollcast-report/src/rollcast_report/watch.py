"""``rollcast watch``, which follows a run in the terminal by its files."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollcast.contracts.command import format_clock, print_lines
from rollcast_report.charts import format_number
from rollcast_report.follow import Follower, Frame

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

__all__ = ["describe_step", "render_frame", "sparkline", "watch", "watch_app"]

watch_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_BLOCKS = "▁▂▃▄▅▆▇█"
_STYLES = {"running": "cyan", "finished": "green", "failed": "bold red", "interrupted": "yellow", "starting": "cyan"}
#: Curves, where the run has the metric: metric, label, unit.
_CURVES = (
    ("reward/mean", "reward", ""),
    ("actor/pg_loss", "loss", ""),
    ("sft/loss", "loss", ""),
    ("actor/kl", "kl", ""),
    ("actor/entropy", "entropy", ""),
    ("rollout/response_length_mean", "response tokens", ""),
    ("staleness/mean", "token age", ""),
)
_MOST_STAGES = 8


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a line of block characters, one per value or per mean of neighbours if there are more than fit."""
    if not values or width < 1:
        return ""
    if len(values) > width:
        edges = [place * len(values) // width for place in range(width + 1)]
        values = [sum(values[start:end]) / (end - start) for start, end in itertools.pairwise(edges)]
    low, high = min(values), max(values)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        return _BLOCKS[3] * len(values)
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round((value - low) / (high - low) * top)] for value in values)


@watch_app.command()
def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    once: Annotated[bool, typer.Option("--once", help="Print the present state and exit.")] = False,
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Follow a run in the terminal: steps, rates, remaining time, curves, stage times, memory, rollouts and alarms.

    Reads the files of the run directory only, so it works from another process and after the end of the run. Without a
    terminal it prints a line for each step. Ctrl-C stops watching, not the run.
    """
    from rich.console import Console

    follower = Follower(run)
    console = Console(markup=False, highlight=False, emoji=False)  # folds long lines, which a live display would cut
    if once:
        console.print(render_frame(follower.read(), console.width))
    elif console.is_terminal and not console.is_dumb_terminal:
        _watch_live(follower, console, interval)
    else:
        _watch_plain(follower, interval)


def _watch_live(follower: Follower, console: Console, interval: float) -> None:
    from rich.live import Live

    frame = follower.read()
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            live.update(render_frame(frame, console.width), refresh=True)
            if _has_ended(frame):
                return
            time.sleep(interval)
            frame = follower.read()


def _watch_plain(follower: Follower, interval: float) -> None:
    shown: set[str] = set()
    step: int | None = None
    while True:
        frame = follower.read()
        if frame.step is not None and frame.step != step:
            step = frame.step
            print_lines(describe_step(frame))
        for alarm in frame.alarms:
            if alarm not in shown and "no sign of life" not in alarm:
                print_lines(f"alarm: {alarm}")
                shown.add(alarm)
        is_late = any("no sign of life" in alarm for alarm in frame.alarms)
        if is_late and "late" not in shown:
            print_lines(f"alarm: {next(text for text in frame.alarms if 'no sign of life' in text)}")
        shown = shown | {"late"} if is_late else shown - {"late"}
        if _has_ended(frame):
            print_lines(frame.state, *([f"resume it with: {frame.command}"] if frame.command else []))
            return
        time.sleep(interval)


def _has_ended(frame: Frame) -> bool:
    return frame.state not in ("running", "starting")


def describe_step(frame: Frame) -> str:
    """Return the last step as one line."""
    total = frame.status.total_steps
    parts = [f"step {frame.step}/{total}" if total else f"step {frame.step}"]
    if "time/step_s" in frame.metrics:
        parts.append(f"{frame.metrics['time/step_s']:.2f} s")
    for metric, label, unit in _CURVES[:4]:
        if metric in frame.metrics:
            parts.append(f"{label} {format_number(frame.metrics[metric], unit)}")
    if frame.validated and frame.validated[0] == frame.step:
        parts.append(_validation(frame))
    if frame.remaining_s is not None:
        parts.append(f"{format_clock(frame.remaining_s)} left")
    return "  ".join(parts)


# -- the frame --------------------------------------------------------------------------------


def render_frame(frame: Frame, width: int) -> RenderableType:
    """Return the state of a run for a terminal of some width."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in _rows(frame, width):
        table.add_row(label, text if isinstance(text, Text) else Text(text))
    parts: list[RenderableType] = [_head(frame, width), table]
    parts += [Text(f"! {alarm}", style="bold red") for alarm in frame.alarms]
    if frame.command:
        parts.append(Text(f"resume it with: {frame.command}", style="yellow", overflow="fold"))
    return Group(*parts)


def _head(frame: Frame, width: int) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    total, done = frame.status.total_steps, frame.step or 0
    title = Text.assemble((frame.name, "bold"), "  ", (frame.state, _STYLES.get(frame.state, "")))
    title.truncate(max(10, width - 46), overflow="ellipsis")
    bar = ProgressBar(total=total, completed=done, width=max(8, min(30, width - 60)))
    times = f"{done}/{total or '?'}"
    if frame.remaining_s is not None:
        times += f"  {format_clock(frame.remaining_s)} left"
    head = Table.grid(padding=(0, 2))
    head.add_row(title, bar, Text(times, style="cyan"))
    return head


def _rows(frame: Frame, width: int) -> Iterable[tuple[str, str | Text]]:
    """Yield label and text of each line that the run has figures for."""
    if frame.step is None:
        yield "", "waiting for the first step" if frame.state in ("running", "starting") else "no step was recorded"
    yield from _rate_rows(frame)
    room = max(8, min(60, width - 44))
    for metric, label, unit in _CURVES:
        values = frame.series.get(metric, ())
        if values:
            low, high = format_number(min(values), unit), format_number(max(values), unit)
            span = f"  {low} to {high}" if len(values) > 1 else ""
            yield label, f"{format_number(values[-1], unit):>8} {sparkline(values, room)}{span}"
    if frame.validated:
        yield "validation", f"{_validation(frame)} (step {frame.validated[0]})"
    yield from _stage_rows(frame, width)
    yield from _resource_rows(frame.metrics)


def _rate_rows(frame: Frame) -> Iterable[tuple[str, str]]:
    parts = []
    if frame.step_s is not None:
        parts.append(f"{frame.step_s:.3g} s/step")
    for metric, unit in (("rollout/tokens_per_s", "tok/s sampled"), ("perf/throughput", "tok/s a process")):
        if metric in frame.metrics:
            parts.append(f"{format_number(frame.metrics[metric])} {unit}")
    if frame.status.elapsed_s:
        parts.append(f"{format_clock(frame.status.elapsed_s)} elapsed")
    if frame.idle_s is not None and not _has_ended(frame):
        parts.append(f"last sign {format_clock(frame.idle_s)} ago")
    if parts:
        yield "rate", "  ·  ".join(parts)


def _validation(frame: Frame) -> str:
    values = frame.validated[1] if frame.validated else {}
    for name, unit in (("val/accuracy", "%"), ("val/loss", ""), ("val/reward", "")):
        if name in values:
            text = f"{name.removeprefix('val/')} {format_number(values[name], unit)}"
            bounds = {key.rpartition("/")[2]: value for key, value in values.items() if key.startswith("val/acc/mean@")}
            if unit == "%" and {"low", "high"} <= bounds.keys():
                text += f" ({format_number(bounds['low'], unit)} to {format_number(bounds['high'], unit)})"
            return text
    return ", ".join(f"{name} {value:.4g}" for name, value in list(values.items())[:2])


def _stage_rows(frame: Frame, width: int) -> Iterable[tuple[str, Text]]:
    """Yield the stages of the last step, the longest first, with bars of their share."""
    from rich.text import Text

    stages = {
        name.removeprefix("time/").removesuffix("_s"): value
        for name, value in frame.metrics.items()
        if name.startswith("time/") and name != "time/step_s" and value > 0
    }
    whole = max(frame.metrics.get("time/step_s", 0.0), *stages.values(), 1e-9) if stages else 1.0
    room = max(8, min(30, width - 50))
    for place, (name, seconds) in enumerate(sorted(stages.items(), key=lambda item: -item[1])[:_MOST_STAGES]):
        filled = round(seconds / whole * room)
        text = Text.assemble(("█" * filled, "cyan"), ("░" * (room - filled), "dim"), f" {seconds:.3g} s  {name}")
        yield ("stages" if place == 0 else ""), text


def _resource_rows(metrics: Mapping[str, float]) -> Iterable[tuple[str, str]]:
    memory = [
        f"{label} {metrics[name]:.3g} GB"
        for name, label in (
            ("perf/max_memory_allocated_gb", "device"),
            ("perf/max_memory_reserved_gb", "reserved"),
            ("perf/cpu_memory_used_gb", "process"),
        )
        if name in metrics
    ]
    if memory:
        yield "memory", "  ·  ".join(memory)
    queue = [
        f"{metrics[f'rollout/groups_{name}']:.0f} {name}"
        for name in ("waiting", "running", "ready", "dropped")
        if f"rollout/groups_{name}" in metrics
    ]
    if queue:
        idle = f"  ·  engines idle {metrics['rollout/idle_s']:.2g} s" if "rollout/idle_s" in metrics else ""
        yield "rollout groups", "  ".join(queue) + idle
    if "staleness/max" in metrics:
        yield (
            "staleness",
            f"mean {metrics.get('staleness/mean', 0.0):.3g}, most {metrics['staleness/max']:.0f} versions",
        )
    if "rollout/weight_version" in metrics:
        took = f", sent in {metrics['sync/seconds']:.3g} s" if "sync/seconds" in metrics else ""
        yield "weights", f"version {metrics['rollout/weight_version']:.0f}{took}"
