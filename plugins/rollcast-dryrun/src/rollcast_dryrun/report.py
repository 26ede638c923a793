"""Reports of dry runs of a pool's ranks: memory, collectives, waits, and the least time of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollcast_automap.contract import Cluster, Node

__all__ = ["FIRST_SYNC", "SHORTER", "PoolReport", "RankReport", "Traffic"]

#: Phase of the first sync of a run that trains an adapter: only then the weights below it are sent.
FIRST_SYNC = "first sync"
#: End of the name of a phase with one micro-batch less.
SHORTER = ", without the last micro-batch"
#: Phases that are not part of a step.
_ONCE = ("init", FIRST_SYNC)
#: Collectives in which every rank sends a part to every other.
_ALL_TO_ALL = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over one kind of group in a step.

    Attributes:
        kind: name of the collective.
        ranks: ranks of the group.
        link: ``network`` if the group spans nodes, else ``node``.
        calls: calls of a step.
        bytes: bytes of a rank's largest side in a step.
    """

    kind: str
    ranks: int
    link: str
    calls: int
    bytes: int

    def seconds(self, bandwidth: float) -> float:
        """Return the time in seconds at a bandwidth in bytes per second, with no other traffic."""
        share = (self.ranks - 1) / self.ranks if self.kind in _ALL_TO_ALL else 1.0
        times = 2 if self.kind == "all_reduce" else 1  # a reduce_scatter and an all_gather
        return times * share * self.bytes / bandwidth


class RankReport:
    """The record of a step on one rank.

    Attributes:
        rank: the rank.
        record: result of :func:`~rollcast_dryrun.recipe.dry_run_rank`.
    """

    def __init__(self, rank: int, record: Mapping[str, Any]) -> None:
        self.rank = rank
        self.record = record
        self.phases: Mapping[str, Mapping[str, Any]] = {
            name: phase for name, phase in record["phases"].items() if not name.endswith(SHORTER)
        }

    def times(self, name: str) -> tuple[float, float]:
        """Return how often a phase's first micro-batches and each further micro-batch occur in a step.

        A phase ran ``run`` micro-batches. Its cost in a step is that of this run, and for each further micro-batch that
        of the last one.
        """
        counts = self.record["passes"].get(name)
        if counts is None:
            return 1.0, 0.0
        rounds: float = counts["mini_batches"]
        return rounds, rounds * (counts["micro_batches"] - counts["run"])

    def in_step(self, name: str, count: Callable[[Mapping[str, Any]], float]) -> float:
        """Return a number that ``count`` finds in a phase, for a whole step.

        What only the run with fewer micro-batches has, such as weights that are gathered once after an update, counts
        once.
        """
        whole, further = self.times(name)
        most = count(self.phases[name])
        if name + SHORTER not in self.record["phases"]:
            return whole * most
        fewer = count(self.record["phases"][name + SHORTER])
        return whole * max(most, fewer) + further * max(most - fewer, 0.0)

    def traffic(self) -> list[Traffic]:
        """Return the collectives of a step, the most bytes first; the start is not part of a step."""
        return self._traffic([name for name in self.phases if name not in _ONCE])

    def traffic_of(self, name: str) -> list[Traffic]:
        """Return the collectives of a phase in a step, the most bytes first."""
        return self._traffic([name])

    def _traffic(self, names: Sequence[str]) -> list[Traffic]:
        phases = self.record["phases"]
        runs = [phases[run] for name in names for run in (name, name + SHORTER) if run in phases]
        groups = {_group_of(collective) for phase in runs for collective in phase["collectives"]}
        sums: dict[tuple[str, int, str], list[float]] = {}
        for group in groups:
            if group[1] > 1:
                total = sums.setdefault(group[:3], [0.0, 0.0])
                for place, counted in enumerate(("calls", "bytes")):
                    total[place] += sum(self.in_step(name, _Counted(group, counted)) for name in names)
        traffic = [Traffic(*kind, round(calls), round(size)) for kind, (calls, size) in sums.items()]
        return sorted(traffic, key=lambda one: (-one.bytes, one.kind))

    def compute_seconds(self) -> float:
        """Return the least time of a step's operations in seconds."""
        return self._sum(lambda phase: phase["kernel_seconds"])

    def host_bytes(self) -> float:
        """Return the bytes of a step that pass between host and device."""
        return self._sum(lambda phase: sum(copy["bytes"] for copy in phase["copies"]))

    def _sum(self, count: Callable[[Mapping[str, Any]], float]) -> float:
        return sum(self.in_step(name, count) for name in self.phases if name not in _ONCE)

    def waits(self) -> dict[str, dict[str, int]]:
        """Phase → line of code → times that the host waits for the device there in the last micro-batch."""
        places: dict[str, dict[str, int]] = {}
        for name in self.record["passes"]:
            shorter = self.record["phases"].get(name + SHORTER)
            if shorter is None:
                continue  # one micro-batch, so nothing tells its waits from those of the pass
            for kind in ("host_reads", "host_waits"):
                for place, count in self.phases[name][kind].items():
                    if (more := count - shorter[kind].get(place, 0)) > 0:
                        places.setdefault(name, {})[place] = more
        return places


