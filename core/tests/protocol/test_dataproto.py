"""Construction, reading, and what the errors say."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from protocol_batches import jagged, sample
from tensordict import TensorDict

from rollcast.errors import ColumnError, DataProtoError
from rollcast.protocol import Cut, DataProto, DataProtoFuture, store_batch


def test_single_dict_sorts_values_by_kind() -> None:
    dp = DataProto.from_single_dict(
        {
            "t": torch.zeros(2, 3, dtype=torch.bfloat16),
            "n": np.array([1.5, 2.5]),
            "b": np.array([True, False]),
            "j": jagged([1, 2]),
            "o": np.array([{"a": 1}, None], dtype=object),
            "s": np.array(["x", "y"]),
            "l": [[1, 2], [3, 4]],
            "arrays": np.array([[1, 2], [3, 4]], dtype=object),
        }
    )
    assert dp.dtypes() == {
        "t": torch.bfloat16,
        "n": torch.float64,
        "b": torch.bool,
        "j": torch.int64,
        "o": object,
        "s": object,
        "l": object,
        "arrays": object,
    }
    assert dp["s"].tolist() == ["x", "y"]
    assert type(dp["s"][0]) is str
    assert dp["l"].shape == (2,)
    assert dp["l"][1] == [3, 4]
    assert dp["arrays"].shape == (2,)


def test_verl_style_construction() -> None:
    td = TensorDict({"x": torch.zeros(3, 2)}, batch_size=[3, 2])
    dp = DataProto(batch=td, non_tensor_batch={"uid": np.array(list("abc"), dtype=object)})
    assert dp.batch.batch_size == (3,)
    assert td.batch_size == (3, 2)
    assert list(dp.non_tensor_batch) == ["uid"]


def test_tensordict_with_non_tensors_of_its_own() -> None:
    td = TensorDict({"x": torch.zeros(2)}, batch_size=[2])
    td["stack"] = ["a", "b"]
    td.set_non_tensor("same", "c")
    dp = DataProto.from_tensordict(td)
    assert dp["stack"].tolist() == ["a", "b"]
    assert dp["same"].tolist() == ["c", "c"]


def test_nested_tensors_become_jagged_without_gaps() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
        strided = torch.nested.nested_tensor([torch.tensor([1.0]), torch.tensor([2.0, 3.0])])
    gaps = torch.nested.nested_tensor_from_jagged(
        torch.arange(8), torch.tensor([0, 3, 8]), lengths=torch.tensor([2, 1])
    )
    dp = DataProto.from_dict({"s": strided, "g": gaps})
    assert dp["s"].layout == torch.jagged
    assert [row.tolist() for row in dp["s"].unbind()] == [[1.0], [2.0, 3.0]]
    assert [row.tolist() for row in dp["g"].unbind()] == [[0, 1], [3]]
    assert dp["g"].values().tolist() == [0, 1, 3]


@pytest.mark.parametrize(
    "operation",
    [
        lambda dp: dp[1:3],
        lambda dp: dp[[2, 0]],
        lambda dp: dp.repeat(2),
        lambda dp: dp.clone(),
        lambda dp: DataProto.concat([dp, dp]),
        lambda dp: pickle.loads(pickle.dumps(dp[1:], 5)),
    ],
)
def test_jagged_columns_that_share_offsets_still_compute_together(
    operation: Callable[[DataProto], DataProto],
) -> None:
    ids = jagged([1, 0, 2, 3])
    found = operation(DataProto.from_dict({"ids": ids, "logp": ids.float() * 2}))
    together = found["ids"] + found["logp"]
    assert together.values().tolist() == (found["ids"].values() * 3.0).tolist()


def test_the_batch_is_live() -> None:
    dp = sample(4)
    dp.batch["new"] = torch.ones(4)
    dp.batch["listed"] = ["a", "b", "c", "d"]
    assert dp["new"].sum() == 4
    assert dp[1:3]["listed"].tolist() == ["b", "c"]
    del dp.batch["new"]
    assert "new" not in dp
    dp.check_consistency()


def test_non_tensor_batch_is_a_live_mapping() -> None:
    dp = sample(2)
    view = dp.non_tensor_batch
    view["who"] = ["x", "y"]
    assert dp.keys() == ["ids", "ragged", "uid", "who"]
    assert dict(view).keys() == {"uid", "who"}
    assert "ids" not in view
    assert view.pop("nothing", 7) == 7
    assert view.pop("who").tolist() == ["x", "y"]
    assert "who" not in dp
    with pytest.raises(ValueError, match="read-only"):
        view["uid"][0] = "z"
    with pytest.raises(ValueError, match="read-only"):
        cast(Any, dp.batch["uid"]).table[0] = "z"
    with pytest.raises(DataProtoError, match="'ids' is a tensor"):
        view["ids"] = [1, 2]
    with pytest.raises(DataProtoError, match="'who' has 3 rows but the DataProto has 2"):
        view["who"] = [1, 2, 3]
    with pytest.raises(KeyError, match="no object column 'ids'"):
        del view["ids"]


def test_object_columns_move_with_the_tensordict_itself() -> None:
    batch: Any = sample(4).batch.exclude("ragged")
    assert batch[1:3]["uid"].tolist() == ["u1", "u2"]
    assert batch[torch.tensor([True, False, False, True])]["uid"].tolist() == ["u0", "u3"]
    more: Any = torch.cat([batch[3:], sample(2).batch.exclude("ragged")])
    assert more["uid"].tolist() == [
        "u3",
        "u0",
        "u1",
    ]
    assert [part["uid"].tolist() for part in batch.split(3)] == [["u0", "u1", "u2"], ["u3"]]
    assert batch.clone()["uid"].tolist() == batch["uid"].tolist()
    assert batch[2]["uid"].item() == "u2"
    assert list(batch["uid"]) == ["u0", "u1", "u2", "u3"]
    assert (batch["uid"] == "u1").tolist() == [False, True, False, False]
    assert (batch["uid"] != batch["uid"].flip(0)).all()
    assert pickle.loads(pickle.dumps(batch["uid"][1:2])).tolist() == ["u1"]


@pytest.mark.parametrize(
    "misuse",
    [
        lambda column: column + 1,
        lambda column: column.fill_(0),
        lambda column: column.__setitem__(0, 1),
        lambda column: column.sum(),
        lambda column: torch.cat([column, torch.zeros(4, dtype=torch.int64)]),
    ],
)
def test_object_columns_refuse_arithmetic(misuse: Callable[[Any], object]) -> None:
    column = sample(4).batch["uid"]
    with pytest.raises(TypeError, match=r"(?i)object ?column"):
        misuse(column)
    assert column.tolist() == ["u0", "u1", "u2", "u3"]


def test_no_columns_and_no_rows() -> None:
    assert len(DataProto()) == 0
    assert DataProto().keys() == []
    rows_only = DataProto(length=5)
    assert len(rows_only) == 5
    assert [len(part) for part in rows_only.split(2)] == [2, 2, 1]
    assert len(DataProto.concat([rows_only, rows_only[:0]])) == 5
    assert len(sample(3).select([])) == 3
    assert len(DataProto().with_columns(x=torch.zeros(2))) == 2
    assert [len(part) for part in sample(0).chunk(3)] == [0, 0, 0]
    assert sample(0).pad_to_divisor(4)[1] == 0
    assert list(sample(0).make_iterator(2, epochs=3)) == []


def test_zero_row_members_join() -> None:
    dp = sample(3)
    assert DataProto.concat([dp[:0], dp, dp[:0]]).equal(dp)


def kept(batch: DataProto) -> DataProto:
    """The batch with remote columns."""

    def fetch(cuts: Sequence[Cut], timeout: float | None) -> list[Any]:
        return [cut.of(cut.ref) for cut in cuts]

    return store_batch(batch, lambda stored: stored).bound(fetch)


BOTH = pytest.mark.parametrize("kind", [lambda dp: dp, kept], ids=["local", "remote"])
Kind = Callable[[DataProto], Any]


@BOTH
def test_names_are_columns_and_lengths_are_rows(kind: Kind) -> None:
    dp = kind(sample(3))
    assert len(dp) == 3
    assert ("uid" in dp, 0 in dp) == (True, False)
    as_dict, as_arguments = dict(dp), dict(**dp)
    assert list(as_dict) == list(as_arguments) == dp.keys() == ["ids", "ragged", "uid"]
    assert as_dict["uid"].tolist() == ["u0", "u1", "u2"]
    assert [row["uid"].tolist() for row in dp.split(1)] == [["u0"], ["u1"], ["u2"]]


@BOTH
@pytest.mark.parametrize("loop", [list, iter, lambda dp: [*dp], lambda dp: list(zip(dp, dp, strict=True))])
def test_iterating_is_refused_and_names_both_ways(kind: Kind, loop: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match=r"not iterable.*keys\(\) for the columns.*split\(1\) for the rows"):
        loop(kind(sample(3)))


@BOTH
@pytest.mark.parametrize(
    ("misuse", "instead"),
    [
        (lambda dp: dp.union(sample(3)), "batch = batch.joined(other)"),
        (lambda dp: dp.reorder(torch.tensor([2, 1, 0])), "batch = batch.reordered(indices)"),
        (lambda dp: dp.pop(batch_keys=["ids"], non_tensor_batch_keys=["uid"]), "batch.select(keys), batch.drop(keys)"),
        (lambda dp: dp.pop(["ids"]), "batch.select(keys), batch.drop(keys)"),
    ],
)
def test_operations_in_place_raise_and_name_the_replacement(kind: Kind, misuse: Kind, instead: str) -> None:
    with pytest.raises(DataProtoError, match=re.escape(instead)):
        misuse(kind(sample(3)))


class Labelled(DataProto):
    """A batch of a user's own class."""

    __slots__ = ()


