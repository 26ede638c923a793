"""Conformance suites of datasets and preprocessors; they need ``rollcast-data[testing]``."""

from __future__ import annotations

from rollcast_data.testing.datasets import DatasetSuite
from rollcast_data.testing.preprocessors import PreprocessorSuite

__all__ = ["DatasetSuite", "PreprocessorSuite"]
