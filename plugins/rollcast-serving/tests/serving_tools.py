"""Parts that the tests of replicas and weight syncs share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollcast.contracts.rollout import RolloutRequest, SamplingParams
from rollcast.contracts.weights import WeightReport
from rollcast_serving.receiving import WeightTally
from rollcast_serving.server import IncomingWeights
from rollcast_testing.tiny import tiny_model_folder


class KeepingTarget:
    """A replica that keeps copies of what comes.

    Args:
        drop: names that get lost inside it.
    """

    node = "127.0.0.1"

    def __init__(self, drop: Sequence[str] = ()) -> None:
        self.drop = drop
        self.held: dict[str, Tensor] = {}
        self.largest = 0

    def receive_weights(self, sync: str, source: Mapping[str, Any], version: int) -> WeightReport:
        tally = WeightTally(IncomingWeights(sync, source))
        for bucket in tally:
            self.largest = max(self.largest, sum(tensor.numel() * tensor.element_size() for _, tensor in bucket))
            for name, tensor in bucket:
                self.held[name] = tensor.clone()
        return tally.report(version)


def many_tensors(seed: int = 0) -> list[tuple[str, Tensor]]:
    """Tensors of many dtypes and shapes, an empty one and a scalar among them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(64, 32), (7,), (), (0, 3), (1000, 33), (5, 5, 5), (3,)]
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.float32, torch.int64, torch.uint8]
    return [
        (f"layer.{number}.weight", (torch.rand(shape, generator=generator) * 100).to(dtype))
        for number, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]


PAD, EOS = 0, 2


def write_model(folder: Path, seed: int) -> Path:
    """A tiny model with large random weights: a freshly initialised one only repeats its last token."""
    tiny_model_folder(folder, seed=seed)
    model = load_model(folder)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    model.save_pretrained(folder)
    return folder


def load_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    return model.float().eval()


def make_requests(count: int, **sampling: Any) -> list[RolloutRequest]:
    """Prompts of 1 to 12 tokens; greedy, 8 tokens, if nothing else is said."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **sampling})
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 13, (count,), generator=generator).tolist()
    prompts = [torch.randint(4, 80, (length,), generator=generator).tolist() for length in lengths]
    return [RolloutRequest(f"r{index}", prompt, params) for index, prompt in enumerate(prompts)]


def greedy(model: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What transformers generates."""
    with torch.no_grad():
        ids = torch.tensor([list(prompt)])
        full = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, pad_token_id=PAD
        )
    new: list[int] = full[0, len(prompt) :].tolist()
    return new