def _group_of(collective: Mapping[str, Any]) -> tuple[str, int, str, int]:
    """Return kind, ranks, link and stride; groups of one size along two axes of a mesh are counted apart."""
    link = "network" if collective["nodes"] else "node"
    return collective["kind"], collective["ranks"], link, collective.get("stride", 1)


@dataclass(frozen=True)
class _Counted:
    """Sums a field of a phase's collectives of one group."""

    group: tuple[str, int, str, int]
    field: str

    def __call__(self, phase: Mapping[str, Any]) -> float:
        mine = [collective for collective in phase["collectives"] if _group_of(collective) == self.group]
        return float(sum(collective[self.field] for collective in mine))


@dataclass(frozen=True)
class PoolReport:
    """Dry runs of the ranks of a pool that differ.

    Attributes:
        pool: name of the pool.
        ranks: reports of its ranks.
        reserve: bytes of a process beyond its tensors: CUDA's context and libraries.
        beside: phase → bytes of the rollout on a device; the phase ``""`` stands for all that are not named.
        cluster: figures of the devices and their links.
    """

    pool: str
    ranks: Sequence[RankReport]
    reserve: int
    beside: Mapping[str, int]
    cluster: Cluster

    @property
    def node(self) -> Node:
        """Figures of a node."""
        return self.cluster.nodes[0]

    def needed(self) -> dict[str, tuple[int, int, int]]:
        """Phase → bytes on a device at its largest, with all processes; the trainer's part; and the rank."""
        needed: dict[str, tuple[int, int, int]] = {}
        for report in self.ranks:
            for name, phase in report.phases.items():
                reserved = phase["peak_reserved"]
                most = reserved + self.reserve + self.beside.get(name, self.beside[""])
                if name not in needed or most > needed[name][0]:
                    needed[name] = most, reserved, report.rank
        return needed

    @property
    def fits(self) -> bool:
        """True if no phase needs more than a device has."""
        return max(most for most, _, _ in self.needed().values()) <= self.node.kind.memory_bytes

    def seconds(self, report: RankReport) -> dict[str, float]:
        """Return the least times of a step in seconds: computing, and traffic on each link, without overlap."""
        kind = self.node.kind
        bandwidths = {"node": self.node.link_bandwidth, "network": self.cluster.network_bandwidth}
        times = {"compute": report.compute_seconds()}
        for link, bandwidth in bandwidths.items():
            times[link] = sum(traffic.seconds(bandwidth) for traffic in report.traffic() if traffic.link == link)
        return {**times, "host": report.host_bytes() / kind.host_bandwidth}

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a value of JSON."""
        return {
            "fits": self.fits,
            "device_bytes": self.node.kind.memory_bytes,
            "phases": {
                name: {"bytes": most, "trainer_bytes": own, "rank": rank}
                for name, (most, own, rank) in self.needed().items()
            },
            "ranks": [
                {
                    "rank": report.rank,
                    "faults": report.record["faults"],
                    "seconds": self.seconds(report),
                    "collectives": [vars(traffic) for traffic in report.traffic()],
                    "host_waits": report.waits(),
                    "phases": report.record["phases"],
                }
                for report in self.ranks
            ],
        }
