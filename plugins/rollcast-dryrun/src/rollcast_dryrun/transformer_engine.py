"""Transformer Engine without a device: its own Python, with stand-ins for its compiled part."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from typing import Any
from unittest import mock

from rollcast.errors import CapabilityError

__all__ = ["forget_devices", "load_transformer_engine"]

_COMPILED, _STAND_INS = "transformer_engine_torch", "rollcast_dryrun.te_kernels"
#: Libraries that it imports to export models, which no dry run does.
_EXPORT = ("onnx", "onnxscript")
#: The library loads its compiled parts unless it is being built, and compiles small functions with Triton.
_ENVIRONMENT = {"NVTE_PROJECT_BUILDING": "1", "NVTE_TORCH_COMPILE": "0"}
#: Tensors of a device that the library keeps for the life of a process: module, dict or cached function.
_KEPT = (
    *(("cpp_extensions.gemm", "get_cublas_workspace"), ("utils", "_empty_tensor"), ("module.base", "_dummy_wgrads")),
    ("attention.dot_product_attention.utils", "_cu_seqlens_cache"),
    *(
        ("attention.dot_product_attention.context_parallel", name)
        for name in (
            "_cu_seqlens_info_with_cp_cache",
            "_seq_chunk_ids_cache_for_reordering_before_attn",
            "_seq_chunk_ids_cache_for_reordering_after_attn",
        )
    ),
)


def load_transformer_engine() -> None:
    """Import Transformer Engine if its Python part is installed; call it once, in a process with the mock.

    Without it, layers are megatron-core's own.

    Raises:
        CapabilityError: it is installed without something that it needs.
    """
    spec = find_spec("transformer_engine")
    if spec is None or spec.loader is None:
        return
    sys.modules[_COMPILED] = import_module(_STAND_INS)
    package = module_from_spec(spec)
    sys.modules[spec.name] = package
    with _without_export(), mock.patch.dict(os.environ, _ENVIRONMENT):
        common = import_module("transformer_engine.common")
        with mock.patch.object(common, "load_framework_extension", lambda _: None):
            _import_for_torch()
            spec.loader.exec_module(package)
    attention: Any = import_module("transformer_engine.pytorch.attention.dot_product_attention.utils")
    attention.AttentionParams = _plain_tensors(attention.AttentionParams)


def _import_for_torch() -> None:
    """Import what the package itself would leave out in silence if it failed."""
    try:
        import_module("transformer_engine.pytorch")
    except ImportError as error:
        raise CapabilityError(
            f"Transformer Engine is there without something that it imports: {error}; install that into the same "
            "folder with pip install --no-deps --target"
        ) from error


def forget_devices() -> None:
    """Forget the tensors of a mock device that the library keeps for the life of a process."""
    stand_ins = sys.modules.get(_STAND_INS)
    if stand_ins is None or sys.modules.get(_COMPILED) is not stand_ins:
        return
    for module, name in _KEPT:
        tensors = getattr(import_module(f"transformer_engine.pytorch.{module}"), name)
        if isinstance(tensors, dict):
            tensors.clear()
        else:
            tensors.cache_clear()


@contextmanager
def _without_export() -> Iterator[None]:
    """Let modules that are not installed, and that only an export calls, be imported in the block."""
    missing = [name for name in _EXPORT if find_spec(name) is None]
    sys.modules.update({name: mock.MagicMock(__spec__=ModuleSpec(name, None)) for name in missing})
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


def _plain_tensors(params: Any) -> Any:
    """Return a constructor that takes fake tensors for plain ones, to which cuDNN's attention is restricted."""
    from torch import Tensor
    from torch._subclasses.fake_tensor import FakeTensor

    @functools.wraps(params)
    def build(*, qkv_type: type, **options: Any) -> Any:
        return params(qkv_type=Tensor if qkv_type is FakeTensor else qkv_type, **options)

    return build
