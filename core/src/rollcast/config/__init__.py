"""Configuration, composed by Hydra from the files of installed plugins and validated against the plugins' schemas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollcast._lazy import lazy_exports

if TYPE_CHECKING:
    from rollcast.config.assembly import Composed as Composed
    from rollcast.config.assembly import compose as compose
    from rollcast.config.sections import build_section as build_section

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {"rollcast.config.assembly": ["Composed", "compose"], "rollcast.config.sections": ["build_section"]},
)
