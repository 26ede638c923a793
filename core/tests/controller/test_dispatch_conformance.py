"""The core's own dispatch modes against the laws that every mode keeps."""

from __future__ import annotations

from rollcast_testing import DispatchSuite


class TestOneToAll(DispatchSuite):
    name = "one_to_all"
    bad_arguments = ()

    def expected(self, batch, world_size):
        return [batch] * world_size


class TestAllToAll(DispatchSuite):
    name = "all_to_all"
    bad_arguments = ((3,), ("text",), ([1, 2, 3, 4, 5],), ({"a": 1},))

    def arguments(self, batch, world_size):
        return ([batch.repeat(rank) for rank in range(world_size)],)

    def expected(self, batch, world_size):
        return [batch.repeat(rank) for rank in range(world_size)]


class TestRankZero(DispatchSuite):
    name = "rank_zero"
    bad_arguments = ()
