"""Hypothesis measures no times: a machine under load is no failure."""

from __future__ import annotations

try:
    from hypothesis import settings
except ImportError:  # an engine's environment has none
    pass
else:
    settings.register_profile("rollcast", deadline=None)
    settings.load_profile("rollcast")
