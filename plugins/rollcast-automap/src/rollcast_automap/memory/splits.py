"""Checks that a model can be split as configured, before anything starts."""

from __future__ import annotations

from dataclasses import replace

from rollcast.contracts.engine import EngineSetup
from rollcast.contracts.worker import WorkerContext
from rollcast.errors import ConfigError
from rollcast_automap.memory.memory_model import ModelSize
from rollcast_trainer.api import ParallelSizes, RunSettings

__all__ = ["check_engine", "check_split"]


def check_engine(settings: RunSettings) -> None:
    """Check the engine's keys for the run's number of ranks, by building the engine without initializing it.

    Raises:
        ConfigError: the engine rejects a key.
    """
    optim = settings.actor.optim
    # The trainer sets the schedule's length only after it has read the data, so use the known steps here.
    steps = max(optim.total_training_steps, settings.trainer.total_steps or -1)
    known = replace(optim, total_training_steps=steps) if steps > 0 else None
    context = WorkerContext(world_size=settings.world_size)
    settings.engine_class(EngineSetup("language_model", settings.model, settings.engine, known, context))


def check_split(settings: RunSettings, size: ModelSize) -> None:
    """Check that the parallel sizes divide the model's heads and layers.

    Raises:
        ConfigError: a size does not divide; names the key, the model's number, and sizes that would fit.
    """
    sizes = ParallelSizes.read(settings.engine)
    engine, rollout = settings.engine.name, settings.rollout
    keys = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    # The engine checks uneven stages when it starts.
    is_even = all(getattr(settings.engine, key, None) is None for key in keys)
    stages = sizes.pipeline if is_even else 1
    chunks = (getattr(settings.engine, "virtual_pipeline_model_parallel_size", None) or 1) if is_even else 1
    # Context parallelism splits positions, Ulysses heads.
    ulysses = getattr(settings.engine, "ulysses_sequence_parallel_size", 1)
    for key, value, number, what in (
        ("actor.engine.tensor_model_parallel_size", sizes.tensor, size.heads, "attention heads"),
        ("actor.engine.pipeline_model_parallel_size", stages, size.layers, "layers"),
        ("actor.engine.virtual_pipeline_model_parallel_size", chunks, size.layers // stages, "layers in each stage"),
        ("actor.engine.ulysses_sequence_parallel_size", ulysses, size.heads, "attention heads"),
        ("rollout.pipeline_model_parallel_size", rollout.pipeline_model_parallel_size, size.layers, "layers"),
        (
            "rollout.tensor_model_parallel_size",
            settings.rollout.tensor_model_parallel_size,
            size.heads,
            "attention heads",
        ),
    ):
        if number % value:
            fitting = ", ".join(
                str(divisor) for divisor in range(1, number + 1) if number % divisor == 0 and divisor <= 64
            )
            whose = rollout.name if key.startswith("rollout") else engine
            raise ConfigError(
                f"{key} is {value}, but the model in {settings.model.path} has {number} {what}, which {whose} cannot "
                f"split into {value}; sizes that would fit: {fitting}"
            )
