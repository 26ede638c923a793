"""The conformance suite of dispatch modes, a class of pytest tests to inherit. Needs hypothesis; does not start Ray."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollcast import ClassWithInitArgs, Dispatch, Execute, ResourcePool, Worker, WorkerGroup, register
from rollcast.contracts.dispatch import Calls, DispatchMode, MeshInfo, RankOutputs
from rollcast.contracts.runtime import runtimes
from rollcast.errors import DispatchError
from rollcast.protocol import Cut, DataProto, store_batch
from rollcast_testing.batches import batches, find_difference, sample_batch

__all__ = ["DispatchSuite", "FakeGroup"]

_law = settings(
    deadline=None,
    max_examples=30,
    # Subclasses share the test function. Sharing a mode between examples is fine, because modes must be stateless.
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.function_scoped_fixture,
        HealthCheck.differing_executors,
    ],
)


@dataclass
class FakeGroup:
    """A stand-in for a worker group, without workers.

    Attributes:
        places: each rank's place, in a mesh of any name.
        asked: names of the meshes that the mode has queried.
    """

    places: Sequence[MeshInfo]
    asked: list[str] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.places)

    def mesh(self, mesh_name: str) -> Sequence[MeshInfo]:
        """Return each rank's place."""
        self.asked.append(mesh_name)
        return self.places


