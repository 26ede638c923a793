"""The recipes pass the suite that third parties are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest

from rollcast_testing import RecipeSuite

RECIPES = ("calculator_program", "calculator_tool", "calculator_warmup")


class TestRecipes(RecipeSuite):
    """The suite, for each recipe of this distribution."""

    overrides: ClassVar[Sequence[str]] = ()

    @pytest.fixture(autouse=True, params=RECIPES)
    def _recipe(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(self, "name", request.param, raising=False)
