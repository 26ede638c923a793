"""Faults that are planted are found, and correct code has none."""

from __future__ import annotations

from typing import Any

import pytest

from rollcast.errors import RollcastError
from rollcast_dryrun.process import MockProcess

MIB = 1 << 20


@pytest.fixture
def run(mock_process: MockProcess) -> Any:
    return lambda name, *arguments: mock_process.call(f"dryrun_scenarios:{name}", *arguments)


def kinds(record: dict[str, Any]) -> list[str]:
    return [kind for kind, _ in record["faults"]]


def test_a_read_without_an_event_is_a_race(run: Any) -> None:
    assert kinds(run("reads_after_event")) == []
    record = run("reads_without_event")
    assert kinds(record) == ["race"]
    assert "dryrun_scenarios.py" in record["faults"][0][1]


def test_a_message_read_on_another_stream_without_its_handle_is_a_race(run: Any) -> None:
    assert kinds(run("reads_a_message", True)) == []
    assert kinds(run("reads_a_message", False)) == ["race"]


def test_a_value_read_without_an_event_is_a_race(run: Any) -> None:
    assert kinds(run("reads_value_without_event")) == ["race"]


@pytest.mark.parametrize(("masked", "most"), [(False, 4 * MIB), (True, 28 * MIB)])
def test_attention_makes_no_matrix_of_all_heads(run: Any, masked: bool, most: int) -> None:
    record = run("attends", masked)
    assert record["gradients"] == [[1, 4, 2048, 16], [1, 2, 2048, 16], [1, 2, 2048, 16]]
    assert record["peak_allocated"] < most  # a mask becomes a bias of 8 MiB, which all heads share
    assert record["flops"] >= 3 * 4 * 4 * 2048 * 2048 * 16 / 2


def test_waits_that_code_asks_for_are_counted_by_line(run: Any) -> None:
    record = run("waits_on_request")
    assert sorted(record["host_waits"].values()) == [1, 1]
    assert all(place.endswith("in waits_on_request") for place in record["host_waits"])
    assert record["host_reads"] == {}


def test_a_write_to_what_another_stream_reads_is_a_race(run: Any) -> None:
    assert kinds(run("writes_what_is_read")) == ["race"]


def test_memory_that_is_freed_under_a_copy(run: Any) -> None:
    assert kinds(run("freed_under_a_copy", True)) == []
    assert kinds(run("freed_under_a_copy", False)) == ["early_free"]


def test_the_host_waits_for_a_copy_before_it_reads_or_writes(run: Any) -> None:
    assert kinds(run("host_reads_a_copy", True)) == []
    assert kinds(run("host_reads_a_copy", False)) == ["host_race"]
    assert kinds(run("host_writes_what_is_sent")) == ["host_race"]
    assert kinds(run("host_uses_large_memory", True)) == []
    assert kinds(run("host_uses_large_memory", False)) == ["host_race"]


def test_an_unpinned_copy_blocks(run: Any) -> None:
    (copy,) = run("unpinned_copy")["copies"]
    assert (copy["to_device"], copy["pinned"], copy["blocking"], copy["bytes"]) == (True, False, True, 4 * MIB)


def test_values_read_in_a_loop_are_counted_by_line(run: Any) -> None:
    ((place, count),) = run("item_in_a_loop")["host_reads"].items()
    assert place.endswith("in item_in_a_loop")
    assert count == 5


def test_a_second_gather_is_counted(run: Any) -> None:
    for times in (1, 2):
        (gather,) = run("gathers", times)["collectives"]
        assert (gather["kind"], gather["ranks"], gather["nodes"], gather["calls"]) == ("all_gather", 8, False, times)
        assert gather["bytes"] == times * 32 * MIB


def test_the_group_of_a_collective(run: Any) -> None:
    for size, nodes in ((8, False), (16, True)):
        (reduce,) = run("reduces_over", size)["collectives"]
        assert (reduce["kind"], reduce["ranks"], reduce["nodes"]) == ("all_reduce", size, nodes)


def test_a_product_in_float32_holds_more(run: Any) -> None:
    assert run("product", "float32")["peak_allocated"] == run("product", "bfloat16")["peak_allocated"] + 6 * MIB


def test_a_buffer_that_is_there_twice(run: Any) -> None:
    assert run("two_copies_of_a_buffer")["peak_allocated"] == 128 * MIB


def test_a_buffer_left_on_the_host(run: Any) -> None:
    assert "same device" in run("buffer_on_the_host") or "two devices" in run("buffer_on_the_host")


def test_small_tensors_have_the_values_of_ranks_alike(run: Any) -> None:
    assert run("counts_of_all_ranks") == [12.0, 20.0, 12.0, 20.0]
    assert run("indices_of_a_mask") == [0, 4, 6]


def test_kernels_in_triton_are_compiled_for_the_device(run: Any) -> None:
    pytest.importorskip("triton")
    record = run("launches", "doubled")
    assert record["kernels"] == {"doubled": 1}
    assert ".target sm_90" in record["ptx"]
    assert kinds(record) == []
    assert kinds(run("launches", "doubled", False)) == ["race"]
    with pytest.raises(RollcastError, match="power of 2"):
        run("launches", "of_odd_blocks")


def test_a_batch_goes_to_a_device_and_back(run: Any) -> None:
    record = run("batch_on_a_device")
    assert record["faults"] == []
    assert record["device"] == "cuda:0"
    assert (record["scores"], record["ids"]) == ([2.0, 0.0], [[4, 5], [0, 1]])


def test_the_profiler_describes_the_device(run: Any) -> None:
    assert run("describes_device") == ["NVIDIA H200", 131, pytest.approx(989e12, rel=0.01)]


def test_attention_kernels_say_what_does_not_fit(run: Any) -> None:
    pytest.importorskip("rollcast_fsdp")
    assert run("unfit_for_packed_rows", "float32", 64) == [
        "attention kernels for packed rows compute in bfloat16 or float16, and the model in float32"
    ]
    (reason,) = run("unfit_for_packed_rows", "bfloat16", 512)
    assert "heads of at most 256, and the model's have 512" in reason


def test_liger_refuses_a_model_that_it_does_not_know(run: Any) -> None:
    pytest.importorskip("rollcast_fsdp")
    pytest.importorskip("liger_kernel")
    assert "Liger has no kernels for gpt2; it has them for" in run("liger_refuses")


def test_an_interrupted_call_s_answer_is_not_the_next_one_s(
    mock_process: MockProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("rollcast_dryrun.process.json.loads", interrupt)
        mock_process.call("builtins:len", [1, 2])
    assert [mock_process.call("builtins:len", ["x"] * count) for count in (5, 7)] == [5, 7]


def test_a_new_engine_leaves_the_device_s_random_numbers(run: Any) -> None:
    pytest.importorskip("rollcast_fsdp")
    assert run("random_state_of_a_new_engine") is True
