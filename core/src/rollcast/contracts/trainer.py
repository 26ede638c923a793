"""Contract of trainers, which ``rollcast train`` starts.

Example::

    class MyTrainer(BaseTrainer):
        @classmethod
        def launch(cls, config):
            ...
            return RunResult(step=config.trainer_kwargs.get("steps", 10), run_dir=Path(config.run_dir))

Its keys are those of a schema of its own (``rollcast.contracts.config``); or, without one, the free mapping
``trainer_kwargs``.
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
    """The result of a run: last step, run directory, and the last value of each metric."""

    step: int
    run_dir: Path
    metrics: Mapping[str, float] = field(default_factory=dict)


class BaseTrainer(ABC):
    """Base class of trainers, which run a training algorithm on worker groups.

    A trainer owns the run directory and the worker groups, and shuts the groups down.
    """

    @classmethod
    @abstractmethod
    def launch(cls, config: DictConfig) -> RunResult:
        """Run training from a composed config to its end; start and stop all processes it needs.

        A trainer reads ``config.trainer_kwargs``, or refuses a mapping that is not empty: a key without effect is a
        mistake that nobody sees.

        Raises:
            RollcastError: a problem that the user can solve, explained by its message.
        """


trainers: Registry[type[BaseTrainer]] = Registry(
    "rollcast.trainers", subclass_of(BaseTrainer), "trainer.name", description="training loops"
)