def test_operations_keep_the_subclass() -> None:
    dp = Labelled(sample(4).batch)
    made = [dp[:2], dp.joined(sample(4).rename({"ids": "a", "ragged": "b", "uid": "c"})), *dp.chunk(2), dp.clone()]
    made += [Labelled.concat(dp.chunk(2)), DataProto.concat([dp, dp]), pickle.loads(pickle.dumps(dp))]
    assert [type(each) for each in made] == [Labelled] * len(made)


def test_repr_names_every_column() -> None:
    text = repr(sample(2))
    for part in ("rows=2", "ids: int64[rows, 3]", "ragged: float32[rows, ragged]", "uid", "'u0'"):
        assert part in text
    assert "steps" in text
    assert "DataProto(rows=0" in repr(sample(0))


def test_nbytes_counts_rows_not_storage() -> None:
    dp = DataProto.from_dict({"x": torch.zeros(8, 2), "j": jagged([1] * 8)})
    assert dp.nbytes == 8 * 2 * 4 + 8 * 8 + 9 * 8
    assert dp[2:4].nbytes == 2 * 2 * 4 + 2 * 8 + 3 * 8


@pytest.mark.parametrize(
    "change",
    [
        lambda dp: dp.with_columns(ids=dp["ids"] + 1),
        lambda dp: dp.with_columns(ids=dp["ids"].int()),
        lambda dp: dp.with_columns(ids=dp["ids"][:, :2]),
        lambda dp: dp.with_columns(ragged=jagged([1, 1, 1, 0], torch.float32)),
        lambda dp: dp.with_columns(ragged=dp["ragged"] + 1),
        lambda dp: dp.with_columns(uid=["u0", "u1", "u2", "other"]),
        lambda dp: dp.with_columns(uid=torch.arange(4)),
        lambda dp: dp.drop("uid"),
        lambda dp: dp.with_columns(more=[1, 2, 3, 4]),
        lambda dp: dp[:3],
        lambda dp: DataProto(dp.batch, meta_info={"steps": [1, 2], "temperature": 0.5}),
    ],
)
def test_equal_sees_every_difference(change: Callable[[DataProto], DataProto]) -> None:
    dp = sample(4)
    assert not dp.equal(change(dp))
    assert not change(dp).equal(dp)


