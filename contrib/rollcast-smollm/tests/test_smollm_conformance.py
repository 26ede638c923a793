"""The preprocessor passes the suite that third parties are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from rollcast_data.testing import PreprocessorSuite


class TestSmolLMWords(PreprocessorSuite):
    name = "smollm_words"
    uses_seed = True
    columns: ClassVar[Mapping[str, Sequence[str]]] = {"t*": ("prompt", "ground_truth")}

    @pytest.fixture(autouse=True)
    def _needs(self, gguf: Path) -> None:
        """Skip the suite where the model is not installed."""
