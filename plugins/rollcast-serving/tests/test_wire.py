"""What replicas and callers say to each other comes back as it was."""

from __future__ import annotations

import array
import struct
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollcast import errors
from rollcast.contracts.rollout import EngineLoad, RolloutOutput, RolloutRequest, RolloutSequence, SamplingParams
from rollcast.contracts.weights import WeightReport
from rollcast.errors import RequestError, RolloutError, WeightSyncError
from rollcast_serving import wire

FLOATS = st.floats(-60, 0, width=32)
SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_p=st.floats(0.1, 1),
    top_k=st.integers(-1, 50),
    max_tokens=st.integers(1, 100),
    stop_token_ids=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    n=st.integers(1, 3),
    ignore_eos=st.booleans(),
    min_p=st.floats(0, 1),
    logit_bias=st.lists(st.tuples(st.integers(0, 9), st.floats(-9, 9)), max_size=3).map(tuple),
)


def there_and_back(data: Any) -> Any:
    return wire.unpack(msgpack.packb(data))


@given(st.text(), st.lists(st.integers(0, 2**31 - 1)), SAMPLINGS, st.one_of(st.none(), st.integers(0, 2**63 - 1)))
def test_requests(name: str, ids: list[int], sampling: SamplingParams, seed: int | None) -> None:
    request = RolloutRequest("caller's", ids, sampling, seed)
    body, refused = wire.encode_requests({name: request, "other": request})
    first, second = wire.decode_requests(body)
    assert not refused
    assert (first.request_id, second.request_id) == (name, "other")
    assert first.prompt_ids == array.array("i", ids)
    assert (first.sampling, first.seed) == (second.sampling, second.seed) == (sampling, seed)


@pytest.mark.parametrize("ids", [[1, "x"], [1.5], [2**31], np.array([0.5]), np.array([2**40]), np.array([[1]])])
def test_a_prompt_that_cannot_travel_costs_no_other(ids: Any) -> None:
    good, bad = (RolloutRequest("r", each, SamplingParams()) for each in ([1], ids))
    body, refused = wire.encode_requests({"a": good, "b": bad, "c": good})
    assert [request.request_id for request in wire.decode_requests(body)] == ["a", "c"]
    assert list(refused) == ["b"]
    assert isinstance(refused["b"], RequestError)


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint16])
def test_arrays_are_taken_whole(kind: type) -> None:
    body, _ = wire.encode_requests({"a": RolloutRequest("r", np.arange(5, dtype=kind), SamplingParams())})  # type: ignore[arg-type]
    assert list(wire.decode_requests(body)[0].prompt_ids) == [0, 1, 2, 3, 4]


def test_bytes_a_token() -> None:
    count, group = 4096, 8
    prompts = {
        f"prefix/{n}": RolloutRequest(str(n), array.array("i", [7]) * 64, SamplingParams(max_tokens=count))
        for n in range(group)
    }
    versions = array.array("q", [3]) * (count - 5) + array.array("q", [4]) * 5
    tokens, log_probs = array.array("i", [70_000]) * count, array.array("f", [-1.5]) * count
    outputs = [RolloutOutput(n, [RolloutSequence(tokens, log_probs, "stop", versions)], SamplingParams()) for n in "ab"]
    answers = sum(len(wire.pack_frame({"id": "prefix/1", "output": wire.encode_output(each)})) for each in outputs)
    assert (answers + len(wire.encode_requests(prompts)[0]) * len(outputs) / group) / (count * len(outputs)) <= 9


def as_lists(sequence: RolloutSequence) -> tuple[object, ...]:
    """Arrays and lists of the same numbers are not equal."""
    numbers = (sequence.token_ids, sequence.log_probs, sequence.weight_versions)
    return sequence.finish_reason, *map(list, numbers)


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2**31 - 1), FLOATS, st.integers(0, 9)), max_size=20).map(
            lambda rows: RolloutSequence([r[0] for r in rows], [r[1] for r in rows], "stop", [r[2] for r in rows])
        ),
        max_size=3,
    ),
    SAMPLINGS,
)
def test_outputs(sequences: list[RolloutSequence], sampling: SamplingParams) -> None:
    output = RolloutOutput("name", sequences, sampling)
    request = RolloutRequest("name", [], sampling)
    came = wire.decode_output(there_and_back(wire.encode_output(output)), request)
    assert (came.request_id, came.sampling) == (output.request_id, output.sampling)
    assert [as_lists(each) for each in came.sequences] == [as_lists(each) for each in sequences]


def test_log_probs_travel_in_float32() -> None:
    output = RolloutOutput("r", [RolloutSequence([1], [-0.1], "length", [0])], SamplingParams())
    (sequence,) = wire.decode_output(wire.encode_output(output), RolloutRequest("r", [], SamplingParams())).sequences
    assert list(sequence.log_probs) == [struct.unpack("f", struct.pack("f", -0.1))[0]]


