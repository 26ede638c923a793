"""Configuration: schemas, and their assembly from installed plugins by Hydra."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollcast.config.assembly import Composed, compose
    from rollcast.config.validation import build_section

__all__ = ["Composed", "build_section", "compose"]


def __getattr__(name: str) -> Any:
    if name in ("Composed", "compose"):
        from rollcast.config import assembly

        return getattr(assembly, name)
    if name == "build_section":
        from rollcast.config.validation import build_section

        return build_section
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
