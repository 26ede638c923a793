"""Loading weights inside TensorRT-LLM's workers, as an extension of its worker class.

The server's ``/update_weights`` calls the extension's ``update_weights`` on every worker with a mapping of strings.
TensorRT-LLM's own extension expects handles of CUDA memory in it, which a trainer on another node or device cannot
provide. This extension expects a step of :mod:`rollcast_serving.engines.steps` under :data:`STEP`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tensorrt_llm._ray_utils import control_action_decorator
from tensorrt_llm._torch.utils import get_device_uuid
from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension

from rollcast.contracts.weights import WeightReport
from rollcast_serving.engines.steps import LoadStep, StepLoader, answer_step
from rollcast_trtllm.arguments import STEP

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["WeightsExtension"]


class WeightsExtension(WorkerExtension):  # type: ignore[misc,unused-ignore]
    """TensorRT-LLM's worker extension, with weights from verified buckets."""

    engine: Any
    device_id: int
    _loader: StepLoader | None = None

    def update_weights(self, ipc_handles: dict[str, str] | None = None) -> None:
        """Carry out the step under :data:`STEP`; called by TensorRT-LLM."""
        answer_step((ipc_handles or {})[STEP], self.device_id, self._carry_out)

    def _carry_out(self, step: LoadStep) -> WeightReport:
        if step.begins is not None:
            # Without handles: this only makes the layers drop data derived from the old weights.
            super().update_weights({get_device_uuid(self.device_id): []})
            self._loader = StepLoader(self._load, "TensorRT-LLM")
        loader = self._loader or StepLoader(self._load, "TensorRT-LLM")
        report = loader.carry_out(step)
        if step.ends:
            self._loader = None
            super().update_weights(None)
        return report

    @control_action_decorator  # type: ignore[untyped-decorator,unused-ignore]
    def _load(self, named: Iterator[tuple[str, Tensor]]) -> None:
        engine = self.engine.model_engine
        engine.model_loader.reload(engine.model, dict(named), allow_partial_loading=True)
