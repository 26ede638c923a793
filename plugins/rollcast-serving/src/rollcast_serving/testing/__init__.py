"""Conformance suites of weight syncs and admissions; they need ``rollcast-serving[testing]``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollcast import lazy_exports

if TYPE_CHECKING:
    from rollcast_serving.testing.admissions import AdmissionSuite as AdmissionSuite
    from rollcast_serving.testing.weight_syncs import WeightSyncSuite as WeightSyncSuite

# Lazily, because a server of the tests imports one module of this package and no pytest.
__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {"admissions": ["AdmissionSuite"], "weight_syncs": ["WeightSyncSuite"]},
)
