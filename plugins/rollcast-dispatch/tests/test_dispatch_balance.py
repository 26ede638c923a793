"""TOKEN_BALANCED: how rows are dealt out, and that the deal is as even as is said."""

from __future__ import annotations

import heapq
from typing import Any

import pytest
import torch
from dispatch_functions import numbered
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcast import DataProto, Dispatch
from rollcast.contracts.dispatch import MeshInfo, RankOutputs
from rollcast.errors import DispatchError
from rollcast.protocol import Jagged, karmarkar_karp, store_batch
from rollcast_dispatch import TokenBalanced, make_token_balanced_dispatch_fn
from rollcast_dispatch.balance import deal_near, exchange_items, plan_shards
from rollcast_testing.dispatch import FakeGroup

law = settings(deadline=None, max_examples=150)
weights = st.lists(st.integers(0, 40) | st.just(1000), max_size=40)
parts = st.integers(1, 7)


def data_parallel(ranks: int) -> FakeGroup:
    return FakeGroup([MeshInfo(rank, True) for rank in range(ranks)])


def rows_of_lengths(lengths, uids=None) -> DataProto:
    width = max(lengths, default=0) + 1
    mask = torch.arange(width) < torch.tensor(lengths, dtype=torch.int64).unsqueeze(1)
    ragged = torch.nested.nested_tensor_from_jagged(
        torch.arange(sum(lengths)), torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    )
    columns = {"attention_mask": mask.flip(1).long(), "tokens": ragged, "length": torch.tensor(lengths).long()}
    return DataProto.from_dict(
        {"row": torch.arange(len(lengths)), **columns}, {"uid": uids or [f"u{row}" for row in range(len(lengths))]}
    )


def shards_of(mode, batch, ranks) -> list[DataProto]:
    return [call.args[0] for call in mode.distribute(data_parallel(ranks), (batch,), {}).per_rank]


def load(lengths, rows) -> int:
    return sum(lengths[row] for row in rows)


def tokens(shard) -> int:
    return int(shard["length"].sum())


# -- the largest differencing method --------------------------------------------------------------------


