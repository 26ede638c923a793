"""The batch exchanged between controller and workers, calls in flight, and helpers for moving tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollcast._lazy import lazy_exports

if TYPE_CHECKING:
    from rollcast.protocol._balance import karmarkar_karp as karmarkar_karp
    from rollcast.protocol._checksum import combine_checksums as combine_checksums
    from rollcast.protocol._checksum import copy_with_checksum as copy_with_checksum
    from rollcast.protocol._checksum import tensor_checksum as tensor_checksum
    from rollcast.protocol._jagged import Jagged as Jagged
    from rollcast.protocol._memory import empty_tensor as empty_tensor
    from rollcast.protocol._meta import MetaRules as MetaRules
    from rollcast.protocol._meta import meta_rules as meta_rules
    from rollcast.protocol._remote import Cut as Cut
    from rollcast.protocol.batch import DataProto as DataProto
    from rollcast.protocol.batch import store_batch as store_batch
    from rollcast.protocol.future import DataProtoFuture as DataProtoFuture

# Names are loaded lazily, because importing torch and tensordict takes a second.
__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "rollcast.protocol._balance": ["karmarkar_karp"],
        "rollcast.protocol._checksum": ["combine_checksums", "copy_with_checksum", "tensor_checksum"],
        "rollcast.protocol._jagged": ["Jagged"],
        "rollcast.protocol._memory": ["empty_tensor"],
        "rollcast.protocol._meta": ["MetaRules", "meta_rules"],
        "rollcast.protocol.batch": ["DataProto", "store_batch"],
        "rollcast.protocol._remote": ["Cut"],
        "rollcast.protocol.future": ["DataProtoFuture"],
    },
)
