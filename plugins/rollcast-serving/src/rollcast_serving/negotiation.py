"""Compatibility of engine, rollout, weight sync and mode, checked before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rollcast.contracts.engine import BaseEngine, EngineCapabilities
from rollcast.contracts.rollout import BaseRollout, RolloutCapabilities, RolloutMode
from rollcast.contracts.sections import RolloutConfig
from rollcast.errors import CapabilityError, ConfigError, PluginError
from rollcast_serving.contracts.weight_sync import WeightSyncCapabilities, weight_syncs
from rollcast_serving.shapes import ReplicaShape, check_shape, check_spans, shape_problem

__all__ = ["Choice", "check_choice", "check_places", "check_quantization", "check_world_sizes"]


@dataclass(frozen=True)
class Choice:
    """One combination, by the names of the config.

    Attributes:
        engine, rollout: registry names.
        mode: mode of the rollout.
        weight_sync: registry name.
        shape: parallel sizes of a replica.
        trains_adapter: True if a LoRA adapter is trained instead of the model.
        update_in_flight: policy for requests in flight during an update.
    """

    engine: str
    rollout: str
    mode: str
    weight_sync: str
    shape: ReplicaShape = ReplicaShape()  # noqa: RUF009  # immutable
    trains_adapter: bool = False
    update_in_flight: str = "continue"

    def __str__(self) -> str:
        return (
            f"actor.engine.name={self.engine}, rollout.name={self.rollout}, rollout.mode={self.mode}, "
            f"rollout.weight_sync={self.weight_sync}"
        )


def check_choice(choice: Choice, engine_class: type[BaseEngine], rollout_class: type[BaseRollout]) -> None:
    """Check that a combination can work.

    Args:
        choice: the requested combination.
        engine_class, rollout_class: classes of its engine and rollout.

    Raises:
        CapabilityError: it cannot; the message says why, and names the nearest working combination with this engine and
            rollout.
        ConfigError: the mode does not exist.
        PluginError: the weight sync does not exist.
    """
    modes = [mode.value for mode in RolloutMode]
    if choice.mode not in modes:
        raise ConfigError(f"rollout.mode is {choice.mode!r}; modes: {', '.join(modes)}")
    engine, rollout = engine_class.capabilities, rollout_class.capabilities
    sync = weight_syncs.get(choice.weight_sync, requested_by="rollout.weight_sync").capabilities
    problem = _problem(choice, engine, rollout, sync)
    if problem is None:
        check_shape(choice.shape, rollout, choice.rollout)
        return
    nearest = next(_working(choice, engine, rollout), None)
    help_text = "no installed alternative works" if nearest is None else f"this would work: {nearest}"
    raise CapabilityError(f"{choice}: {problem}; {help_text}")


def check_quantization(config: RolloutConfig, rollout_class: type[BaseRollout], section: str = "rollout") -> None:
    """Check that a rollout can quantize as the key ``quantization`` of its section asks.

    Raises:
        CapabilityError: it cannot.
    """
    asked = config.quantization
    if asked is None or asked in rollout_class.capabilities.quantization:
        return
    has = ", ".join(sorted(rollout_class.capabilities.quantization)) or "none"
    raise CapabilityError(
        f"{section}.quantization is {asked}, but {section}.name={config.name} cannot round the weights that it "
        f"receives (capabilities.quantization: {has}); set it to null, or use rollout=vllm"
    )


def _problem(
    choice: Choice, engine: EngineCapabilities, rollout: RolloutCapabilities, sync: WeightSyncCapabilities
) -> str | None:
    """Return why a combination cannot work; None if it can."""
    for capabilities, what in ((rollout, f"rollout {choice.rollout!r}"), (sync, f"sync {choice.weight_sync!r}")):
        modes = sorted(mode.value for mode in capabilities.modes)
        if choice.mode not in modes:
            return f"{what} supports the modes {', '.join(modes) or 'none'}"
    if sync.same_process and not rollout.in_process:
        return f"this sync shares the engine's module, with which rollout {choice.rollout!r} cannot generate"
    if sync.same_process and not engine.in_process_module:
        return f"this sync shares the engine's module, and engine {choice.engine!r} has none that can generate"
    large = [key for key, size in choice.shape.keys().items() if size > 1]
    if sync.same_process and large:
        return f"a rollout in the engine's process has no rollout.{large[0]} of its own"
    lacking = shape_problem(choice.shape, rollout, choice.rollout, "rollout")
    if lacking is not None:
        return lacking
    if choice.trains_adapter and not engine.lora:
        return f"engine {choice.engine!r} cannot train adapters (model.lora_rank, model.lora_adapter_path)"
    if choice.trains_adapter and not sync.same_process and not rollout.lora:
        return f"rollout {choice.rollout!r} does not support adapters (model.lora_rank, model.lora_adapter_path)"
    return _in_flight_problem(choice, rollout, sync)


def _in_flight_problem(choice: Choice, rollout: RolloutCapabilities, sync: WeightSyncCapabilities) -> str | None:
    if sync.same_process and choice.update_in_flight != "continue":
        return f"rollout.update_in_flight={choice.update_in_flight} needs replicas, and this sync has none"
    if choice.update_in_flight == "interrupt" and not rollout.abort:
        return f"rollout {choice.rollout!r} cannot abort requests, which rollout.update_in_flight=interrupt needs"
    return None


def _working(choice: Choice, engine: EngineCapabilities, rollout: RolloutCapabilities) -> Iterator[Choice]:
    """Yield combinations that can work, smallest changes first."""
    modes = sorted((mode.value for mode in RolloutMode), key=lambda mode: mode != choice.mode)
    names = sorted(weight_syncs.names(), key=lambda name: (name != choice.weight_sync, name != "shared_memory"))
    for shape in dict.fromkeys([choice.shape, ReplicaShape()]):
        for mode in modes:
            for name in names:
                candidate = replace(choice, mode=mode, weight_sync=name, shape=shape)
                try:
                    sync = weight_syncs.get(name).capabilities
                except PluginError:  # broken and not requested
                    continue
                if _problem(candidate, engine, rollout, sync) is None:
                    yield candidate


def check_world_sizes(
    choice: Choice, engine: EngineCapabilities, rollout: RolloutCapabilities, ranks: int, processes: int
) -> None:
    """Check that engine and rollout support the number of ranks.

    Args:
        choice: the combination.
        engine, rollout: capabilities of its engine and rollout.
        ranks: processes of the actor's pool.
        processes: processes of the rollout's pool.

    Raises:
        CapabilityError: there are too many; the message names the plugin, its limit, and the key to change.
    """
    for key, name, limit, asked, role in (
        ("actor.engine.name", choice.engine, engine.max_world_size, ranks, "actor"),
        ("rollout.name", choice.rollout, rollout.max_world_size, processes, "rollout"),
    ):
        if limit is not None and asked > limit:
            raise CapabilityError(
                f"{key}={name} runs on at most {limit} rank{'s' * (limit != 1)} (capabilities.max_world_size), but "
                f"the pool of role {role} has {asked}; give it a pool of {limit} in placement.pools, or choose another"
            )


def check_places(
    choice: Choice,
    same_process: bool,
    own_pool: bool,
    processes: Sequence[int],
    on_accelerators: bool = False,
    multi_node: bool = False,
) -> None:
    """Check that the placement fits the mode and the weight sync.

    Args:
        choice: the combination.
        same_process: True if the rollout runs in the actor's processes.
        own_pool: True if ``placement.mapping.rollout`` names another pool than the actor's.
        processes: processes on each node of the rollout's pool.
        on_accelerators: True if the pool reserves accelerators; False on CPUs.
        multi_node: True if the rollout's engines can span nodes.

    Raises:
        CapabilityError: the weight sync needs two devices but actor and rollout share one, or it needs a device but
            there is none, or a replica spans nodes and rollout, weight sync or adapter cannot.
        ConfigError: the placement contradicts the mode, or the sizes of a replica do not fit the pool; the message
            names the keys.
    """
    if same_process and own_pool:
        raise ConfigError(
            f"placement.mapping.rollout assigns a pool, but with rollout.weight_sync={choice.weight_sync} the rollout "
            "runs in the actor's processes"
        )
    standalone = choice.mode == RolloutMode.STANDALONE.value
    if standalone and not own_pool:
        raise ConfigError(
            "rollout.mode=standalone needs a pool of its own, as in placement.pools.rollout_pool=[1] and "
            "placement.mapping.rollout=rollout_pool"
        )
    if own_pool and not standalone:
        raise ConfigError(
            f"placement.mapping.rollout puts the rollout in a pool of its own, which needs rollout.mode=standalone, "
            f"not {choice.mode}"
        )
    _check_devices(choice, on_accelerators)
    if check_spans(choice.shape, processes, multi_node, choice.rollout):
        _check_spanning(choice)


def _check_spanning(choice: Choice) -> None:
    """Check that weights can reach the processes of an engine that spans nodes."""
    sizes = choice.shape.describe("rollout")
    if weight_syncs.get(choice.weight_sync).capabilities.shared_devices:
        raise CapabilityError(
            f"{sizes}, so a replica spans nodes, and rollout.weight_sync={choice.weight_sync} shares memory of GPUs of "
            "one node; choose rollout.weight_sync=shared_memory"
        )
    if choice.trains_adapter:
        raise CapabilityError(
            f"{sizes}, so a replica spans nodes, and rollout {choice.rollout!r} reads adapters (model.lora_rank, "
            "model.lora_adapter_path) from a folder of one node; choose a replica that fits on one node"
        )


def _check_devices(choice: Choice, on_accelerators: bool) -> None:
    capabilities = weight_syncs.get(choice.weight_sync, requested_by="rollout.weight_sync").capabilities
    if capabilities.shared_devices and not on_accelerators:
        raise CapabilityError(
            f"rollout.weight_sync={choice.weight_sync} shares memory of a GPU, but this run computes on CPUs "
            "(placement.device); choose rollout.weight_sync=shared_memory"
        )
    # NCCL aborts with "Duplicate GPU detected" when two ranks of a group use one device, but only at the first
    # broadcast, after trainer and engines have loaded the model.
    if on_accelerators and capabilities.own_devices and choice.mode != RolloutMode.STANDALONE.value:
        raise CapabilityError(
            f"rollout.weight_sync={choice.weight_sync} connects actor and replicas by NCCL, which refuses two ranks on "
            f"one device, and with rollout.mode={choice.mode} they share their devices; choose "
            "rollout.weight_sync=shared_memory, or disk, or rollout.mode=standalone with a pool of its own"
        )