class DispatchSuite:
    """Conformance tests of one dispatch mode.

    Set :attr:`name`, or override the fixture :meth:`mode` with an object::

        class TestMyMode(DispatchSuite):
            name = "my_mode"

    By default, a call of the identity must return the batch. For a mode with another contract, override
    :meth:`arguments` and :meth:`expected`. This mode sends the batch to every rank and returns the list of outputs::

        class TestToAll(DispatchSuite):
            name = "to_all"
            bad_arguments = ()

            def expected(self, batch, world_size):
                return [batch] * world_size

    If these depend on the mesh, override :meth:`arguments_on` and :meth:`expected_on`.
    """

    #: Name of the mode in ``rollcast.dispatch_modes``.
    name: ClassVar[str] = ""
    #: Numbers of ranks that the mode is tested with.
    world_sizes: ClassVar[Sequence[int]] = (1, 2, 3, 4)
    #: Positional arguments of calls that the mode must refuse; empty for a mode that accepts any arguments.
    bad_arguments: ClassVar[Sequence[tuple[Any, ...]]] = (
        (),
        (3,),
        (DataProto.from_dict({"x": torch.arange(3)}), DataProto.from_dict({"x": torch.arange(5)})),
    )
    #: True if a batch may be passed as the keyword argument ``data``.
    takes_keywords: ClassVar[bool] = True
    #: True if remote columns are split and joined without being read.
    leaves_rows_on_workers: ClassVar[bool] = True

    @pytest.fixture
    def mode(self) -> DispatchMode:
        """Return the mode under test; by default the plugin :attr:`name`."""
        if not self.name:
            raise NotImplementedError(f"{type(self).__name__} must set `name` or override the fixture `mode`")
        return cast("DispatchMode", getattr(Dispatch, self.name.upper()))

    def arguments(self, batch: DataProto, world_size: int) -> tuple[Any, ...]:
        """Return the positional arguments of a call with ``batch`` on ``world_size`` ranks."""
        return (batch,)

    def expected(self, batch: DataProto, world_size: int) -> Any:
        """Return the result of a call with ``batch`` if each rank returns the DataProto that it received."""
        return batch

    def arguments_on(self, batch: DataProto, group: FakeGroup) -> tuple[Any, ...]:
        """Return :meth:`arguments`; override it for a mode that uses more of a group than its size."""
        return self.arguments(batch, group.world_size)

    def expected_on(self, batch: DataProto, group: FakeGroup) -> Any:
        """Return :meth:`expected`; override it for a mode that uses more of a group than its size."""
        return self.expected(batch, group.world_size)

    def shard_of(self, place: MeshInfo) -> Hashable:
        """Return a key that is equal for ranks that receive the same objects."""
        return place.dp_rank

    def layouts(self, world_size: int) -> Sequence[Sequence[MeshInfo]]:
        """Return meshes of ``world_size`` ranks, each as the ranks' places by rank."""
        meshes: dict[tuple[MeshInfo, ...], None] = {}
        for tp in (tp for tp in range(1, world_size + 1) if world_size % tp == 0):
            dp, ranks = world_size // tp, range(world_size)
            meshes[tuple(MeshInfo(rank // tp, rank % tp == 0) for rank in ranks)] = None
            meshes[tuple(MeshInfo(rank % dp, rank // dp == tp - 1) for rank in ranks)] = None
            meshes[tuple(MeshInfo(dp - 1 - rank // tp, rank % tp == tp - 1) for rank in ranks)] = None
        return list(meshes)

    # -- the laws -----------------------------------------------------------------------------

    @_law
    @given(data=st.data())
    def test_identity(self, mode: DispatchMode, data: st.DataObject) -> None:
        """Check that a call of the identity returns the batch: rows, order, dtypes, lengths, objects and meta."""
        group, batch = self._draw_group(mode, data), data.draw(batches())
        self._require_call(mode, group, batch)

    def test_every_batch_size(self, mode: DispatchMode) -> None:
        """Check empty batches, fewer rows than ranks, and each remainder up to twice the ranks."""
        for group in self._groups(mode):
            for rows in range(2 * group.world_size + 2):
                self._require_call(mode, group, sample_batch(rows))

    def test_results_are_the_workers(self, mode: DispatchMode) -> None:
        """Check that values computed by the workers are returned at their rows."""
        for group in self._groups(mode):
            for rows in (0, 1, 7):
                batch = sample_batch(rows)
                calls = mode.distribute(group, self.arguments_on(batch, group), {})
                actual = mode.join(group, _outputs(mode, group, calls, _triple))
                wanted = self.expected_on(_triple(batch), group)
                _require_same(actual, wanted, f"workers' columns come back at their rows, on {_describe(group)}")

    def test_takes_keyword_arguments(self, mode: DispatchMode) -> None:
        """Check that a batch passed by keyword is treated like a positional one."""
        if not self.takes_keywords:
            pytest.skip("takes_keywords is False")
        for group in self._groups(mode):
            batch = sample_batch(5)
            (value,) = self.arguments_on(batch, group)
            calls = mode.distribute(group, (), {"data": value})
            actual = mode.join(group, _outputs(mode, group, calls))
            wanted = self.expected_on(batch, group)
            _require_same(actual, wanted, f"a batch given as data=... comes back, on {_describe(group)}")

    def test_leaves_rows_on_workers(self, mode: DispatchMode) -> None:
        """Check that remote columns are split and joined like local ones, and stay remote."""
        if not self.leaves_rows_on_workers:
            pytest.skip("leaves_rows_on_workers is False")
        for group in self._groups(mode):
            for rows in (0, 1, 7):
                batch = sample_batch(rows)
                calls = mode.distribute(group, _kept(self.arguments_on(batch, group)), {})
                outputs = _outputs(mode, group, calls)
                outputs[:] = _kept(list(outputs))
                joined, where = mode.join(group, outputs), f"{rows} remote rows, on {_describe(group)}"
                _require_same(_fetched(joined), self.expected_on(batch, group), f"dispatched like local ones: {where}")
                sent = [value for call in calls.per_rank if call for value in (*call.args, *call.kwargs.values())]
                moved = [value for value in (*sent, joined) if isinstance(value, DataProto) and not value.is_remote]
                assert not moved, f"the mode reads rows that it only has to pass on: {where}"

    @_law
    @given(data=st.data())
    def test_leaves_its_arguments_alone(self, mode: DispatchMode, data: st.DataObject) -> None:
        """Check that the caller's batch, its meta and its objects are not changed."""
        group, batch = self._draw_group(mode, data), data.draw(batches())
        given_args = self.arguments_on(batch, group)
        before = copy.deepcopy(given_args)
        calls = mode.distribute(group, given_args, {})
        _require_same(given_args, before, "dispatch does not change its arguments")
        mode.join(group, _outputs(mode, group, calls))
        _require_same(given_args, before, "collect does not change the arguments of the call")

    def test_keeps_nothing_between_calls(self, mode: DispatchMode) -> None:
        """Check that concurrent calls, on one group or on several, can end in any order."""
        groups = self._groups(mode)
        for first, second in [*itertools.pairwise(groups), *zip(groups, groups, strict=True)]:
            pair = (sample_batch(5), sample_batch(first.world_size))
            calls = [
                mode.distribute(group, self.arguments_on(batch, group), {})
                for group, batch in zip((first, second), pair, strict=True)
            ]
            for i in (1, 0):
                group = (first, second)[i]
                actual = mode.join(group, _outputs(mode, group, calls[i]))
                law = f"a call is not disturbed by another that is under way, on {_describe(group)}"
                _require_same(actual, self.expected_on(pair[i], group), law)

    def test_ranks_that_share_a_shard_share_one_object(self, mode: DispatchMode) -> None:
        """Check that ranks with the same shard get one object, which is stored only once."""
        for group in self._groups(mode):
            calls = mode.distribute(group, self.arguments_on(sample_batch(8), group), {})
            if not group.asked:
                pytest.skip("the mode asks for no mesh")
            shards: dict[Hashable, Any] = {}
            for place, call in zip(group.places, calls.per_rank, strict=True):
                for value in call.args if call is not None else ():
                    shared = shards.setdefault(self.shard_of(place), value) is value
                    _require(shared, f"ranks with one dp_rank get the same object, on {_describe(group)}")

    def test_ranks_that_do_not_collect_may_return_nothing(self, mode: DispatchMode) -> None:
        """Check that only the outputs of collecting ranks are used."""
        for group in self._groups(mode):
            batch = sample_batch(7)
            calls = mode.distribute(group, self.arguments_on(batch, group), {})
            if not group.asked:
                pytest.skip("the mode asks for no mesh")
            outputs = _outputs(mode, group, calls)
            outputs[:] = [
                output if group.places[rank].is_collect else None
                for rank, output in zip(outputs.ranks, outputs, strict=True)
            ]
            law = f"outputs of ranks that do not collect are left out, on {_describe(group)}"
            _require_same(mode.join(group, outputs), self.expected_on(batch, group), law)

    def test_refuses_bad_arguments(self, mode: DispatchMode) -> None:
        """Check that an invalid call is refused with a reason, and that the next call works."""
        for group in self._groups(mode):
            for args in self.bad_arguments:
                kinds = ", ".join(type(value).__name__ for value in args) or "no arguments"
                try:
                    mode.distribute(group, args, {})
                except DispatchError as error:
                    _require(mode.name in str(error), f"the error names the mode {mode.name!r}: {error}")
                else:
                    _require(False, f"bad_arguments are refused; a call with {kinds} was dispatched")
            self._require_call(mode, group, sample_batch(3))

    def test_pickles(self, mode: DispatchMode) -> None:
        """Check that the mode can be pickled together with a worker class that uses it."""
        clone = pickle.loads(pickle.dumps(mode))
        _require(clone.name == mode.name, "a pickled mode keeps its name")
        for group in self._groups(mode):
            self._require_call(clone, group, sample_batch(5))

    def test_is_used_by_name(self, mode: DispatchMode) -> None:
        """Check that ``Dispatch.NAME`` and ``@register`` find the mode, and that it has a valid execute mode."""
        _require(bool(mode.name), "the class has a `name`, which errors show")
        execute = getattr(Execute, mode.default_execute_mode.upper())
        _require(execute.name in mode.execute_modes, "default_execute_mode is one of execute_modes")
        if not self.name:
            pytest.skip("the mode is not announced: name is not set")
        _require(mode.name == self.name, f"the mode is called {self.name!r} where it is announced, and {mode.name!r}")
        _require(type(getattr(Dispatch, self.name.upper())) is type(mode), f"it is Dispatch.{self.name.upper()}")
        register(dispatch_mode=self.name)(lambda worker: worker)

    def test_on_a_real_group(self, mode: DispatchMode) -> None:
        """Check a call on a worker group in this process."""
        (place, *_), *_ = self.layouts(1)
        alone = FakeGroup([place])
        local = runtimes.get("local")
        with local.from_config(local.config_schema(), processes=1) as runtime:
            roles = ClassWithInitArgs(_echo_class(mode), place)
            group: Any = WorkerGroup(ResourcePool([1]), roles, runtime=runtime)
            for rows in (0, 1, 5):
                batch = sample_batch(rows)
                actual = group.echo(*self.arguments_on(batch, alone))
                law = f"{rows} rows come back from a group of one rank"
                _require_same(actual, self.expected_on(batch, alone), law)

    # -- steps --------------------------------------------------------------------------------

    def _places(self, mode: DispatchMode, size: int) -> list[Sequence[MeshInfo]]:
        """Return meshes to test; a single one for a mode that uses no mesh."""
        places = list(self.layouts(size))
        group = FakeGroup(places[0])
        mode.distribute(group, self.arguments_on(sample_batch(size), group), {})
        return places if group.asked else places[:1]

    def _groups(self, mode: DispatchMode) -> list[FakeGroup]:
        return [FakeGroup(places) for size in self.world_sizes for places in self._places(mode, size)]

    def _draw_group(self, mode: DispatchMode, data: st.DataObject) -> FakeGroup:
        size = data.draw(st.sampled_from(list(self.world_sizes)), label="world_size")
        return FakeGroup(data.draw(st.sampled_from(self._places(mode, size)), label="places"))

    def _require_call(self, mode: DispatchMode, group: FakeGroup, batch: DataProto) -> None:
        __tracebackhide__ = True
        calls = mode.distribute(group, self.arguments_on(batch, group), {})
        actual = mode.join(group, _outputs(mode, group, calls))
        law = f"{len(batch)} rows that workers return as they are come back as they were, on {_describe(group)}"
        _require_same(actual, self.expected_on(batch, group), law)


def _triple(batch: DataProto) -> DataProto:
    """Compute a new column from each row, as a worker would."""
    return batch.with_columns({"tripled": batch["row"] * 3})


def _outputs(mode: DispatchMode, group: FakeGroup, calls: Calls, work: Any = None) -> RankOutputs:
    """Return the ranks' outputs, with arguments and outputs pickled as between processes."""
    execute = getattr(Execute, mode.default_execute_mode.upper())
    outputs: list[Any] = []
    ranks: list[int] = []
    for rank in execute.ranks(group.world_size):
        call = calls.per_rank[rank]
        if call is not None:
            args, kwargs = pickle.loads(pickle.dumps((call.args, dict(call.kwargs))))
            value = _first_batch(_fetched(args), {key: _fetched(value) for key, value in kwargs.items()})
            answers = calls.answering is None or rank in calls.answering
            output = (value if work is None else work(value)) if answers else None
            outputs.append(pickle.loads(pickle.dumps(output)))
            ranks.append(rank)
    return RankOutputs(outputs, ranks, calls.state, execute.name)


def _kept(value: Any) -> Any:
    """Return the value with its batches stored."""
    if isinstance(value, list | tuple):
        return type(value)(_kept(item) for item in value)
    return store_batch(value, lambda stored: stored).bound(_fetch) if isinstance(value, DataProto) else value


def _fetch(cuts: Sequence[Cut], timeout: float | None) -> list[Any]:  # noqa: ARG001  # a Fetch
    return [cut.of(cut.ref) for cut in cuts]


def _fetched(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_fetched(item) for item in value)
    return value.bound(_fetch).local() if isinstance(value, DataProto) else value


def _first_batch(args: Sequence[Any], kwargs: Mapping[str, Any]) -> DataProto:
    arguments = [value for value in (*args, *kwargs.values()) if isinstance(value, DataProto)]
    _require(bool(arguments), f"each rank gets a DataProto, but one got {[type(value).__name__ for value in args]}")
    return arguments[0]


def _echo_class(mode: DispatchMode) -> type[Worker]:
    class Echo(Worker):
        def __init__(self, place: MeshInfo) -> None:
            self.place = place

        @register(dispatch_mode=mode)
        def echo(self, *args: Any, **kwargs: Any) -> DataProto:
            return _first_batch(args, kwargs)

        @register(dispatch_mode="one_to_all")
        def query_mesh(self, mesh_name: str) -> MeshInfo:
            return self.place

    return Echo


def _describe(group: FakeGroup) -> str:
    if not group.asked:
        return f"{group.world_size} ranks"
    places = ", ".join(f"{place.dp_rank}{'*' if place.is_collect else ''}" for place in group.places)
    return f"ranks with the dp_ranks {places} (* collects)"


def _require(condition: bool, law: str) -> None:
    __tracebackhide__ = True
    if not condition:
        raise AssertionError(f"failed check: {law}")


def _require_same(actual: Any, wanted: Any, law: str) -> None:
    __tracebackhide__ = True
    difference = find_difference(actual, wanted)
    if difference is not None:
        raise AssertionError(f"failed check: {law}; {difference}")
