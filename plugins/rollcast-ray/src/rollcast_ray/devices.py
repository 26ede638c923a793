"""The index of a worker's device, derived from its environment and the device ids that Ray assigned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollcast.contracts.device import CUDA, NPU, XPU, devices
from rollcast.errors import ResourceError

__all__ = ["NOSET_SWITCHES", "local_device_index", "ray_noset_visible_devices", "visible_devices"]

_NOSET = "RAY_EXPERIMENTAL_NOSET_"
#: Ray's name of an accelerator → variables with which Ray hides devices of that kind.
_VARIABLES = {
    "GPU": (*CUDA.visibility, *XPU.visibility),
    "NPU": NPU.visibility,
    "HPU": ("HABANA_VISIBLE_MODULES",),
    "neuron_cores": ("NEURON_RT_VISIBLE_CORES",),
    "TPU": ("TPU_VISIBLE_CHIPS",),
}
#: Variables that tell Ray not to set the corresponding visibility variable, so that a process sees all devices.
NOSET_SWITCHES = tuple(_NOSET + name for names in _VARIABLES.values() for name in names)


def _variables(accelerator: str) -> tuple[str, ...]:
    """Return the variables that choose among accelerators of a kind, by Ray's name."""
    if accelerator in _VARIABLES:
        return _VARIABLES[accelerator]
    known = [devices.get(name) for name in devices.names()]
    return tuple(name for device in known if device.resource == accelerator for name in device.visibility)


def ray_noset_visible_devices(env: Mapping[str, str], accelerator: str | None = None) -> bool:
    """Return True if a ``NOSET`` variable keeps Ray from hiding the devices of other processes.

    Args:
        env: environment of a process.
        accelerator: Ray's name of the kind of device whose variables are checked; by default all kinds.
    """
    names = NOSET_SWITCHES if accelerator is None else [_NOSET + name for name in _variables(accelerator)]
    return any(env.get(name, "").lower() in ("1", "true") for name in names)


def visible_devices(env: Mapping[str, str], accelerator: str = "GPU") -> list[str] | None:
    """Return the ids of the devices visible in an environment, in the order in which libraries number them.

    ``HIP_VISIBLE_DEVICES`` and ``CUDA_VISIBLE_DEVICES`` are equivalent on ROCm and must be equal.
    ``ROCR_VISIBLE_DEVICES`` is applied before them and renumbers the devices, so it cannot be combined with them.

    Args:
        env: environment of a process.
        accelerator: Ray's name of the kind of device.

    Returns:
        Ids as written in the variable; None if all devices are visible.

    Raises:
        ResourceError: the variables contradict each other.
    """
    if accelerator != CUDA.resource:
        values = [env[name] for name in _variables(accelerator) if name in env]
        return _ids(values[0]) if values else None
    chosen = {name: env[name] for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if name in env}
    if any(not _ids(value) for value in chosen.values()):
        return []
    if len(set(chosen.values())) > 1:
        both = " and ".join(f"{name}={value}" for name, value in chosen.items())
        raise ResourceError(f"{both} contradict each other: ROCm takes them for the same; unset one")
    if "ROCR_VISIBLE_DEVICES" in env:
        if chosen:
            name, value = next(iter(chosen.items()))
            raise ResourceError(
                f"ROCR_VISIBLE_DEVICES={env['ROCR_VISIBLE_DEVICES']} renumbers the devices among which {name}={value} "
                "chooses; set only HIP_VISIBLE_DEVICES"
            )
        return _ids(env["ROCR_VISIBLE_DEVICES"])
    return _ids(next(iter(chosen.values()))) if chosen else None


def _ids(value: str) -> list[str]:
    """Split a list of devices, up to the first invalid one, as drivers do."""
    ids: list[str] = []
    for part in (part.strip() for part in value.split(",")):
        if part in ("", "NoDevFiles", "none") or part.startswith("-"):
            break
        ids.append(part)
    return ids


def local_device_index(
    env: Mapping[str, str], assigned: Sequence[str | int], local_rank: int = 0, accelerator: str = "GPU"
) -> int | None:
    """Return the index of this process's device, as in ``torch.device("cuda", index)``.

    Ray hides all other devices from a process, so the index is 0. If a ``NOSET`` variable is set, Ray hides no device,
    and the index is the position of the assigned id among the visible devices.

    Args:
        env: environment of the process.
        assigned: ids that Ray assigned to the process; may be empty.
        local_rank: rank among the group's processes on the node; selects the device if Ray assigned none.
        accelerator: Ray's name of the kind of device.

    Returns:
        The index; None if the environment hides every device.

    Raises:
        ResourceError: the environment contradicts itself, or hides the assigned device.
    """
    visible = visible_devices(env, accelerator)
    if visible == []:
        return None
    if not assigned:
        return local_rank if visible is None else local_rank % len(visible)
    device = str(assigned[0])
    if visible is None:
        if not device.isdigit():
            raise ResourceError(f"Ray gave the process device {device}, and no variable says which number that is")
        return int(device)
    if device in visible:
        return visible.index(device)
    if ray_noset_visible_devices(env, accelerator):
        return local_rank % len(visible)  # with NOSET, the user chooses the devices
    raise ResourceError(
        f"Ray gave the process device {device}, but its environment shows only {', '.join(visible)}; leave "
        f"{', '.join(_variables(accelerator))} out of env, or choose devices yourself under {_NOSET}*=1"
    )
