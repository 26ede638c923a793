"""What crosses process boundaries, byte by byte; and the file format."""

from __future__ import annotations

import copy
import json
import pickle
import struct
import subprocess
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from protocol_batches import DTYPES, numbered, sample, snapshot

from rollcast.errors import DataProtoError
from rollcast.protocol import DataProto


def out_of_band(dp: DataProto) -> tuple[bytes, list[memoryview]]:
    buffers: list[pickle.PickleBuffer] = []
    header = pickle.dumps(dp, 5, buffer_callback=buffers.append)
    return header, [buffer.raw() for buffer in buffers]


def address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)


@pytest.mark.parametrize("dtype", DTYPES)
def test_neither_side_copies(dtype: torch.dtype) -> None:
    sent = numbered(60, dtype).reshape(10, 6)
    header, buffers = out_of_band(DataProto.from_dict({"x": sent})[2:5])
    assert [buffer.nbytes for buffer in buffers] == [3 * 6 * dtype.itemsize]
    assert address(buffers[0]) == sent[2:].data_ptr()
    received = pickle.loads(header, buffers=buffers)
    assert received["x"].data_ptr() == sent[2:].data_ptr()
    assert received["x"].dtype == dtype
    assert torch.equal(received["x"], sent[2:5])


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_row_of_a_strided_slice_travels(dtype: torch.dtype) -> None:
    dp = DataProto.from_dict({"x": numbered(3, dtype), "y": numbered(6, dtype).reshape(3, 2)})
    for start in range(3):
        part = dp[start::3]
        assert pickle.loads(pickle.dumps(part)).equal(part)


def test_jagged_slices_ship_their_own_values_and_offsets_once() -> None:
    values = torch.arange(10)
    offsets = torch.tensor([0, 2, 5, 9, 10])
    ids = torch.nested.nested_tensor_from_jagged(values, offsets)
    dp = DataProto.from_dict({"ids": ids, "more": ids * 2})[1:3]
    header, buffers = out_of_band(dp)
    assert [buffer.nbytes for buffer in buffers] == [7 * 8, 3 * 8, 7 * 8]
    assert address(buffers[0]) == values[2:].data_ptr()
    assert pickle.loads(header, buffers=buffers)["ids"].values().data_ptr() == address(buffers[0])


def test_values_outside_the_offsets_stay_at_home() -> None:
    offsets = torch.tensor([2, 4, 4, 7])
    ids = torch.nested.nested_tensor_from_jagged(torch.arange(10), offsets)
    dp = DataProto.from_dict({"ids": ids, "more": ids * 2})
    header, buffers = out_of_band(dp)
    assert [buffer.nbytes for buffer in buffers] == [5 * 8, 4 * 8, 5 * 8]
    received = pickle.loads(header, buffers=buffers)
    assert received.equal(dp)
    assert [row.tolist() for row in received["ids"].unbind()] == [[2, 3], [], [4, 5, 6]]
    assert (received["ids"] + received["more"]).values().tolist() == [6, 9, 12, 15, 18]
    assert DataProto.concat([dp, received])["ids"].values().tolist() == [2, 3, 4, 5, 6] * 2


def test_what_is_not_contiguous_ships_only_its_rows() -> None:
    wide = torch.arange(40).reshape(10, 4)
    _, buffers = out_of_band(DataProto.from_dict({"x": wide[:, 1:2]}))
    assert [buffer.nbytes for buffer in buffers] == [10 * 8]
    assert np.frombuffer(buffers[0], np.int64).tolist() == list(range(1, 40, 4))


def test_read_only_buffers_give_no_warning_and_can_be_cloned() -> None:
    script = (
        "import pickle, warnings, torch\n"
        "warnings.simplefilter('error')\n"
        "from rollcast.protocol import DataProto\n"
        "dp = DataProto.from_dict({'x': torch.arange(3)})\n"
        "out = []\n"
        "head = pickle.dumps(dp, 5, buffer_callback=out.append)\n"
        "got = pickle.loads(head, buffers=[bytes(b.raw()) for b in out])\n"
        "got.clone().batch['x'].add_(1)\n"
        "raise SystemExit(0 if got['x'].tolist() == [0, 1, 2] else 1)\n"
    )
    # A process of its own: torch gives this warning only once per process.
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        warnings.warn("of the user", stacklevel=1)
    assert len(others) == 1


def test_objects_ship_once_and_only_those_in_use() -> None:
    class Counted:
        pickled = 0

        def __reduce__(self) -> tuple[Any, ...]:
            Counted.pickled += 1
            return (str, ("counted",))

    dp = DataProto.from_dict(None, {"o": [Counted() for _ in range(6)]})
    out_of_band(dp[2:4].repeat(5))
    assert Counted.pickled == 2
    assert pickle.loads(pickle.dumps(dp[2:4].repeat(2), 5))["o"].tolist() == ["counted"] * 4


