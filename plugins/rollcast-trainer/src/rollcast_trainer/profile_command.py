"""``rollcast profile``: what a recipe's passes, generation and weight sync cost on the devices at hand."""

from __future__ import annotations

import typer

__all__ = ["app"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
