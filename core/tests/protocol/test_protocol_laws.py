"""Laws that hold for every DataProto, whatever its columns and length."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from protocol_batches import batches, law, rows_of, snapshot

from rollcast.errors import DataProtoError
from rollcast.protocol import DataProto

counts = st.integers(1, 5)


@law
@given(batches(), counts)
def test_concat_of_chunks_is_the_whole(dp: DataProto, chunks: int) -> None:
    before = snapshot(dp)
    if len(dp) % chunks:
        with pytest.raises(DataProtoError, match=f"{len(dp)} rows cannot be cut in {chunks}"):
            dp.chunk(chunks)
        return
    parts = dp.chunk(chunks)
    assert [len(part) for part in parts] == [len(dp) // chunks] * chunks
    assert snapshot(DataProto.concat(parts)) == before == snapshot(dp)


@law
@given(batches(), counts)
def test_concat_of_split_is_the_whole(dp: DataProto, size: int) -> None:
    before = snapshot(dp)
    parts = dp.split(size)
    assert all(len(part) == size for part in parts[:-1])
    assert sum(map(len, parts)) == len(dp)
    assert snapshot(DataProto.concat(parts)) == before == snapshot(dp)


@law
@given(batches(), counts, st.sampled_from(["last", "first", "cycle"]))
def test_unpad_undoes_pad(dp: DataProto, divisor: int, mode: str) -> None:
    before = snapshot(dp)
    padded, pad_size = dp.pad_to_divisor(divisor, mode)  # type: ignore[arg-type]
    assert len(padded) % divisor == 0
    assert 0 <= pad_size < divisor
    assert snapshot(padded.unpad(pad_size)) == before == snapshot(dp)
    rows = rows_of(dp)
    if rows:
        expected = {
            "last": rows[-1:] * pad_size,
            "first": rows[:1] * pad_size,
            "cycle": (rows * divisor)[:pad_size],
        }
        assert repr(rows_of(padded)[len(dp) :]) == repr(expected[mode])


@law
@given(batches(), st.randoms(use_true_random=False))
def test_reordering_back_is_the_identity(dp: DataProto, random: Random) -> None:
    before = snapshot(dp)
    order = list(range(len(dp)))
    random.shuffle(order)
    moved = dp.reordered(order)
    assert repr(rows_of(moved)) == repr([rows_of(dp)[i] for i in order])
    inverse = torch.tensor(order, dtype=torch.int64).argsort()
    assert snapshot(moved.reordered(inverse)) == before == snapshot(dp)


@law
@given(batches(), st.integers(0, 3))
def test_repeat_counts_and_order(dp: DataProto, times: int) -> None:
    rows = rows_of(dp)
    assert repr(rows_of(dp.repeat(times))) == repr([row for row in rows for _ in range(times)])
    assert repr(rows_of(dp.repeat(times, interleave=False))) == repr(rows * times)


@law
@given(batches(), st.data())
def test_joined_undoes_select_and_drop(dp: DataProto, data: st.DataObject) -> None:
    before = snapshot(dp)
    keys = data.draw(st.lists(st.sampled_from(dp.keys()), unique=True)) if dp.keys() else []
    rest, taken = dp.drop(keys), dp.select(keys)
    assert taken.keys() == keys
    assert sorted(rest.keys() + keys) == sorted(dp.keys())
    assert len(rest) == len(taken) == len(dp)
    assert snapshot(rest.joined(taken).select(dp.keys())) == before == snapshot(dp)


selectors = st.one_of(
    st.builds(slice, *[st.none() | st.integers(-12, 12)] * 2, st.sampled_from([None, 1, 2, -1, -3])),
    st.lists(st.integers(-9, 8), max_size=6),
    st.integers(-9, 8),
)


@law
@given(batches(), selectors)
@example(DataProto(length=1), slice(-2, 0, -1))
@example(DataProto(length=3), slice(2, 1))
def test_indexing_is_that_of_a_list_of_rows(dp: DataProto, selector: slice | list[int] | int) -> None:
    rows = rows_of(dp)
    before = snapshot(dp)
    wanted = [selector] if isinstance(selector, int) else selector
    if isinstance(wanted, list) and any(not -len(dp) <= i < len(dp) for i in wanted):
        with pytest.raises(IndexError, match=f"out of range for {len(dp)} rows"):
            dp[selector]
        return
    expected = [rows[i] for i in wanted] if isinstance(wanted, list) else rows[wanted]
    assert repr(rows_of(dp[selector])) == repr(expected)
    if isinstance(selector, list):
        as_tensor = torch.tensor(selector, dtype=torch.int64)
        assert repr(rows_of(dp[as_tensor])) == repr(expected)
        assert repr(rows_of(dp[as_tensor.numpy()])) == repr(expected)
    assert snapshot(dp) == before


@law
@given(batches(), st.data())
def test_masks_choose_rows(dp: DataProto, data: st.DataObject) -> None:
    mask = data.draw(st.lists(st.booleans(), min_size=len(dp), max_size=len(dp)))
    expected = [row for row, chosen in zip(rows_of(dp), mask, strict=True) if chosen]
    assert repr(rows_of(dp[torch.tensor(mask, dtype=torch.bool)])) == repr(expected)
    if mask:
        assert repr(rows_of(dp[mask])) == repr(expected)


@law
@given(batches())
def test_round_trips_of_every_kind(dp: DataProto) -> None:
    before = snapshot(dp)
    copies = [pickle.loads(pickle.dumps(dp, protocol)) for protocol in (2, 4, 5)]
    copies += [copy.deepcopy(dp), copy.copy(dp), dp.clone(), dp.to("cpu"), dp.slice(), dp.select()]
    buffers: list[pickle.PickleBuffer] = []
    header = pickle.dumps(dp, 5, buffer_callback=buffers.append)
    copies.append(pickle.loads(header, buffers=buffers))
    read_only = [memoryview(buffer.raw()).toreadonly() for buffer in buffers]
    copies.append(pickle.loads(header, buffers=read_only))
    for made in copies:
        assert snapshot(made) == before
        assert made.dtypes() == dp.dtypes()
        assert made.equal(dp)
        assert dp.equal(made)
    assert snapshot(dp) == before


@law
@given(dp=batches())
def test_saved_files_give_the_same(tmp_path_factory: pytest.TempPathFactory, dp: DataProto) -> None:
    path: Path = tmp_path_factory.mktemp("saved") / "batch"
    dp.save(path)
    assert snapshot(DataProto.load(path)) == snapshot(dp)
    assert [entry.name for entry in path.parent.iterdir()] == ["batch"]


@law
@given(batches(max_rows=5), st.data())
def test_a_row_slice_ships_exactly_its_bytes(dp: DataProto, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(dp)))
    end = data.draw(st.integers(start, len(dp)))
    part = dp.slice(start, end)
    buffers: list[pickle.PickleBuffer] = []
    pickle.dumps(part, 5, buffer_callback=buffers.append)
    shipped = sum(buffer.raw().nbytes for buffer in buffers)
    objects = sum(8 * len(part) for dtype in part.dtypes().values() if dtype is object)
    # Positions of objects are sent only where one object is used by several rows.
    assert part.nbytes - objects <= shipped <= part.nbytes


@law
@given(batches(max_rows=6), counts, counts, st.booleans())
def test_every_epoch_has_every_row_once(dp: DataProto, size: int, epochs: int, shuffle: bool) -> None:
    if len(dp) % size:
        with pytest.raises(DataProtoError, match="make_iterator"):
            dp.make_iterator(size, epochs)
        return
    generator = torch.Generator().manual_seed(3) if shuffle else None
    found = list(dp.make_iterator(size, epochs, generator=generator, shuffle=shuffle))
    per_epoch = len(dp) // size
    assert len(found) == per_epoch * epochs
    for epoch in range(epochs):
        rows = [row for dp_ in found[epoch * per_epoch :][:per_epoch] for row in rows_of(dp_)]
        expected = rows_of(dp)
        if shuffle:
            rows, expected = sorted(rows, key=repr), sorted(expected, key=repr)
        assert repr(rows) == repr(expected)
