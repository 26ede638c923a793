from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcast.errors import CheckpointError, DataError
from rollcast.protocol import DataProto
from rollcast_data.contract import BaseDataset
from rollcast_data.loader import EpochIterator, EpochSampler, FirstRows, build_loader


class Numbers(BaseDataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index

    def collate(self, rows: list[int]) -> DataProto:
        return DataProto.from_dict(tensors={"index": torch.tensor(rows)})


def take(batches: EpochIterator, count: int) -> list[list[int]]:
    return [next(batches)["index"].tolist() for _ in range(count)]


def build(rows: int = 10, batch_size: int = 3, **kwargs: Any) -> EpochIterator:
    return EpochIterator(build_loader(Numbers(rows), batch_size, **{"seed": 5, **kwargs}))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 17),
    batch_size=st.integers(1, 17),
    seed=st.integers(-3, 2**40),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    kills=st.lists(st.integers(0, 9), min_size=1, max_size=3),
)
def test_a_run_killed_anywhere_goes_on_as_if_nothing_had_happened(
    rows: int, batch_size: int, seed: int, shuffle: bool, drop_last: bool, kills: list[int]
) -> None:
    if drop_last:
        batch_size = min(batch_size, rows)
    options: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "drop_last": drop_last}
    whole = take(build(rows, batch_size, **options), sum(kills) + 5)
    pieces: list[list[int]] = []
    state: str | None = None
    for count in [*kills, 5]:
        batches = build(rows, batch_size, **options)
        if state is not None:
            batches.load_state_dict(json.loads(state))
        pieces += take(batches, count)
        state = json.dumps(batches.state_dict())
    assert pieces == whole


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 40), batch_size=st.integers(1, 40), shuffle=st.booleans())
def test_an_epoch_has_every_row_once(rows: int, batch_size: int, shuffle: bool) -> None:
    batches = build(rows, batch_size, shuffle=shuffle, drop_last=False)
    for epoch in range(3):
        assert batches.epoch == epoch
        seen = [row for batch in take(batches, batches.batches_per_epoch) for row in batch]
        assert sorted(seen) == list(range(rows))
        assert shuffle or seen == list(range(rows))


@pytest.mark.parametrize(("first", "second"), [(2, 0), (0, 2), (2, 2)])
@pytest.mark.parametrize("position", [2, 3])
def test_the_number_of_workers_changes_nothing(first: int, second: int, position: int) -> None:
    whole = take(build(), position + 4)
    batches = build(num_workers=first)
    assert take(batches, position) == whole[:position]
    resumed = build(num_workers=second)
    resumed.load_state_dict(batches.state_dict())
    assert take(resumed, 4) == whole[position:]


def test_going_back_within_one_iterator() -> None:
    batches = build()
    take(batches, 2)
    state = batches.state_dict()
    after = take(batches, 5)
    batches.load_state_dict(state)
    assert take(batches, 5) == after
    assert (batches.epoch, batches.batch) == (2, 1)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("position", [1, 2])
def test_the_loaders_own_state_resumes_within_an_epoch(num_workers: int, position: int) -> None:
    def loader() -> Any:
        made = build_loader(Numbers(10), 3, seed=5, num_workers=num_workers)
        made.sampler.set_position(4)
        return made

    whole = [batch["index"].tolist() for batch in loader()]
    stopped = loader()
    batches = iter(stopped)
    for _ in range(position):
        next(batches)
    resumed = loader()
    resumed.load_state_dict(stopped.state_dict())
    assert [batch["index"].tolist() for batch in resumed] == whole[position:]


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return EpochSampler(50, True, seed).order(epoch)

    torch.manual_seed(1)
    first = order(3, 4)
    torch.manual_seed(2)
    assert order(3, 4) == first
    assert len({tuple(order(seed, epoch)) for seed in range(5) for epoch in range(5)}) == 25


def test_iterating_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    take(build(), 7)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_resuming_with_other_settings_is_refused() -> None:
    state = build().state_dict()
    with pytest.raises(CheckpointError, match="rows was 10, is 11; batch_size was 3, is 4"):
        build(11, 4).load_state_dict(state)
    with pytest.raises(CheckpointError, match="seed was 5, is 6"):
        build(seed=6).load_state_dict(state)
    with pytest.raises(CheckpointError, match="lacks epoch"):
        build().load_state_dict({key: value for key, value in state.items() if key != "epoch"})


def test_batch_sizes_that_do_not_fit() -> None:
    with pytest.raises(DataError, match="the batch size 11 is larger than the dataset: it has 10 rows"):
        build(10, 11)
    with pytest.raises(DataError, match="the batch size is 0"):
        build(10, 0)
    with pytest.raises(DataError, match="no rows"):
        build(0, 1)
    assert take(build(10, 11, drop_last=False, shuffle=False), 1) == [list(range(10))]


def test_first_rows() -> None:
    assert len(FirstRows(Numbers(10), -1)) == 10
    assert len(FirstRows(Numbers(10), 20)) == 10
    few = FirstRows(Numbers(10), 4)
    assert [few[i] for i in range(len(few))] == [0, 1, 2, 3]
    assert few[-1] == 3
    with pytest.raises(IndexError):
        few[4]
    assert few.collate([1])["index"].tolist() == [1]


@pytest.mark.filterwarnings("ignore:.*set_vital")
def test_a_loader_built_elsewhere_is_refused() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    with pytest.raises(DataError, match="build_loader"):
        EpochIterator(StatefulDataLoader([1, 2]))
