"""What a rollout takes in memory, and over how many replicas it is spread."""

from __future__ import annotations

from dataclasses import replace

from rollcast.contracts.rollout import RolloutMode
from rollcast.errors import ConfigError
from rollcast_automap.engine_layout import EngineLayout
from rollcast_automap.memory_model import MemoryItem, ModelSize, Phase, count_kv_cache
from rollcast_trainer.batch.sizes import BatchAlgebra
from rollcast_trainer.loop import LoopTrainer
from rollcast_trainer.run.task_runner import TaskRunner

__all__ = ["bound_cache", "count_replicas", "rollout_items"]

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
#: Keys by which rollouts say how many sequences they compute at once, and what part of a device is theirs.
_MOST_ROWS = ("max_batch_size", "max_num_seqs", "max_running_requests")
_SHARES = ("gpu_memory_utilization", "mem_fraction_static")


def count_replicas(task: TaskRunner, ranks: int) -> int:
    """Engines that generate at the same time on ``ranks`` ranks; without replicas every rank does."""
    return max(ranks // task.rollout.tensor_model_parallel_size, 1) if task.uses_replicas else ranks


def bound_cache(items: list[MemoryItem], task: TaskRunner, device_bytes: int) -> list[MemoryItem]:
    """The items with the cache that replicas make on a device of this size.

    A replica takes a part of the device for weights and cache, whatever its rows need; rows that do not fit
    wait.

    Raises:
        ConfigError: not even the weights fit into that part.
    """
    key = next((key for key in _SHARES if hasattr(task.rollout, key)), None)
    if key is None or not task.uses_replicas or _fixed_cache(task) is not None:
        return items
    share = float(getattr(task.rollout, key))
    room = int(device_bytes * share)
    weights = sum(item.bytes for item in items if item.name == "rollout: weights")
    if weights >= room:
        raise ConfigError(
            f"rollout.{key}={share:g} of a device of {device_bytes / 2**30:.0f} GiB is {room / 2**30:.1f} GiB, but a "
            f"replica's weights take {weights / 2**30:.1f} GiB on each of its "
            f"{task.rollout.tensor_model_parallel_size} devices; raise it, or rollout.tensor_model_parallel_size"
        )
    return [
        replace(item, bytes=room - weights, is_bound=False) if item.name == "rollout: KV cache" else item
        for item in items
    ]


def rollout_items(
    trainer: LoopTrainer, algebra: BatchAlgebra, size: ModelSize, layout: EngineLayout, longest: int, ranks: int
) -> list[MemoryItem]:
    """Weights and KV cache on each rank of its pool.

    Args:
        trainer: of the run.
        algebra: of a step.
        size: of the model.
        layout: of the actor's engine.
        longest: tokens of the longest row.
        ranks: of the pool.
    """
    task, rollout = trainer.task, trainer.task.rollout
    rows = -(-algebra.rows // count_replicas(task, ranks))
    at_once = min([rows, *(getattr(rollout, key) for key in _MOST_ROWS if hasattr(rollout, key))])
    if not task.uses_replicas:
        cache = count_kv_cache(size, at_once, longest, layout.computed)
        kept = MemoryItem("rollout: KV cache", cache, "generate", is_bound=True)
        if not layout.gathers and layout.tensor * layout.pipeline == 1:
            return [kept]
        return [MemoryItem("rollout: weights", size.parameters * layout.computed, "generate"), kept]
    tensor, computed = rollout.tensor_model_parallel_size, _computed(task, layout)
    fixed = _fixed_cache(task)
    cache = count_kv_cache(size, at_once, longest, computed, tensor) if fixed is None else fixed
    weights = -(-size.parameters * computed // tensor)
    phase = _phase(task)
    return [
        MemoryItem("rollout: weights", weights, phase),
        MemoryItem("rollout: KV cache", cache, phase, is_bound=fixed is None),
    ]


def _fixed_cache(task: TaskRunner) -> int | None:
    """Bytes of the cache, where the config says."""
    size = getattr(task.rollout, "kv_cache_memory_bytes", None)
    return None if size is None else int(size)


def _computed(task: TaskRunner, layout: EngineLayout) -> int:
    """Bytes a number in the replicas; what they choose themselves on a GPU has two."""
    dtype = task.rollout_dtype
    if dtype in _BYTES:
        return _BYTES[dtype]
    return 2 if task.placement.device == "cuda" else layout.computed


def _phase(task: TaskRunner) -> Phase:
    """Replicas that take turns with the trainer give their memory up, where they can."""
    takes_turns = task.rollout.mode == RolloutMode.HYBRID.value
    gives_up = task.rollout_class.capabilities.releases_memory and getattr(task.rollout, "free_cache_engine", True)
    return "generate" if takes_turns and gives_up else "held"
