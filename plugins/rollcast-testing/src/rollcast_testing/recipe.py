"""The conformance suite of recipes, a class of pytest tests to inherit.

Example, in a plugin's tests::

    from rollcast_testing import RecipeSuite

    class TestSums(RecipeSuite):
        name = "sums"
        overrides = ("model.path=model",)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from rollcast import Composed, compose
from rollcast.contracts.trainer import trainers
from rollcast.errors import RollcastError
from rollcast_testing.checks import require

__all__ = ["RecipeSuite"]


#: Composed recipes by name and overrides.
_composed: dict[tuple[str, ...], Composed] = {}


class RecipeSuite:
    """Conformance tests of one recipe, without a run; set :attr:`name`, and :attr:`overrides` for the user's keys."""

    #: Name of the recipe, as in ``recipe=<name>``.
    name: ClassVar[str] = ""
    #: Overrides that every user has to write, such as ``model.path=...``.
    overrides: ClassVar[Sequence[str]] = ()
    #: True if the plugins that the recipe names are installed with it, so that they load here.
    loads: ClassVar[bool] = True

    def compose(self, *more: str) -> Composed:
        """Compose the recipe as ``rollcast train`` does, with further overrides."""
        if not self.name:
            raise NotImplementedError(f"{type(self).__name__} must set `name`")
        return compose([f"recipe={self.name}", *self.overrides, *more], needs_trainer=True)

    def composed(self) -> Composed:
        """Return :meth:`compose` of earlier tests; a composed configuration is frozen."""
        key = (self.name, *self.overrides)
        if key not in _composed:
            _composed[key] = self.compose()
        return _composed[key]

    def test_it_composes(self) -> None:
        config = self.composed().config
        require(str(config.trainer.name) in trainers, f"the trainer {config.trainer.name!r} is installed")
        require(bool(config.run_dir), "the recipe has a run_dir")

    def test_it_composes_the_same_each_time(self) -> None:
        require(self.compose().plain() == self.composed().plain(), "the recipe is the same each time")

    def test_its_plugins_load(self) -> None:
        if not self.loads:
            pytest.skip("loads is False")
        self.composed().load_plugins()

    def test_nothing_is_missing(self) -> None:
        """Check that the recipe and ``overrides`` set every mandatory key: no value is ``???``."""
        missing = [path for path, value in _leaves(self.composed().plain()) if value == "???"]
        require(not missing, f"every mandatory key has a value, by the recipe or by overrides: {missing}")

    def test_a_user_can_override_it(self) -> None:
        config = self.compose("run_dir=runs/somewhere-else", "trainer.total_steps=7").config
        require(config.run_dir == "runs/somewhere-else", "run_dir can be overridden")
        require(config.trainer.total_steps == 7, "trainer.total_steps can be overridden")

    def test_files_move_with_the_run_directory(self) -> None:
        """Check that no path of the recipe is of the machine where it was written."""
        plain = self.composed().plain()
        joined = " ".join(self.overrides)
        wrong = [
            f"{path}={value}"
            for path, value in _leaves(plain)
            if isinstance(value, str) and re.match(r"(/home/|/root/|/Users/|[A-Z]:\\)", value) and value not in joined
        ]
        require(not wrong, f"a recipe has no path of somebody's own: {wrong}")

    def test_a_misspelt_key_is_refused(self) -> None:
        with pytest.raises(RollcastError, match="total_stepz"):
            self.compose("trainer.total_stepz=7")


def _leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in _leaves(item, f"{path}.{key}".lstrip("."))]
    if isinstance(value, list):
        return [leaf for number, item in enumerate(value) for leaf in _leaves(item, f"{path}[{number}]")]
    return [(path, value)]
