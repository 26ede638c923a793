"""Limits on mappings from the command line: the options ``constraints.*``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import field
from typing import Annotated

from rollcast.contracts.config import Ge, Lt, config
from rollcast.errors import ConfigError

__all__ = ["ConstraintsConfig", "check_roles"]


@config
class ConstraintsConfig:
    """Limits that ``rollcast map`` obeys."""

    pinned: dict[str, int] = field(default_factory=dict)
    """Role → number of devices of its pool."""
    together: list[list[str]] = field(default_factory=list)
    """Pairs of roles that share a pool."""
    apart: list[list[str]] = field(default_factory=list)
    """Pairs of roles that share no pool."""
    headroom: Annotated[float, Ge(0), Lt(1)] = 0.05
    """Fraction of each device's memory that stays free."""


def check_roles(limits: ConstraintsConfig, roles: Collection[str], devices: int) -> None:
    """Check the limits against the roles of a run and the devices of its cluster.

    Raises:
        ConfigError: an entry names a role that the run does not have, is not a pair, or asks for too many devices.
    """
    for role, count in limits.pinned.items():
        _check_known(f"constraints.pinned.{role}", [role], roles)
        if not 1 <= count <= devices:
            raise ConfigError(f"constraints.pinned.{role} is {count}; the cluster has {devices} devices")
    for key, pairs in (("constraints.together", limits.together), ("constraints.apart", limits.apart)):
        for pair in pairs:
            if len(set(pair)) != 2 or len(pair) != 2:
                raise ConfigError(f"{key} has {pair}; write pairs of roles, such as {key}=[[actor,critic]]")
            _check_known(key, pair, roles)


def _check_known(key: str, names: Iterable[str], roles: Collection[str]) -> None:
    for name in names:
        if name not in roles:
            raise ConfigError(f"{key} names the role {name!r}; the run has {', '.join(roles)}")