def test_equal_takes_nan_for_nan_and_any_key_order() -> None:
    nan = float("nan")
    data = {"x": torch.tensor([nan, 1.0]), "o": [{"a": np.array([nan])}, torch.tensor(nan)]}
    copied = pickle.loads(pickle.dumps(DataProto(data), 4))
    assert copied.select(["o", "x"]).equal(DataProto(data))


def test_nan_is_equal_to_nothing_but_nan() -> None:
    left, right = (DataProto({"x": torch.tensor([float("nan"), x])}) for x in (1.0, float("nan")))
    assert not left.equal(right)
    assert not right.equal(left)


def test_joined_keeps_equal_columns_and_can_overwrite() -> None:
    dp = sample(4)
    assert dp.joined(dp.clone()).equal(dp)
    other = dp.with_columns(ids=torch.zeros(4))
    other.meta_info["temperature"] = 0.5
    found = dp.joined(other, overwrite=True)
    assert found["ids"].tolist() == [0.0] * 4
    assert found.meta_info["temperature"] == 0.5


# What a caller without a type checker could pass.
ANY_LIST: Any = ["ids"]


def _meta_clash() -> None:
    DataProto.concat([DataProto(meta_info={"lr": 1}), DataProto(meta_info={"lr": 2})])


ERRORS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "length": (
        lambda: DataProto.from_dict({"a": torch.zeros(4)}, {"b": [1, 2, 3]}),
        DataProtoError,
        r"'b' has 3 rows but column 'a' has 4",
    ),
    "scalar": (
        lambda: DataProto({"a": torch.tensor(1)}),
        DataProtoError,
        "'a' is a tensor without",
    ),
    "sparse": (
        lambda: DataProto({"a": torch.eye(2).to_sparse()}),
        DataProtoError,
        "'a' has layout",
    ),
    "ragged dim": (
        lambda: DataProto({"a": jagged([1, 2], inner=2).transpose(1, 2)}),
        DataProtoError,
        "'a' is a nested tensor, but its dimension 2",
    ),
    "nested dict": (
        lambda: DataProto({"a": TensorDict({}, [2])}),
        DataProtoError,
        "'a' is a TensorDict; columns do not nest",
    ),
    "string": (lambda: DataProto({"a": "text"}), DataProtoError, "'a' is a str"),
    "list as tensor": (
        lambda: DataProto.from_dict({"a": ANY_LIST}),
        DataProtoError,
        "'a' is a list",
    ),
    "tensor as object": (
        lambda: DataProto.from_dict(None, {"a": torch.zeros(1)}),
        DataProtoError,
        "'a' is a tensor; give it among",
    ),
    "twice": (
        lambda: DataProto.from_dict({"a": torch.zeros(1)}, {"a": [1]}),
        DataProtoError,
        "'a' is given as a tensor and as objects",
    ),
    "name": (lambda: DataProto({"": [1]}), DataProtoError, "non-empty string"),
    "get": (lambda: sample()["nope"], ColumnError, r"no column 'nope'; there are \['ids'"),
    "select": (lambda: sample().select(["nope"]), KeyError, "no column 'nope'"),
    "select meta": (
        lambda: sample().select(meta_info_keys=["m"]),
        ColumnError,
        "meta_info key 'm'",
    ),
    "drop": (lambda: sample().drop(["nope"]), ColumnError, "no column 'nope'"),
    "rename": (lambda: sample().rename({"nope": "x"}), ColumnError, "no column 'nope'"),
    "rename clash": (lambda: sample().rename({"ids": "uid"}), DataProtoError, "called 'uid'"),
    "joined value": (
        lambda: sample().joined(sample().with_columns(ids=torch.zeros(4))),
        DataProtoError,
        "'ids' is in both with different values",
    ),
    "joined length": (lambda: sample(4).joined(sample(3)), DataProtoError, "4 rows here but 3"),
    "with length": (
        lambda: sample(4).with_columns(z=[1]),
        DataProtoError,
        "'z' has 1 rows but the DataProto has 4",
    ),
    "concat none": (lambda: DataProto.concat([]), DataProtoError, "empty"),
    "concat keys": (
        lambda: DataProto.concat([sample(), sample().drop("uid")]),
        DataProtoError,
        r"\['uid'\] are not in both member 0 and member 1",
    ),
    "concat dtype": (
        lambda: DataProto.concat([sample(), sample().with_columns(ids=torch.zeros(4, 3))]),
        DataProtoError,
        "'ids' has dtype torch.float32 in member 1 but torch.int64 in member 0",
    ),
    "concat shape": (
        lambda: DataProto.concat([sample(), sample().with_columns(ids=sample()["ids"][:, :2])]),
        DataProtoError,
        r"'ids' has row shape \(2,\) in member 1",
    ),
    "concat kind": (
        lambda: DataProto.concat([sample(), sample().with_columns(uid=torch.zeros(4))]),
        DataProtoError,
        "'uid' has kind dense in member 1 but object",
    ),
    "concat meta": (_meta_clash, DataProtoError, "'lr' is 1 in one DataProto and 2"),
    "chunk": (
        lambda: DataProto(length=10).chunk(4),
        DataProtoError,
        "10 rows cannot be cut in 4 chunks; the nearest that fit are 2 and 5 chunks, or 8 and 12 r",
    ),
    "chunk zero": (lambda: sample().chunk(0), DataProtoError, "at least 1, not 0"),
    "joined handle": (
        lambda: sample().joined(DataProtoFuture(lambda _: sample())),  # type: ignore[arg-type]
        DataProtoError,
        "joined: a DataProtoFuture is not a DataProto; of a call in flight, select",
    ),
    "concat others": (lambda: DataProto.concat([sample(), 3]), DataProtoError, "concat: a member is a int"),  # type: ignore[list-item]
    "reorder": (lambda: sample(2).reordered([0, 0]), DataProtoError, "no permutation of 2 rows"),
    "unpad": (lambda: sample(2).unpad(3), DataProtoError, "3 rows cannot be taken off 2"),
    "pad mode": (lambda: sample().pad_to_divisor(3, "x"), DataProtoError, "not 'x'"),  # type: ignore[arg-type]
    "mask": (lambda: sample(4)[[True]], DataProtoError, "1 values but the DataProto has 4 rows"),
    "float rows": (lambda: sample()[torch.zeros(2)], DataProtoError, "not by torch.float32"),
    "names as rows": (lambda: sample()[ANY_LIST], DataProtoError, r"use select\(\)"),
    "2-d rows": (lambda: sample()[torch.zeros(1, 1).int()], DataProtoError, "one dimension"),
    "row": (lambda: sample(4)[4], IndexError, "row 4 is out of range for 4 rows"),
    "selector": (lambda: sample()[1.5], DataProtoError, "not by float"),  # type: ignore[index]
    "generator": (
        lambda: sample().make_iterator(2, 1, torch.Generator()),
        DataProtoError,
        "without shuffle=True",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_is_wrong_and_pickle(name: str) -> None:
    call, kind, text = ERRORS[name]
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, DataProtoError)
    assert re.search(text, str(caught.value))
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (type(copied), str(copied)) == (type(caught.value), str(caught.value))


def test_shuffling_follows_the_generator() -> None:
    def order(seed: int) -> list[str]:
        generator = torch.Generator().manual_seed(seed)
        batches = sample(32).make_iterator(8, 2, generator=generator, shuffle=True)
        return [uid for batch in batches for uid in batch["uid"]]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1)[:32] != order(1)[32:]


class Episodes(DataProto):
    """A subclass as another framework may have it."""


def test_joining_keeps_the_class() -> None:
    mine, plain = Episodes.from_dict({"x": torch.arange(4)}), DataProto.from_dict({"x": torch.arange(4)})
    assert type(DataProto.concat(mine.chunk(2))) is Episodes
    assert type(DataProto.concat([mine, plain])) is Episodes
    assert type(DataProto.concat([plain, mine])) is DataProto
    assert type(Episodes.concat([plain, plain])) is Episodes
    assert type(DataProtoFuture.concat(kept(mine).chunk(2)).local()) is Episodes
    assert type(kept(mine).with_columns(y=torch.zeros(4)).local()) is Episodes
    assert type(DataProtoFuture(lambda _: kept(plain)).get()) is DataProto
