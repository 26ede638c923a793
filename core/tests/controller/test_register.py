"""``@register`` and ``Dispatch.NAME``: what is checked when a class is defined, and what is looked up."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import subprocess
import sys

import pytest

from rollcast import Dispatch, DispatchMode, Execute, Worker, WorkerGroup, register, register_dispatch_mode
from rollcast.contracts.dispatch import Calls, MeshInfo, RankCall, RankOutputs, dispatch_modes
from rollcast.contracts.worker import ClassWithInitArgs
from rollcast.controller.dispatch import (
    RESERVED_NAMES,
    AllToAll,
    ExecuteRankZero,
    OneToAll,
    RankZero,
    iter_registered,
    registered,
)
from rollcast.errors import (
    DispatchError,
    PluginConflictError,
    PluginNotFoundError,
    PluginTypeError,
    RollcastError,
    UnknownDispatchModeError,
)
from rollcast_testing.dispatch import FakeGroup


def group_of(size: int) -> FakeGroup:
    return FakeGroup([MeshInfo(rank, True) for rank in range(size)])


# -- @register ------------------------------------------------------------------------------------


def test_the_function_comes_back_as_it_is() -> None:
    def method(self, x: int) -> int:
        """Doc."""
        return x + 1

    assert register(dispatch_mode="one_to_all")(method) is method
    assert method(None, 2) == 3
    assert not hasattr(method, "__wrapped__")


def test_sync_and_async_methods_keep_their_kind() -> None:
    class Both(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def plain(self): ...

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        async def waiting(self): ...

    assert not inspect.iscoroutinefunction(Both.plain)
    assert inspect.iscoroutinefunction(Both.waiting)
    assert {"plain", "waiting", "query_mesh"} == {name for name, _, _ in iter_registered(Both)}


def test_metadata_is_frozen_and_says_everything() -> None:
    @register(dispatch_mode="one_to_all", execute_mode="rank_zero", blocking=False, materialize_futures=False)
    def method(self): ...

    entry = registered(method)
    assert isinstance(entry.dispatch_mode, OneToAll)
    assert isinstance(entry.execute_mode, ExecuteRankZero)
    assert (entry.blocking, entry.materialize_futures) == (False, False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        entry.blocking = True


def test_defaults() -> None:
    @register()
    def method(self): ...

    entry = registered(method)
    assert isinstance(entry.dispatch_mode, AllToAll)
    assert (entry.execute_mode.name, entry.blocking, entry.materialize_futures) == ("all", True, True)
    assert registered(lambda self: None) is None


def test_the_dispatch_mode_chooses_the_execute_mode_where_none_is_given() -> None:
    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def method(self): ...

    assert registered(method).execute_mode.name == "rank_zero"


@pytest.mark.parametrize(
    ("dispatch", "execute", "goes_with"),
    [
        (Dispatch.RANK_ZERO, Execute.ALL, "rank_zero"),
        (Dispatch.ALL_TO_ALL, Execute.RANK_ZERO, "all"),
        ("all_to_all", "RANK_ZERO", "all"),
    ],
)
def test_modes_that_do_not_go_together_are_refused_at_definition(dispatch, execute, goes_with) -> None:
    with pytest.raises(DispatchError, match=f"cannot run with execute mode.*; valid: {goes_with}$"):

        class Wrong(Worker):
            @register(dispatch_mode=dispatch, execute_mode=execute)
            def method(self): ...


def test_unknown_names_are_refused_at_definition() -> None:
    with pytest.raises(PluginNotFoundError, match=r"(?s)no plugin 'one_to_al'.*Did you mean 'one_to_all'"):
        register(dispatch_mode="one_to_al")
    with pytest.raises(PluginNotFoundError, match="no plugin 'rank_one'"):
        register(execute_mode="rank_one")
    with pytest.raises(DispatchError, match=r"must be Dispatch\.NAME.* got 3; registered: all_to_all"):
        register(dispatch_mode=3)
    with pytest.raises(DispatchError, match=r"must be Execute\.NAME.* got 3"):
        register(execute_mode=3)


def test_what_is_no_method_is_refused() -> None:
    with pytest.raises(DispatchError, match="belongs on a method"):
        register()(3)


def test_static_and_class_methods_are_refused_in_either_order() -> None:
    with pytest.raises(DispatchError, match=r"A\.method is registered but it is a static or class method"):

        class A(Worker):
            @staticmethod
            @register()
            def method(x): ...

    with pytest.raises(DispatchError, match="static or class method"):

        class B(Worker):
            @register()
            @staticmethod
            def method(x): ...

    with pytest.raises(DispatchError, match="static or class method"):

        class C(Worker):
            @classmethod
            @register()
            def method(cls): ...


def test_methods_that_cannot_be_called_on_a_group_are_refused() -> None:
    with pytest.raises(DispatchError, match="takes no self"):

        class A(Worker):
            @register()
            def method(): ...

    with pytest.raises(DispatchError, match="generator"):

        class B(Worker):
            @register()
            def method(self):
                yield 1

    with pytest.raises(DispatchError, match="generator"):

        class C(Worker):
            @register()
            async def method(self):
                yield 1

    with pytest.raises(DispatchError, match=r"D\._method .* private"):

        class D(Worker):
            @register()
            def _method(self): ...


def test_names_of_the_groups_own_are_refused() -> None:
    own = {name for cls in WorkerGroup.__mro__[:-1] for name in vars(cls) if not name.startswith("_")}
    assert own == RESERVED_NAMES
    for name in own:
        with pytest.raises(DispatchError, match=f"WorkerGroup has a {name!r} of its own"):
            type("Taken", (Worker,), {name: register()(lambda self: None)})


def test_an_override_has_to_be_registered_again() -> None:
    class Base(Worker):
        @register()
        def method(self, x): ...

    with pytest.raises(DispatchError, match=r"Derived\.method replaces Base\.method.*register it again"):

        class Derived(Base):
            def method(self, x): ...

    class Right(Base):
        @register(dispatch_mode="one_to_all")
        def method(self, x): ...

    entry = {name: entry for name, _, entry in iter_registered(Right)}["method"]
    assert entry.dispatch_mode.name == "one_to_all"


# -- Dispatch.NAME ----------------------------------------------------------------------------------


def test_installed_modes_are_attributes() -> None:
    assert isinstance(Dispatch.ONE_TO_ALL, OneToAll)
    assert isinstance(Dispatch.RANK_ZERO, RankZero)
    assert isinstance(Dispatch.one_to_all, OneToAll)
    assert {"ONE_TO_ALL", "ALL_TO_ALL", "RANK_ZERO"} <= set(dir(Dispatch))
    assert set(Dispatch) == set(dir(Dispatch))
    assert {"ALL", "RANK_ZERO"} <= set(dir(Execute))


def test_an_unknown_mode_is_an_attribute_error_that_helps() -> None:
    with pytest.raises(
        UnknownDispatchModeError, match=r"(?s)Dispatch\.ONE_TO_AL: .*Did you mean 'one_to_all'"
    ) as caught:
        _ = Dispatch.ONE_TO_AL
    assert isinstance(caught.value, AttributeError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert not hasattr(Dispatch, "NOTHING_LIKE_IT")
    with pytest.raises(UnknownDispatchModeError, match=r"Execute\.SOME"):
        _ = Execute.SOME
    with pytest.raises(AttributeError):
        _ = Dispatch._private


def test_a_first_party_mode_that_is_not_installed_comes_with_the_command(monkeypatch) -> None:
    monkeypatch.setattr("rollcast.plugins.registry.find_claims", lambda group, name: ())
    monkeypatch.setattr("rollcast.plugins.registry.find_plugins", lambda group: ())
    with pytest.raises(UnknownDispatchModeError, match="pip install rollcast-dispatch"):
        _ = Dispatch.DP_COMPUTE_PROTO


def test_a_mode_may_be_an_object_or_a_class() -> None:
    def method(self) -> None: ...

    mode = OneToAll()
    entry = registered(register(mode)(method))
    assert entry is not None
    assert entry.dispatch_mode is mode
    entry = registered(register(OneToAll, ExecuteRankZero)(method))
    assert entry is not None
    assert isinstance(entry.dispatch_mode, OneToAll)
    assert isinstance(entry.execute_mode, ExecuteRankZero)


def test_a_class_that_needs_arguments_is_refused_with_advice() -> None:
    class Needy(OneToAll):
        def __init__(self, mesh: str) -> None:
            self.mesh = mesh

    with pytest.raises(DispatchError, match="Needy cannot be built without arguments"):
        register(dispatch_mode=Needy)


# -- register_dispatch_mode -------------------------------------------------------------------------


@pytest.fixture
def doubled():
    yield register_dispatch_mode("Twice", lambda group, x: (([x] * group.world_size,), {}), lambda group, out: out * 2)
    dispatch_modes.unregister("twice")


def test_a_mode_of_two_functions_is_there_at_once(doubled) -> None:
    assert Dispatch.TWICE is doubled
    calls = doubled.distribute(group_of(2), (7,), {})
    assert calls.per_rank == [RankCall((7,), {}), RankCall((7,), {})]
    assert doubled.join(group_of(2), RankOutputs([1, 2], [0, 1])) == [1, 2, 1, 2]


def test_a_taken_name_is_refused(doubled) -> None:
    for name in ("twice", "one_to_all"):
        with pytest.raises(PluginConflictError, match=name):
            register_dispatch_mode(name, lambda group: None, lambda group, out: out)
    assert Dispatch.TWICE is doubled


def test_what_is_no_mode_is_refused() -> None:
    with pytest.raises(PluginTypeError):
        dispatch_modes.register("wrong", object())


@pytest.mark.parametrize(
    "result",
    [None, 3, ([1, 2], {}), (([1],), {}), (([1, 2],), {"a": [1]})],
    ids=["None", "int", "flat", "short", "short-key"],
)
def test_a_function_that_gives_something_else_is_named(result) -> None:
    from rollcast.controller.dispatch import FunctionMode

    mode = FunctionMode("odd", lambda group, *args: result, lambda group, out: out)
    with pytest.raises(DispatchError, match=r"dispatch function of 'odd' must return .* with 2 values each"):
        mode.distribute(group_of(2), (), {})


# -- what the core adds to every mode -------------------------------------------------------------------


class Careless(DispatchMode):
    name = "careless"

    def dispatch(self, worker_group, data):
        return Calls.each(data.chunks)

    def collect(self, worker_group, outputs):
        return outputs.nothing


def test_a_mode_that_fails_is_named_and_its_cause_is_kept() -> None:
    with pytest.raises(
        DispatchError, match=r"'careless' cannot distribute the arguments \(int\): AttributeError"
    ) as caught:
        Careless().distribute(group_of(2), (3,), {})
    assert isinstance(caught.value.__cause__, AttributeError)
    with pytest.raises(DispatchError, match=r"\(x=int\): TypeError"):
        Careless().distribute(group_of(2), (), {"x": 3})
    with pytest.raises(DispatchError, match=r"'careless' cannot collect the outputs \(int\): AttributeError"):
        Careless().join(group_of(2), RankOutputs([1], [0]))


def test_a_mode_must_give_a_call_for_each_rank() -> None:
    class Short(Careless):
        def dispatch(self, worker_group):
            return Calls.each([1])

    class Other(Careless):
        def dispatch(self, worker_group):
            return [1, 2]

    with pytest.raises(DispatchError, match="each of the 2 ranks, got 1 calls"):
        Short().distribute(group_of(2), (), {})
    with pytest.raises(DispatchError, match="got list"):
        Other().distribute(group_of(2), (), {})


def test_all_to_all_names_the_argument_that_does_not_fit() -> None:
    with pytest.raises(DispatchError, match=r"argument 1 must .* each of the 2 ranks, got list of length 3"):
        AllToAll().distribute(group_of(2), ([1, 2], [1, 2, 3]), {})
    with pytest.raises(DispatchError, match=r"argument 'x' must .* got 3; use Dispatch.ONE_TO_ALL"):
        AllToAll().distribute(group_of(2), (), {"x": 3})


def test_constructor_arguments_are_checked_at_once() -> None:
    class Two(Worker):
        def __init__(self, a: int, b: int) -> None:
            self.sum = a + b

    assert ClassWithInitArgs(Two, 1, b=2)().sum == 3
    with pytest.raises(TypeError, match=r"Two\(a: .* cannot be built: missing a required argument: 'b'"):
        ClassWithInitArgs(Two, 1)


def test_a_worker_outside_a_group_is_rank_0_of_1() -> None:
    class Plain(Worker):
        def __init__(self) -> None:
            self.seen = (self.rank, self.world_size, dict(self.colocated))

    assert Plain().seen == (0, 1, {})
    with pytest.raises(DispatchError, match=r"Plain on rank 0 has no mesh 'actor' \(registered: b, train\)"):
        worker = Plain()
        worker.register_mesh("train", 0)
        worker.register_mesh("b", 0)
        worker.query_mesh("actor")
    with pytest.raises(RollcastError, match="dp_rank is -1"):
        Plain().register_mesh("train", -1)


def test_coordinates_in_a_mesh() -> None:
    class Plain(Worker): ...

    worker, given = Plain(), {"tp": 1, "pp": 0}
    worker.register_mesh("train", 2, False, coords=given)
    given["tp"] = 7
    place = worker.query_mesh("train")
    assert place == MeshInfo(2, False, {"tp": 1, "pp": 0}) != MeshInfo(2, False)
    assert pickle.loads(pickle.dumps(place)) == place
    assert len({place, place}) == 1
    with pytest.raises(DispatchError, match=r"mesh 'train': coords are \{'tp': -1\}"):
        worker.register_mesh("train", 0, coords={"tp": -1})
    with pytest.raises(DispatchError, match="'dp', whose place is dp_rank"):
        worker.register_mesh("train", 0, coords={"dp": 0})


def test_a_method_may_be_registered_with_a_pair_of_functions() -> None:
    def spread(group, start, *, step=1):
        return [range(start, start + group.world_size)], {"step": [step] * group.world_size}

    def total(group, outputs):
        return sum(outputs) * group.world_size

    class Adder(Worker):
        @register(dispatch_mode=(spread, total))
        def add(self, x, step):
            return x + step

        @register(dispatch_mode={"dispatch_fn": spread, "collect_fn": total}, blocking=False)
        def add_later(self, x, step):
            return x + step

    for _, _, entry in list(iter_registered(Adder))[:2]:
        assert entry.dispatch_mode.name == "spread+total"
        calls = entry.dispatch_mode.distribute(group_of(3), (5,), {"step": 2})
        assert [(call.args, call.kwargs) for call in calls.per_rank] == [((n,), {"step": 2}) for n in (5, 6, 7)]
        assert entry.dispatch_mode.join(group_of(3), RankOutputs([7, 8, 9], [0, 1, 2])) == 72
    assert "spread+total" not in dispatch_modes
    for wrong in ((spread,), (spread, 3), (spread, total, total), (int, total)):
        with pytest.raises(DispatchError, match=r"a pair of functions \(dispatch, collect\)"):
            register(dispatch_mode=wrong)


def test_workers_are_imported_from_a_checkout_that_is_not_installed() -> None:
    code = (
        "import importlib.metadata as metadata\n"
        "metadata.MetadataPathFinder.find_distributions = lambda *args, **kwargs: iter(())\n"
        "from rollcast import Dispatch, Execute, Worker, register\n"
        "class Mine(Worker):\n"
        "    @register(dispatch_mode=Dispatch.RANK_ZERO)\n"
        "    def run(self): ...\n"
        "    @register(dispatch_mode='all_to_all', execute_mode=Execute.ALL)\n"
        "    def each(self, x): ...\n"
        "print(Mine().rank)\n"
        "try: Dispatch.DP_COMPUTE_PROTO\n"
        "except Exception as error: print(type(error).__name__)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (found.stdout.split(), found.stderr) == (["0", "UnknownDispatchModeError"], "")