@law
@given(weights=weights, parts=parts, equal=st.booleans())
def test_parts_hold_every_item_once_and_differ_by_one_item_at_most(weights, parts, equal) -> None:
    if equal:
        weights = weights[: len(weights) // parts * parts]
    found = karmarkar_karp(weights, parts, equal)
    assert len(found) == parts
    assert sorted(item for part in found for item in part) == list(range(len(weights)))
    assert all(part == sorted(part) for part in found)
    if equal:
        assert {len(part) for part in found} == {len(weights) // parts}
    sums = [sum(weights[item] for item in part) for part in found]
    assert max(sums) - min(sums) <= max(weights, default=0)
    assert karmarkar_karp(list(weights), parts, equal) == found


@law
@given(weights=weights)
def test_two_parts_differ_as_the_method_says(weights) -> None:
    """The textbook form for two parts keeps the numbers only: replace the two largest by their difference."""
    heap = [-weight for weight in weights] or [0]
    heapq.heapify(heap)
    while len(heap) > 1:
        heapq.heappush(heap, heapq.heappop(heap) - heapq.heappop(heap))
    sums = [sum(weights[item] for item in part) for part in karmarkar_karp(weights, 2, equal_size=False)]
    assert abs(sums[0] - sums[1]) == -heap[0]


def test_known_partitions() -> None:
    assert karmarkar_karp([8, 7, 6, 5, 4], 2, equal_size=False) == [[0, 2], [1, 3, 4]]  # 14 and 16
    assert karmarkar_karp([4, 5, 6, 7, 8], 3, equal_size=False) == [[0, 3], [1, 2], [4]]  # 11, 11 and 8
    sums = [sum(16 - item for item in part) for part in karmarkar_karp([16 - i for i in range(16)], 4, equal_size=True)]
    assert sums == [34] * 4
    assert karmarkar_karp([3], 3, equal_size=False) == [[0], [], []]
    assert karmarkar_karp([], 2, equal_size=True) == [[], []]


@law
@given(weights=weights, parts=parts)
def test_exchanges_keep_sizes_and_make_nothing_worse(weights, parts) -> None:
    weights = weights[: len(weights) // parts * parts]
    before = [list(range(number, len(weights), parts)) for number in range(parts)]
    after = exchange_items(before, weights)
    assert sorted(item for part in after for item in part) == list(range(len(weights)))
    assert [len(part) for part in after] == [len(part) for part in before]
    assert max(load(weights, part) for part in after) <= max(load(weights, part) for part in before)
    assert min(load(weights, part) for part in after) >= min(load(weights, part) for part in before)


@law
@given(weights=st.lists(st.integers(0, 40), min_size=2, max_size=8))
def test_of_two_parts_no_exchange_is_left_that_would_help(weights) -> None:
    half = len(weights) // 2
    one, other = exchange_items([list(range(half)), list(range(half, half * 2))], weights)
    gap = load(weights, one) - load(weights, other)
    for a in one:
        for b in other:
            assert abs(gap - 2 * (weights[a] - weights[b])) >= abs(gap)


@law
@given(weights=weights, parts=parts)
def test_items_near_home_are_dealt_about_as_evenly(weights, parts) -> None:
    weights = weights[: len(weights) // parts * parts]
    size = len(weights) // parts
    homes = [list(range(number * size, (number + 1) * size)) for number in range(parts)]
    even = karmarkar_karp(weights, parts, equal_size=True)
    near = deal_near(homes, even, weights)
    assert sorted(item for part in near for item in part) == list(range(len(weights)))
    assert {len(part) for part in near} == {size}
    assert max(load(weights, part) for part in near) <= 1.01 * max(load(weights, part) for part in even)


def test_rows_leave_their_run_only_for_the_balance() -> None:
    lengths = [9, 5, 5, 1, 1, 5, 5, 5]  # the first run has 20 tokens, the second 16
    assert [shard.rows for shard in plan_shards(lengths, 2, None, equal_size=True)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    lengths = [9, 9, 5, 5, 1, 1, 5, 5]
    plan = plan_shards(lengths, 2, None, equal_size=True)
    assert [load(lengths, shard.rows) for shard in plan] == [20, 20]
    assert len({0, 1, 2, 3} & set(plan[0].rows)) == 3


def test_groups_stay_in_their_run_too() -> None:
    lengths = [9, 9, 5, 5, 5, 5, 5, 5, 1, 1, 5, 5]
    plan = plan_shards(lengths, 2, [[row, row + 1] for row in range(0, 12, 2)], equal_size=True)
    assert [load(lengths, shard.rows) for shard in plan] == [30, 30]
    assert len(set(range(6)) & set(plan[0].rows)) == 4


def test_the_rank_of_a_very_long_row_gets_short_ones() -> None:
    lengths = [60, 20, 20, 20, 20, 20, 10, 10]
    assert max(load(lengths, part) for part in karmarkar_karp(lengths, 2, equal_size=True)) > 100
    assert {load(lengths, shard.rows) for shard in plan_shards(lengths, 2, None, equal_size=True)} == {80, 100}


# -- shards ---------------------------------------------------------------------------------------------


@st.composite
def grouped_rows(draw):
    """Lengths, and the number of each row's group; groups of one size, of any sizes, or none."""
    kind = draw(st.sampled_from(["rows", "equal groups", "groups"]))
    if kind == "rows":
        lengths = draw(weights)
        return lengths, None
    sizes = draw(st.lists(st.integers(1, 4), max_size=10))
    if kind == "equal groups":
        sizes = [draw(st.integers(1, 4))] * len(sizes)
    owner = draw(st.permutations([group for group, size in enumerate(sizes) for _ in range(size)]))
    lengths = draw(st.lists(st.integers(0, 40), min_size=len(owner), max_size=len(owner)))
    return lengths, list(owner)


def groups_of(owner) -> list[list[int]] | None:
    if owner is None:
        return None
    return [[row for row, group in enumerate(owner) if group == each] for each in dict.fromkeys(owner)]


@law
@given(found=grouped_rows(), shards=parts, equal=st.booleans())
def test_shards_hold_every_row_once_and_keep_groups(found, shards, equal) -> None:
    lengths, owner = found
    plan = plan_shards(lengths, shards, groups_of(owner), equal)
    assert len(plan) == shards
    assert sorted(row for shard in plan for row in shard.rows) == list(range(len(lengths)))
    for group in groups_of(owner) or []:
        assert any(set(group) <= set(shard.rows) for shard in plan)
    for shard in plan:
        assert owner is None or not set(shard.padding) & set(shard.rows)
    sizes = {len(shard.rows) + len(shard.padding) for shard in plan}
    assert len(sizes) == 1 if equal else not any(shard.padding for shard in plan)
    if equal and owner is None:
        assert sizes == {-(-len(lengths) // shards)}


@law
@given(found=grouped_rows(), shards=parts, equal=st.booleans())
def test_no_shard_exceeds_the_mean_by_more_than_one_item(found, shards, equal) -> None:
    lengths, owner = found
    groups = groups_of(owner)
    plan = plan_shards(lengths, shards, groups, equal)
    if groups is None or not any(shard.padding for shard in plan):
        items = lengths if groups is None else [load(lengths, group) for group in groups]
        heaviest = max(load(lengths, (*shard.rows, *shard.padding)) for shard in plan)
        assert heaviest <= sum(lengths) / shards + max(items, default=0)


@law
@given(lengths=weights, shards=parts)
def test_no_shard_is_heavier_than_the_heaviest_of_dp_compute_proto(lengths, shards) -> None:
    batch = rows_of_lengths([min(length, 60) for length in lengths])
    mode = TokenBalanced()
    calls = Dispatch.DP_COMPUTE_PROTO.distribute(data_parallel(shards), (batch,), {}).per_rank
    heaviest = max(tokens(call.args[0]) for call in calls)
    assert max(tokens(shard) for shard in shards_of(mode, batch, shards)) <= heaviest


@law
@given(data=st.data(), shards=parts)
def test_groups_in_order_are_no_worse_than_consecutive_shards(data, shards) -> None:
    """Prompts with n responses each, as they come out of a rollout."""
    n, each = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    rows = n * each * shards
    lengths = data.draw(st.lists(st.integers(0, 40), min_size=rows, max_size=rows))
    groups = [list(range(start, start + n)) for start in range(0, rows, n)]
    plan = plan_shards(lengths, shards, groups, equal_size=True)
    assert not any(shard.padding for shard in plan)
    runs = [range(start, start + n * each) for start in range(0, rows, n * each)]
    assert max(load(lengths, shard.rows) for shard in plan) <= max(load(lengths, run) for run in runs)


# -- the mode -------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 9), max_size=20), ranks=st.integers(1, 5), group_key=st.sampled_from([None, "uid"])
)
def test_lengths_from_columns_of_every_kind(lengths, ranks, group_key) -> None:
    """The same rows go to the same ranks whether a mask, a jagged column or integers tell the lengths."""
    batch = rows_of_lengths(lengths, [f"u{row % 3}" for row in range(len(lengths))])
    by_mask, by_jagged, by_integers = (
        [shard["row"].tolist() for shard in shards_of(TokenBalanced(length_key=key, group_key=group_key), batch, ranks)]
        for key in ("attention_mask", "tokens", "length")
    )
    assert by_mask == by_jagged == by_integers


@settings(deadline=None, max_examples=60)
@given(lengths=st.lists(st.integers(0, 9), max_size=20), ranks=st.integers(1, 5), equal=st.booleans())
def test_a_group_is_computed_on_one_rank_and_its_rows_come_back_to_their_places(lengths, ranks, equal) -> None:
    uids = [f"u{row * 5 % 4}" for row in range(len(lengths))]
    mode, group = TokenBalanced(group_key="uid", equal_size=equal), data_parallel(ranks)
    calls = mode.distribute(group, (rows_of_lengths(lengths, uids),), {})
    marked = [
        call.args[0].with_columns(rank=torch.full((len(call.args[0]),), rank))
        for rank, call in enumerate(calls.per_rank)
    ]
    out = mode.join(group, RankOutputs(marked, range(ranks), calls.state))
    assert out["row"].tolist() == list(range(len(lengths)))
    assert out["uid"].tolist() == uids
    for uid in set(uids):
        computed_on = {rank for rank, each in zip(out["rank"].tolist(), uids, strict=True) if each == uid}
        assert len(computed_on) == 1
    lists = mode.join(group, RankOutputs([shard["row"].tolist() for shard in marked], range(ranks), calls.state))
    assert lists == list(range(len(lengths)))


def test_groups_are_told_by_numbers_too() -> None:
    batch = rows_of_lengths([5, 5, 1, 1]).with_columns(prompt=torch.tensor([7, 9, 7, 9]))
    shards = shards_of(TokenBalanced(group_key="prompt"), batch, 2)
    assert sorted(shard["row"].tolist() for shard in shards) == [[0, 2], [1, 3]]


def test_long_rows_are_spread() -> None:
    batch = rows_of_lengths([9, 8, 7, 6, 4, 3, 2, 1])
    assert [tokens(shard) for shard in shards_of(Dispatch.DP_COMPUTE_PROTO, batch, 2)] == [30, 10]
    shards = shards_of(TokenBalanced(), batch, 2)
    assert [tokens(shard) for shard in shards] == [20, 20]
    assert [len(shard) for shard in shards] == [4, 4]
    unequal = shards_of(TokenBalanced(equal_size=False), rows_of_lengths([12, 3, 3, 3, 3]), 2)
    assert [shard["row"].tolist() for shard in unequal] == [[0], [1, 2, 3, 4]]


def test_rows_of_one_length_are_sent_in_order_as_views() -> None:
    batch = rows_of_lengths([4] * 6)
    shards = shards_of(TokenBalanced(), batch, 3)
    assert [shard["row"].data_ptr() for shard in shards] == [batch["row"][i:].data_ptr() for i in (0, 2, 4)]


def test_padding_is_short_and_in_groups_from_elsewhere() -> None:
    (first, second) = shards_of(TokenBalanced(), rows_of_lengths([9, 2, 8]), 2)
    assert (first["row"].tolist(), second["row"].tolist()) == ([0, 1], [2, 1])
    batch = rows_of_lengths([9, 1, 5], ["a", "a", "b"])
    assert [shard["row"].tolist() for shard in shards_of(TokenBalanced(group_key="uid"), batch, 2)] == [[0, 1], [2, 1]]
    # The shortest row is of the group that needs padding beside it, so the other group's row is taken.
    batch = rows_of_lengths([5, 6, 1], ["a", "a", "b"])
    assert [shard["row"].tolist() for shard in shards_of(TokenBalanced(group_key="uid"), batch, 2)] == [[0, 1], [2, 0]]


def test_on_a_mesh_ranks_of_a_model_share_the_shard() -> None:
    group = FakeGroup([MeshInfo(0, True), MeshInfo(0, False), MeshInfo(1, False), MeshInfo(1, True)])
    mode = make_token_balanced_dispatch_fn("actor", length_key="length", group_key="uid", equal_size=False)
    assert (mode.length_key, mode.group_key, mode.equal_size) == ("length", "uid", False)
    calls = mode.distribute(group, (rows_of_lengths([1, 1, 6]),), {})
    assert group.asked == ["actor"]
    shards = [call.args[0] for call in calls.per_rank]
    assert shards[0] is shards[1]
    assert shards[2] is shards[3]
    assert [shard["row"].tolist() for shard in shards[::2]] == [[0, 1], [2]]
    outputs = RankOutputs([shards[0], "not this", "nor this", shards[3]], range(4), calls.state)
    assert mode.join(group, outputs)["row"].tolist() == [0, 1, 2]


def test_every_batch_is_dealt_alike_and_other_values_go_to_all() -> None:
    rows = rows_of_lengths([9, 8, 1])
    calls = TokenBalanced().distribute(data_parallel(2), (numbered(3), "plan"), {"data": rows})
    for call in calls.per_rank:
        assert call.args[0]["x"].tolist() == call.kwargs["data"]["row"].tolist()
        assert call.args[1] == "plan"


def test_of_remote_columns_only_the_lengths_are_fetched() -> None:
    batch = rows_of_lengths([3, 9, 1, 1, 2])
    stored: list[Any] = []
    fetched = []

    def fetch(cuts, timeout):
        fetched.extend(name for cut in cuts for name in cut.columns)
        return [cut.of(stored[0]) for cut in cuts]

    mode, group = TokenBalanced(), data_parallel(2)
    kept = store_batch(batch, stored.append).bound(fetch)
    calls = mode.distribute(group, (kept,), {})
    assert fetched == ["attention_mask"]
    shards = [call.args[0] for call in calls.per_rank]
    out = mode.join(group, RankOutputs(shards, (0, 1), calls.state))
    assert fetched == ["attention_mask"]
    assert out.is_remote
    assert out.local().equal(batch)


def test_without_a_key_jagged_prompts_and_responses_tell_the_lengths() -> None:
    prompts, responses = [1, 2, 9, 1], [8, 1, 1, 2]

    def jagged(lengths: list[int]) -> torch.Tensor:
        return Jagged.from_lengths(torch.zeros(sum(lengths), dtype=torch.int32), torch.tensor(lengths)).column()

    batch = DataProto.from_dict(
        {
            "length": torch.tensor(prompts) + torch.tensor(responses),
            "prompts": jagged(prompts),
            "responses": jagged(responses),
            # The trained tokens would be balanced by another deal.
            "response_mask": jagged([8, 1, 1, 2]),
        }
    )
    named = [shard["length"].tolist() for shard in shards_of(TokenBalanced(length_key="length"), batch, 2)]
    assert [shard["length"].tolist() for shard in shards_of(TokenBalanced(), batch, 2)] == named == [[9, 3], [10, 3]]
    ids = batch.select(["length"]).with_columns({"input_ids": jagged([9, 3, 10, 3])})
    assert [shard["length"].tolist() for shard in shards_of(TokenBalanced(), ids, 2)] == named


def test_a_batch_without_any_lengths_is_refused() -> None:
    complaint = r"no column that tells rows' lengths.*\['row'\].*prompts with responses.*length_key"
    with pytest.raises(DispatchError, match=complaint):
        TokenBalanced().distribute(data_parallel(2), (DataProto.from_dict({"row": torch.arange(4)}),), {})


# -- results and errors ---------------------------------------------------------------------------------


@pytest.fixture
def called():
    mode, group = TokenBalanced(), data_parallel(2)
    calls = mode.distribute(group, (rows_of_lengths([1, 2, 3]),), {})
    return lambda *outputs: mode.join(group, RankOutputs(outputs, (0, 1), calls.state))


def test_results_of_other_kinds(called) -> None:
    assert called(None, None) is None
    with pytest.raises(DispatchError, match="token_balanced joins DataProtos or lists, the workers returned dict"):
        called({}, {})
    with pytest.raises(DispatchError, match="returned DataProto, list"):
        called(numbered(2), [1, 2])
    with pytest.raises(DispatchError, match=r"the shards got \[2, 2\] rows and returned \[1, 2\].*DP_COMPUTE_METRIC"):
        called([1], [2, 3])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"length_key": "response_mask"}, r"the column 'response_mask' \(length_key\).*\['row', 'attention_mask'"),
        ({"group_key": "prompt"}, r"the column 'prompt' \(group_key\)"),
        ({"length_key": "uid"}, "'uid' .* tells no lengths.* and is ndarray"),
        ({"length_key": "score"}, r"'score' .* tells no lengths.* and is torch.float32 \[3\]"),
        ({"length_key": "negative"}, "'negative' has negative lengths, the least is -2"),
        ({"group_key": "attention_mask"}, "'attention_mask' .* must have one value a row"),
        ({"group_key": "tokens"}, "'tokens' .* must have one value a row"),
        ({"group_key": "info"}, "'info' .* cannot be compared, such as a dict in row 0"),
    ],
)
def test_columns_that_tell_nothing_are_refused(options, complaint) -> None:
    batch = rows_of_lengths([1, 2, 3]).with_columns(
        score=torch.ones(3), negative=torch.tensor([1, -2, 0]), info=[{}, {}, {}]
    )
    with pytest.raises(DispatchError, match=f"token_balanced.*{complaint}"):
        TokenBalanced(**options).distribute(data_parallel(2), (batch,), {})
