"""``non_tensor_batch``: the object columns of a DataProto as a mapping of numpy arrays."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import numpy as np
from tensordict import TensorDict, is_non_tensor

from rollcast.errors import DataProtoError
from rollcast.protocol.columns import as_object_column, common_length, missing
from rollcast.protocol.objects import ObjectColumn


class ObjectColumnsView(MutableMapping[str, Any]):
    """A live view of the object columns in a TensorDict.

    Reading a key gives a read-only object array ``[B]``. To change a column, assign a whole list
    or array to its key: writing into the array would reach other DataProtos, so it raises.
    """

    def __init__(self, batch: TensorDict) -> None:
        self._batch = batch

    def _holds(self, key: object) -> bool:
        value = self._batch.get(key, None) if isinstance(key, str) else None
        return isinstance(value, ObjectColumn) or is_non_tensor(value)

    def __getitem__(self, key: str) -> np.ndarray:
        if not self._holds(key):
            raise missing(key, self, "object column")
        return as_object_column(key, self._batch.get(key)).objects()

    def __setitem__(self, key: str, value: Any) -> None:
        column = as_object_column(key, value)
        common_length({key: column}, self._batch.batch_size[0])
        if key in self._batch and not self._holds(key):
            raise DataProtoError(f"column {key!r} is a tensor; drop it before objects take its name")
        self._batch.set(key, column)

    def __delitem__(self, key: str) -> None:
        if not self._holds(key):
            raise missing(key, self, "object column")
        self._batch.del_(key)

    def __contains__(self, key: object) -> bool:
        return self._holds(key)

    def __iter__(self) -> Iterator[str]:
        return iter([str(key) for key in self._batch.keys() if self._holds(key)])  # noqa: SIM118

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"ObjectColumnsView({list(self)})"