def test_gradients_do_not_travel() -> None:
    dp = DataProto.from_dict({"x": torch.ones(2, requires_grad=True) * 2})
    received = pickle.loads(pickle.dumps(dp, 5))
    assert not received["x"].requires_grad
    assert received["x"].tolist() == [2.0, 2.0]


def test_meta_tensors_are_refused_by_name() -> None:
    dp = DataProto.from_dict({"ghost": torch.zeros(2, device="meta")})
    with pytest.raises(DataProtoError, match="'ghost' cannot be sent"):
        pickle.dumps(dp, 5)


def test_another_wire_version_is_refused() -> None:
    rebuild, (cls, header, buffers) = sample().__reduce_ex__(4)
    with pytest.raises(DataProtoError, match="wire version 99"):
        rebuild(cls, header._replace(version=99), buffers)


def test_deep_copies_copy_objects_and_keep_shared_ones_shared() -> None:
    dp = DataProto.from_dict(None, {"o": [[1], [2]]}).repeat(2)
    copied = copy.deepcopy(dp)
    copied["o"][0].append(9)
    assert dp["o"].tolist() == [[1], [1], [2], [2]]
    assert copied["o"].tolist() == [[1, 9], [1, 9], [2], [2]]


def test_importing_the_room_imports_no_torch() -> None:
    script = "import sys, rollcast.protocol; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
    script = "from rollcast.protocol import DataProto, DataProtoFuture"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    sample(5).save(tmp_path / "batch")
    return tmp_path / "batch"


def test_loaded_tensors_are_writable(saved: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = DataProto.load(saved)
    loaded["ids"].add_(1)
    assert loaded["ids"].flatten().tolist() == list(range(1, 16))


def test_a_file_cut_anywhere_is_refused(saved: Path) -> None:
    whole = saved.read_bytes()
    for size in range(len(whole)):
        saved.write_bytes(whole[:size])
        with pytest.raises(DataProtoError, match="cut short") as caught:
            DataProto.load(saved)
        assert str(saved) in str(caught.value)


def test_a_changed_byte_is_refused_or_padding(saved: Path) -> None:
    whole = bytearray(saved.read_bytes())
    original = snapshot(DataProto.load(saved))
    refused = 0
    for position in range(len(whole)):
        whole[position] ^= 0x55
        saved.write_bytes(whole)
        whole[position] ^= 0x55
        try:
            found = DataProto.load(saved)
        except DataProtoError:
            refused += 1
        else:
            assert snapshot(found) == original  # a byte between two buffers
    assert refused > len(whole) // 2


def test_a_header_of_another_writer_is_refused(saved: Path) -> None:
    contents: list[Any] = [{}, [], {"length": 1, "byteorder": sys.byteorder, "columns": [["a"]]}]
    for content in contents:
        header = json.dumps(content).encode()
        prefix = struct.pack("<8sQI", b"ROLLDP\x00\x01", len(header), zlib.crc32(header))
        saved.write_bytes(prefix + header)
        with pytest.raises(DataProtoError, match="its header is not understood"):
            DataProto.load(saved)
    saved.write_bytes(b"something else entirely, of some length")
    with pytest.raises(DataProtoError, match="no saved DataProto"):
        DataProto.load(saved)


@pytest.mark.parametrize(
    ("dp", "text"),
    [
        (DataProto(None, {"o": [1, {2}]}), "object column 'o' holds a set"),
        (DataProto(None, {"o": [(1, 2)]}), "object column 'o' holds a tuple"),
        (DataProto(None, {"o": [{1: 2}]}), "object column 'o' holds a dict with keys"),
        (DataProto(None, {"o": [[object()]]}), "object column 'o' holds a object"),
        (DataProto(meta_info={"m": {"k": (1,)}}), "meta_info key 'm' holds a tuple"),
        (DataProto(meta_info={3: 1}), "meta_info holds a dict with keys"),  # type: ignore[dict-item]
    ],
)
def test_a_refused_save_leaves_the_old_file(saved: Path, dp: DataProto, text: str) -> None:
    whole = saved.read_bytes()
    with pytest.raises(DataProtoError, match=text):
        dp.save(saved)
    assert saved.read_bytes() == whole
    assert [entry.name for entry in saved.parent.iterdir()] == [saved.name]


def test_a_failed_write_leaves_the_old_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    whole = saved.read_bytes()
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        sample(9).save(saved)
    assert saved.read_bytes() == whole
    assert [entry.name for entry in saved.parent.iterdir()] == [saved.name]


def test_numpy_scalars_are_saved_as_python_ones(tmp_path: Path) -> None:
    dp = DataProto(None, {"o": [np.float64(0.5), np.int32(3)]}, {"m": np.bool_(True)})
    dp.save(tmp_path / "x")
    loaded = DataProto.load(tmp_path / "x")
    assert [type(item) for item in loaded["o"]] == [float, int]
    assert loaded["o"].tolist() == [0.5, 3]
    assert loaded.meta_info == {"m": True}
