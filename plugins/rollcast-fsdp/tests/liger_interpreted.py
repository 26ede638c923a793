"""Compare a model with Liger's kernels, which Triton interprets on the CPU, with the plain model; started by a test.

Prints for each model the largest differences of the logits and of the gradients, the latter relative to each tensor's
largest, and the kernels that were launched.
"""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

import liger_kernel.ops.rms_norm
import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from transformers import AutoConfig, AutoModelForCausalLM

from rollcast_fsdp.kernels import apply_liger

launched: set[str] = set()


def interpret_all() -> None:
    """Mend two gaps of the interpreter: numbers that a kernel casts, and the device's own library of functions."""
    convert = interpreter._implicit_cvt

    def convert_numbers(argument: Any) -> Any:
        if isinstance(argument, float):
            return tl.tensor(interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)
        return convert(argument)

    def run_noted(executor: Any, *args: Any, **options: Any) -> None:
        launched.add(executor.fn.__name__)
        run(executor, *args, **options)

    run = interpreter.GridExecutor.__call__
    interpreter.GridExecutor.__call__ = run_noted
    interpreter._implicit_cvt = convert_numbers
    liger_kernel.ops.rms_norm.rsqrt = lambda number: tl.rsqrt(number)  # looked up when it is called


def compare(model_type: str) -> dict[str, Any]:
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes, **heads)).float()
    liger = copy.deepcopy(plain)
    apply_liger(liger, torch.device("cuda"))
    launched.clear()
    tokens = torch.randint(0, 128, (2, 12))
    expected, logits = plain(tokens).logits, liger(tokens).logits
    direction = torch.randn_like(expected)
    expected.backward(direction)
    logits.backward(direction)
    gaps = [
        float((theirs.grad - ours.grad).abs().max() / theirs.grad.abs().max())
        for theirs, ours in zip(plain.parameters(), liger.parameters(), strict=True)
    ]
    return {
        "logits": float((expected - logits).detach().abs().max()),
        "gradients": max(gaps),
        "kernels": sorted(launched),
    }


if __name__ == "__main__":
    interpret_all()
    sys.stdout.write(json.dumps({model_type: compare(model_type) for model_type in sys.argv[1:]}) + "\n")
