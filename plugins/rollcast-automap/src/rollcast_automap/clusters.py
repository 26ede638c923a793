"""Clusters to map onto: device kinds by their published figures, and the options ``cluster.*``."""

from __future__ import annotations

from typing import Annotated

from rollcast.contracts.config import Gt, Positive, config
from rollcast.contracts.mapping import Cluster, DeviceKind, Node
from rollcast.errors import ConfigError

__all__ = ["DEVICE_KINDS", "ClusterConfig", "build_cluster"]

_GIB = 2**30
_A100 = "NVIDIA A100 datasheet, SXM 80GB"
_H100 = "NVIDIA H100 datasheet, SXM"
_H200 = "NVIDIA H200 datasheet, SXM"

#: Device kinds by name. FLOP per second are dense; bandwidths are one way.
DEVICE_KINDS = {
    kind.name: kind
    for kind in (
        DeviceKind("a100", 80 * _GIB, {"bfloat16": 312e12, "float32": 19.5e12}, 2.039e12, 32e9, _A100),
        DeviceKind("h100", 80 * _GIB, {"bfloat16": 989e12, "float32": 67e12}, 3.35e12, 64e9, _H100),
        DeviceKind("h200", 141 * 10**9, {"bfloat16": 989e12, "float32": 67e12}, 4.8e12, 64e9, _H200),
        DeviceKind("cpu", 12 * _GIB, {"bfloat16": 5e10, "float32": 5e10}, 1e10, 1e10, "rough figures of a core"),
    )
}
#: Bytes per second from a device to another of its node, one way: half of the datasheets' NVLink figures.
_LINKS = {"a100": 300e9, "h100": 450e9, "h200": 450e9, "cpu": 1e10}


@config
class ClusterConfig:
    """The cluster that ``rollcast map`` maps onto."""

    nodes: Positive = 1
    """Number of nodes."""
    devices_per_node: Positive = 8
    """Devices of a node."""
    device: str = "h100"
    """Kind of the devices: a100, h100, h200 or cpu."""
    network_gbit_s: Annotated[float, Gt(0)] = 200.0
    """Bandwidth of a device to a device of another node, one way, in Gbit/s; with a shared card, the device's part."""


def build_cluster(config: ClusterConfig) -> Cluster:
    """Return the cluster of the options.

    Raises:
        ConfigError: there is no such kind of device.
    """
    if config.device not in DEVICE_KINDS:
        raise ConfigError(f"cluster.device is {config.device!r}; valid: {', '.join(DEVICE_KINDS)}")
    node = Node(DEVICE_KINDS[config.device], config.devices_per_node, _LINKS[config.device])
    return Cluster((node,) * config.nodes, config.network_gbit_s * 1e9 / 8)
