"""Clusters to map onto: the options ``cluster.*``, with device figures from datasheets or from the options."""

from __future__ import annotations

from dataclasses import field, replace
from typing import Annotated, Any

from rollcast import build_section
from rollcast.contracts.config import Gt, Positive, config
from rollcast.errors import ConfigError
from rollcast_automap.contract import Cluster, DeviceKind, Node
from rollcast_automap.costs.device_kinds import DEVICE_KINDS, LINK_BANDWIDTHS

__all__ = ["DEVICE_KINDS", "ClusterConfig", "NodesConfig", "build_cluster"]

Amount = Annotated[float, Gt(0)]
#: Keys that replace the figures of a datasheet. All of them together describe a device without a datasheet here.
_FIGURES = ("memory_gib", "memory_gbyte_s", "tflops", "link_gbyte_s", "host_gbyte_s")


@config
class NodesConfig:
    """A group of equal nodes of a cluster; null keys take their value from ``cluster.*``."""

    nodes: Positive | None = None
    """Number of nodes."""
    devices_per_node: Positive | None = None
    """Devices of a node."""
    device: str | None = None
    """Kind of the devices."""
    memory_gib: Amount | None = None
    """Memory of a device in GiB."""
    memory_gbyte_s: Amount | None = None
    """Bandwidth of the device memory in GB/s."""
    tflops: Amount | None = None
    """Dense bfloat16 peak in TFLOP/s."""
    link_gbyte_s: Amount | None = None
    """Bandwidth of a device to the others of its node in GB/s, one way."""
    host_gbyte_s: Amount | None = None
    """Bandwidth from the host to a device in GB/s, one way."""


@config
class ClusterConfig:
    """The cluster that ``rollcast map`` maps onto."""

    nodes: Positive = 1
    """Number of nodes."""
    devices_per_node: Positive = 8
    """Devices of a node."""
    device: str = "h100"
    """Kind of the devices: a10, a100, a800, b200, h100, h20, h200, h800, l4, l40s, mi300x or cpu; any other name
    needs all five figures below."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """Groups of different nodes, instead of `nodes` equal ones: `[{device: h100, nodes: 2}, {device: a100, nodes: 4}]`.
    Keys that a group leaves out are taken from the other keys of this section."""
    network_gbit_s: Amount = 200.0
    """Bandwidth of a device to a device of another node, one way, in Gbit/s; the device's share if devices share a
    network card."""
    memory_gib: Amount | None = None
    """Memory of a device in GiB, in place of the datasheet's."""
    memory_gbyte_s: Amount | None = None
    """Bandwidth of the device memory in GB/s, in place of the datasheet's."""
    tflops: Amount | None = None
    """Dense bfloat16 peak in TFLOP/s, in place of the datasheet's."""
    link_gbyte_s: Amount | None = None
    """Bandwidth of a device to the others of its node in GB/s, one way, in place of the datasheet's."""
    host_gbyte_s: Amount | None = None
    """Bandwidth from the host to a device in GB/s, one way, in place of the datasheet's."""


def build_cluster(config: ClusterConfig) -> Cluster:
    """Return the cluster of the options.

    Raises:
        ConfigError: the kind of device is not known and its figures are incomplete, or a key of a group is not valid.
    """
    nodes: list[Node] = []
    for index, values in enumerate(config.groups or [{}]):
        path = f"cluster.groups[{index}]" if config.groups else "cluster"
        group = build_section(NodesConfig, values, path, closed=True)
        node = _node(config, group, path)
        known = {member.kind.name: member for member in nodes}
        name, number = node.kind.name, 2
        # Planners identify kinds by name, so devices of one kind with different figures need different names.
        while name in known and not _alike(known[name], node):
            name, number = f"{node.kind.name}#{number}", number + 1
        node = replace(node, kind=replace(node.kind, name=name))
        nodes += [node] * (group.nodes or config.nodes)
    return Cluster(tuple(nodes), config.network_gbit_s * 1e9 / 8)


def _alike(one: Node, other: Node) -> bool:
    return one.link_bandwidth == other.link_bandwidth and one.kind == replace(other.kind, name=one.kind.name)


def _node(config: ClusterConfig, group: NodesConfig, path: str) -> Node:
    """Return a node of a group.

    A figure of the group overrides the figure of the cluster, which overrides the datasheet. If the group names another
    device than the cluster, the cluster's figures do not apply to it.
    """
    name = group.device or config.device
    shared = config if group.device in (None, config.device) else ClusterConfig()
    figures = {key: getattr(group, key) or getattr(shared, key) for key in _FIGURES}
    missing = [key for key, value in figures.items() if value is None]
    if name not in DEVICE_KINDS and missing:
        raise ConfigError(
            f"{path}.device is {name!r}; valid: {', '.join(DEVICE_KINDS)}; for another device give the figures too, "
            f"here {', '.join(f'{path}.{key}' for key in missing)}"
        )
    sheet = DEVICE_KINDS.get(name) or DeviceKind(name, 0, {}, 0.0, 0.0, "cluster.*")
    kind = replace(
        sheet,
        memory_bytes=sheet.memory_bytes if figures["memory_gib"] is None else round(figures["memory_gib"] * 2**30),
        flops=sheet.flops if figures["tflops"] is None else {**sheet.flops, "bfloat16": figures["tflops"] * 1e12},
        memory_bandwidth=_bytes(figures["memory_gbyte_s"], sheet.memory_bandwidth),
        host_bandwidth=_bytes(figures["host_gbyte_s"], sheet.host_bandwidth),
    )
    link = _bytes(figures["link_gbyte_s"], LINK_BANDWIDTHS.get(name, 0.0))
    return Node(kind, group.devices_per_node or config.devices_per_node, link)


def _bytes(gigabytes: float | None, otherwise: float) -> float:
    return otherwise if gigabytes is None else gigabytes * 1e9
