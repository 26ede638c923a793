"""``rollcast verl-config``, which translates a configuration of verl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rollcast.contracts.command import build_console, print_lines

__all__ = ["app", "verl_config"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_ORDER = ("translated", "same", "no counterpart", "unknown", "not set")


@app.command("verl-config")
def verl_config(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML of verl, such as one that a run has saved.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="OVERRIDES", help="verl's, such as algorithm.adv_estimator=grpo.")
    ] = None,
    complete: Annotated[
        bool, typer.Option("--complete", help="Put the file over verl's own defaults, which needs verl.")
    ] = False,
    check: Annotated[bool, typer.Option(help="Compose the result with rollcast's schemas.")] = True,
    write: Annotated[
        Path | None, typer.Option("--write", metavar="FILE", help="Write the arguments, one a line.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Keys and arguments as a JSON object.")] = False,
) -> None:
    """Translate a configuration of verl into arguments of 'rollcast train'.

    Every key of the file is listed with what became of it. Keys that verl's file does not have keep rollcast's
    defaults; --complete translates verl's defaults too.
    """
    from rollcast_verl.translate import load, translate

    translation = translate(load(file, overrides or (), complete))
    if check:
        translation.check()
    if write is not None:
        write.write_text("".join(f"{override}\n" for override in translation.overrides))
    if as_json:
        lines = [vars(line) | {"overrides": dict(line.overrides)} for line in translation.lines]
        typer.echo(json.dumps({"keys": lines, "overrides": translation.overrides}, indent=2, default=str))
        return
    console = build_console()
    for state in _ORDER:
        some = [line for line in translation.lines if line.state == state]
        if not some:
            continue
        console.print(f"{state} ({len(some)})", style="bold")
        for line in some:
            target = ", ".join(line.overrides)
            arrow = f" → {target}" if target and target != line.key else ""
            note = f"  ({line.note})" if line.note and state != "same" else ""
            print_lines(f"  {line.key}={line.value}{arrow}{note}")
    print_lines("", "rollcast train \\", *(f"  {_quoted(override)} \\" for override in translation.overrides[:-1]))
    print_lines(f"  {_quoted(translation.overrides[-1])}")


def _quoted(text: str) -> str:
    import shlex

    return shlex.quote(text)
