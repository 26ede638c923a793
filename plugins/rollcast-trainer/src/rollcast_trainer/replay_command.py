"""``rollcast replay``, which runs a recorded call again in this process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollcast.contracts.command import Traceback, hide_library_bars, print_lines

if TYPE_CHECKING:
    from rollcast_trainer.recording import Replay

__all__ = ["app", "replay"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def replay(
    record: Annotated[Path, typer.Argument(metavar="RECORD", help="A record, which is a folder in RUN_DIR/records.")],
    debug: Annotated[bool, typer.Option("--debug", help="Stop in pdb at the start of the worker's method.")] = False,
    atol: Annotated[float, typer.Option("--atol", help="Largest absolute difference that counts as equal.")] = 1e-5,
    trust_pickle: Annotated[
        bool, typer.Option("--trust-pickle", help="Load the record's pickles, which can execute any code.")
    ] = False,
    _traceback: Traceback = False,
) -> None:
    """Run a recorded call again on the local runtime and compare the outcomes; exit code 1 if they differ."""
    from rollcast_trainer.recording import replay as run_again

    hide_library_bars()
    again = run_again(record, debug, trust_pickle)
    print_lines(*_lines(again, atol))
    if not again.agrees(atol):
        raise typer.Exit(1)


def _lines(again: Replay, atol: float) -> list[str]:
    call = again.record
    lines = [f"{call.group}.{call.role}.{call.method}, recorded with {call.world_size} ranks, replayed with 1"]
    width = max((len(found.where) for found in again.findings), default=0)
    for found in again.findings:
        mark = "same" if found.difference == 0 else f"{found.difference:.3g}"
        lines.append(f"  {found.where:<{width}}  {mark:>10}  {found.detail}")
    if again.recorded is None:
        lines.append("the recorded run ended before the call did; there is nothing to compare with")
    else:
        lines += [f"recorded: {again.recorded.error}"] if again.recorded.error else []
    lines += [f"replayed: {again.replayed.error}"] if again.replayed.error else []
    lines.append(f"agrees to {atol:g}" if again.agrees(atol) else f"differs by more than {atol:g}")
    return lines
