"""The keys that every ``profiler`` section has; importable without torch."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["ProfilerConfig"]


@dataclass
class ProfilerConfig:
    """Which steps, on which workers. Names are verl's where it has one.

    Attributes:
        tool: registry name of the profiler; empty for none.
        steps: training steps to look at.
        profile_continuous_steps: steps that follow each other make one file; otherwise each has its own.
        ranks: of the processes of each pool.
        all_ranks: all of them instead.
        roles: only pools in which one of these roles lives; empty for all.
        save_path: folder of the files; empty for ``RUN_DIR/profiles``.
    """

    tool: str | None = None
    steps: list[int] = field(default_factory=list)
    profile_continuous_steps: bool = False
    ranks: list[int] = field(default_factory=lambda: [0])
    all_ranks: bool = False
    roles: list[str] = field(default_factory=list)
    save_path: str | None = None