def test_experts_travel_as_they_are() -> None:
    routed = np.arange(-1, 11, dtype=np.int16).reshape(2, 3, 2)
    output = RolloutOutput("r", [RolloutSequence([1], [-0.1], "length", [0], routed)], SamplingParams())
    came = wire.decode_output(there_and_back(wire.encode_output(output)), RolloutRequest("r", [], SamplingParams()))
    found = came.sequences[0].routed_experts
    assert found is not None
    assert found.dtype == np.int16
    assert np.array_equal(found, routed)


def test_reports() -> None:
    report = WeightReport(3, 4, 5, 0.5, {"0": "ab"}, 0.25)
    assert wire.decode_report(there_and_back(wire.encode_report(report))) == report


@pytest.mark.parametrize("name", [name for name in vars(errors) if name.endswith("Error")])
def test_every_error_of_ours(name: str) -> None:
    kind = getattr(errors, name)
    came = wire.decode_error(there_and_back(wire.encode_error(kind("what happened"))), "replica 3")
    assert type(came) is kind
    assert str(came) == "replica 3: what happened"


def test_other_errors_become_the_nearest() -> None:
    class Special(WeightSyncError):
        pass

    came = wire.decode_error(wire.encode_error(Special("gone", tensor="w")), "here")
    assert type(came) is WeightSyncError
    assert came.tensor == "w"
    other = wire.decode_error(wire.encode_error(KeyError("x")), "here")
    assert type(other) is RolloutError
    assert "KeyError" in str(other)
    assert type(wire.decode_error({"kind": "os", "message": "m"}, "here")) is RolloutError


@pytest.mark.parametrize(
    "data",
    [
        {},
        5,
        {"groups": []},
        {"samplings": [{"wrong": 1}], "groups": []},
        {"samplings": [5], "groups": []},
        {"samplings": [], "groups": [[b"", 0, [["a", None]]]]},
        {"samplings": [{}], "groups": [[b"abc", 0, [["a", None]]]]},
        {"samplings": [{}], "groups": [[b"abcd", 0, [["a"]]]]},
        {"samplings": [{}], "groups": [["a"]]},
    ],
)
def test_no_requests(data: Any) -> None:
    with pytest.raises(RequestError):
        wire.decode_requests(msgpack.packb(data))


def test_no_msgpack() -> None:
    for data in (b"", b"{", b"\xc1"):
        with pytest.raises(RequestError):
            wire.decode_requests(data)


@pytest.mark.parametrize("data", [5, [[b"abc", b"", "stop", []]], [3], [[b"", b"", "stop", [[1, "x"]]]]])
def test_no_outputs(data: Any) -> None:
    with pytest.raises(RolloutError):
        wire.decode_output(data, RolloutRequest("r", [], SamplingParams()))


def test_multi_modal_data_is_refused_by_name() -> None:
    request = RolloutRequest(
        "r7", [1], SamplingParams(), multi_modal_data={"image": [b""], "audio": [b""], "video": [b""]}
    )
    _, refused = wire.encode_requests({"a": request})
    assert isinstance(refused["a"], errors.CapabilityError)
    assert "request 'r7' carries multi_modal_data (audio, video)" in str(refused["a"])


def test_a_group_s_prompt_travels_once_with_all_seeds() -> None:
    prompt, sampling = array.array("i", range(1000)), SamplingParams(max_tokens=5)
    alone = len(wire.encode_requests({"0": RolloutRequest("r", prompt, sampling, 0)})[0])
    # Rows of a batch hold equal prompts, not the same object.
    group = {str(n): RolloutRequest("r", prompt[:], SamplingParams(max_tokens=5), n) for n in range(16)}
    body, _ = wire.encode_requests(group)
    assert len(body) - alone < 16 * 16
    came = wire.decode_requests(body)
    assert [(each.request_id, each.seed) for each in came] == [(str(n), n) for n in range(16)]
    assert all(each.prompt_ids == prompt for each in came)
    other = {**group, "x": RolloutRequest("r", prompt, SamplingParams(max_tokens=6), 1)}
    assert {
        each.request_id: each.sampling.max_tokens for each in wire.decode_requests(wire.encode_requests(other)[0])
    } == {
        **{str(n): 5 for n in range(16)},
        "x": 6,
    }


def test_loads() -> None:
    load = EngineLoad(256, 3, 2, 0.5, 7)
    assert wire.decode_load(there_and_back(wire.encode_load(load))) == load
    for data in ([1, 2], None, ["x"] * 5):
        with pytest.raises(RolloutError, match="load is malformed"):
            wire.decode_load(data)
