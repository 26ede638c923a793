"""Loading weights inside SGLang's schedulers, as a custom weight loader of SGLang's.

SGLang hands a loader the model and named tensors, and takes nothing back, and an error of a loader ends the
scheduler. So the name of the one tensor is a step of :mod:`rollcast_serving.engines.steps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rollcast_serving.engines.steps import StepLoader, answer_step

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["load"]

#: The loader of this process's model, whose update may be in several steps.
_loaders: dict[int, StepLoader] = {}


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Carry out the step in the first tensor's name; SGLang calls it."""
    from sglang.srt.runtime_context import get_parallel

    loader = _loaders.setdefault(id(model), StepLoader(model.load_weights, "SGLang"))
    answer_step(named_tensors[0][0], get_parallel().tp_rank, loader.carry_out)
