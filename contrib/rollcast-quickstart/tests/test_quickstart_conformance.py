"""The preprocessor passes the suite that third parties are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from rollcast_data.testing import PreprocessorSuite


class TestSortDigits(PreprocessorSuite):
    name = "sort_digits"
    uses_seed = True
    columns: ClassVar[Mapping[str, Sequence[str]]] = {"sft*": ("prompt", "response"), "t*": ("prompt", "ground_truth")}
