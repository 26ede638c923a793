"""Types of the public surface, checked by mypy in the session ``types``; not run.

A line with ``type: ignore`` is an error that mypy must report: strict mode refuses an ignore without one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_type

import torch

from rollcast import DataProto, DataProtoFuture, Dispatch, Worker, WorkerGroup, register
from rollcast.plugins import Registry, is_callable


class Scorer(Worker):
    """A worker with a registered method."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def score(self, data: DataProto, scale: float = 1.0) -> DataProto:
        """Return the scores of the rows."""
        return data.select(["score"])


def a_registered_method_keeps_its_signature(worker: Scorer, data: DataProto) -> None:
    assert_type(worker.score(data, scale=2.0), DataProto)
    worker.score(data, scale="2")  # type: ignore[arg-type]


def a_started_method_has_the_arguments_of_the_workers(group: WorkerGroup, data: DataProto) -> None:
    assert_type(group.submit(Scorer.score, data, scale=2.0), DataProtoFuture)
    group.submit(Scorer.score)  # type: ignore[call-arg]
    group.submit(Scorer.score, 3)  # type: ignore[arg-type]
    group.submit(Scorer.score, data, sclae=2.0)  # type: ignore[call-arg]


def a_future_names_its_columns(future: DataProtoFuture, data: DataProto) -> None:
    assert_type(future.select("score"), DataProto)
    assert_type(future.chunk(2), list[DataProto])
    assert_type(DataProtoFuture.concat([future, data]), DataProto)
    data.joined(future)  # type: ignore[arg-type]


class Episodes(DataProto):
    """A subclass of a user."""


def operations_keep_the_class(data: Episodes) -> None:
    assert_type(data.select(["x"]).drop("y").rename({"x": "y"}), Episodes)
    assert_type(data[2:5], Episodes)
    assert_type(data.joined(DataProto()), Episodes)
    assert_type(data.chunk(2), list[Episodes])
    assert_type(Episodes.concat([data, data]), Episodes)
    assert_type(data.local(["x"]), Episodes)
    assert_type(data.dtypes(), dict[str, torch.dtype | type[object]])
    data.select(3)  # type: ignore[arg-type]


def a_registry_returns_its_type(name: str) -> None:
    losses: Registry[Callable[[Any], float]] = Registry("my.losses", is_callable(1), description="losses")
    assert_type(losses.get(name), Callable[[Any], float])
    assert_type(losses.names(), tuple[str, ...])
