"""Loading weights inside SGLang's schedulers, as a custom weight loader of SGLang.

SGLang passes the model and named tensors to a loader, ignores its result, and ends the scheduler on an error. So a
single tensor is sent whose name is a step of :mod:`rollcast_serving.engines.steps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rollcast_serving.engines.steps import StepLoader, answer_step

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["load"]

#: Loaders of this process's models, kept because an update may have several steps.
_loaders: dict[int, StepLoader] = {}


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Carry out the step in the first tensor's name; called by SGLang."""
    from sglang.srt.distributed.parallel_state import get_tp_group
    from sglang.srt.runtime_context import get_parallel

    loader = _loaders.setdefault(id(model), StepLoader(model.load_weights, "SGLang"))
    # Ranks on other nodes cannot write to the rollout's folder.
    answer_step(named_tensors[0][0], get_parallel().tp_rank, loader.carry_out, get_tp_group().all_gather_object)
