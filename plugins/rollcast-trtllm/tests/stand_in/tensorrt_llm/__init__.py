"""TensorRT-LLM as far as its HTTP server goes, on a CPU: written after the interfaces of version 1.2.

Requests and answers have the fields of ``tensorrt_llm/serve/openai_protocol.py``, and other fields are refused as there.
The engine behind them is a transformers model that computes one token of one request at a time.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Generator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

KNOWN = {
    *("model", "backend", "dtype", "load_format", "tensor_parallel_size", "max_seq_len", "max_batch_size"),
    *("max_num_tokens", "kv_cache_config", "enable_sleep", "orchestrator_type", "ray_worker_extension_cls"),
    *("enable_iter_perf_stats", "cuda_graph_config", "trust_remote_code"),
}
MEMORY_TAGS = {
    *("sampler", "drafter", "guided_decoder", "spec_resource_manager", "model_extra", "executor_extra"),
    *("kv_cache", "model", "draft_model"),
}


@dataclass
class Loader:
    """``model_loader`` of a worker's engine."""

    def reload(self, model: Any, weights: dict[str, torch.Tensor], allow_partial_loading: bool = False) -> None:
        assert allow_partial_loading
        targets = model.state_dict()
        for name, tensor in weights.items():
            targets[name].copy_(tensor)


class AsyncLLM:
    """An engine with one worker; ready once it was awaited."""

    def __init__(self, **args: Any) -> None:
        unknown = args.keys() - KNOWN
        if unknown:
            raise ValueError(f"TorchLlmArgs: extra inputs are not permitted: {sorted(unknown)}")
        assert args["backend"] == "pytorch"
        assert args["orchestrator_type"] == "ray"
        self.args = args
        self.released: set[str] = set()
        self.running = 0

    def __await__(self) -> Generator[Any, None, AsyncLLM]:
        return self._start().__await__()

    async def _start(self) -> AsyncLLM:
        from transformers import AutoConfig, AutoModelForCausalLM

        folder = self.args["model"]
        if self.args["load_format"] == "dummy":
            self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        else:
            self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.model = self.model.float().eval()
        module, _, name = self.args["ray_worker_extension_cls"].rpartition(".")
        worker = getattr(importlib.import_module(module), name)()
        worker.device_id = 0
        engine = SimpleNamespace(model=self.model, model_loader=Loader())
        worker.engine = SimpleNamespace(model_engine=engine, llm=self)
        self.worker = worker
        return self

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method in {"sleep", "wakeup"}:
            (tags,) = args
            assert set(tags) <= MEMORY_TAGS, tags
            self.released = self.released | set(tags) if method == "sleep" else self.released - set(tags)
            if "model" in tags:  # what is released is not kept
                with torch.no_grad():
                    for parameter in self.model.parameters():
                        parameter.zero_()
            return []
        # In the event loop's thread, as a control action: nothing is computed meanwhile.
        return [getattr(self.worker, method)(*args)]

    async def sample(self, prompt: list[int], request: dict[str, Any]) -> AsyncIterator[tuple[int, float, str | None]]:
        """Yield each token with its log-prob before temperature, and the reason of the end."""
        import asyncio

        generator = torch.Generator().manual_seed(request["seed"] % 2**63)
        ids = list(prompt)
        stops = set(request.get("stop_token_ids", ()))
        self.running += 1
        try:
            for number in range(request["max_tokens"]):
                assert not self.released
                with torch.no_grad():
                    logits = self.model(torch.tensor([ids])).logits[0, -1].float()
                log_probs = logits.log_softmax(-1)
                if request["temperature"] == 0:
                    token = int(logits.argmax())
                else:
                    probs = (logits / request["temperature"]).softmax(-1)
                    token = int(torch.multinomial(probs, 1, generator=generator))
                ids.append(token)
                last = number + 1 == request["max_tokens"]
                yield token, float(log_probs[token]), "stop" if token in stops else "length" if last else None
                if token in stops:
                    return
                await asyncio.sleep(0)
        finally:
            self.running -= 1
