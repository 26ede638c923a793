"""The contract of trainers: what ``rollcast train`` starts.

Example::

    class MyTrainer(BaseTrainer):
        def fit(self) -> RunResult:
            ...
            return RunResult(step=self.step, run_dir=self.run_dir)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rollcast.plugins import Registry, subclass_of

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["BaseTrainer", "RunResult", "trainers"]


@dataclass(frozen=True)
class RunResult:
    """How a run ended: its last step, its directory, and the last value of each metric."""

    step: int
    run_dir: Path
    metrics: Mapping[str, float] = field(default_factory=dict)


class BaseTrainer(ABC):
    """A training algorithm over worker groups.

    The command line builds the config, then calls :meth:`launch`. A trainer owns the run
    directory, the worker groups and their shutdown.
    """

    @classmethod
    @abstractmethod
    def launch(cls, config: DictConfig) -> RunResult:
        """Run to the end from a composed config; starts and stops everything it needs.

        Raises:
            RollcastError: with one readable message for whatever the user can mend.
        """


trainers: Registry[type[BaseTrainer]] = Registry(
    "rollcast.trainers", subclass_of(BaseTrainer), "trainer.name", description="training loops"
)
