"""``non_tensor_batch``: the object columns of a DataProto as a mapping of numpy arrays."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any, Protocol

import numpy as np
import torch

from rollcast.errors import DataProtoError
from rollcast.protocol.columns import as_object_column, common_length, missing
from rollcast.protocol.objects import ObjectColumn


class ColumnOwner(Protocol):
    """What the view needs of a DataProto."""

    def __len__(self) -> int: ...

    def __contains__(self, key: object) -> bool: ...

    def keys(self) -> list[str]: ...

    def _column(self, name: str) -> torch.Tensor | None: ...

    def _set_column(self, name: str, column: torch.Tensor) -> None: ...

    def _delete_column(self, name: str) -> None: ...


class ObjectColumnsView(MutableMapping[str, Any]):
    """A live view of the object columns of a DataProto.

    Reading a key gives a read-only object array ``[B]``. To change a column, assign a whole list
    or array to its key: writing into the array would reach other DataProtos, so it raises.
    """

    def __init__(self, owner: ColumnOwner) -> None:
        self._owner = owner

    def _find(self, key: object) -> ObjectColumn:
        column = self._owner._column(key) if isinstance(key, str) else None
        if not isinstance(column, ObjectColumn):
            raise missing(key, self, "object column")
        return column

    def __getitem__(self, key: str) -> np.ndarray:
        return self._find(key).objects()

    def __setitem__(self, key: str, value: Any) -> None:
        column = as_object_column(key, value)
        common_length({key: column}, len(self._owner))
        if key in self._owner and key not in self:
            raise DataProtoError(f"column {key!r} is a tensor; drop it before objects take its name")
        self._owner._set_column(key, column)

    def __delitem__(self, key: str) -> None:
        self._find(key)
        self._owner._delete_column(key)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and isinstance(self._owner._column(key), ObjectColumn)

    def __iter__(self) -> Iterator[str]:
        return iter([key for key in self._owner.keys() if key in self])  # noqa: SIM118

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"ObjectColumnsView({list(self)})"
