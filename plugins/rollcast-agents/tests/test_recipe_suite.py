"""The recipes pass the suite that third parties are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest

from rollcast_testing import RecipeSuite

RECIPES = ("gsm8k_tool", "dapo_math_python")


class TestRecipes(RecipeSuite):
    """The suite, for each recipe of this distribution."""

    overrides: ClassVar[Sequence[str]] = ("model.path=model", "data.preprocess_source=raw")

    @pytest.fixture(autouse=True, params=RECIPES)
    def _recipe(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(self, "name", request.param, raising=False)
