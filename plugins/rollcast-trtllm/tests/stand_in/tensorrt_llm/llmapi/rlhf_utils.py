from __future__ import annotations

from typing import Any

from tensorrt_llm._torch.utils import get_device_uuid


class WorkerExtension:
    """An update begins with handles, here always none, and ends with None."""

    engine: Any
    device_id: int

    def update_weights(self, ipc_handles: dict[str, Any] | None = None) -> None:
        model = self.engine.model_engine.model
        if ipc_handles is None:
            delattr(model, "first_pre_reload_weights")
            return
        model.first_pre_reload_weights = True
        assert ipc_handles[get_device_uuid(self.device_id)] == []
