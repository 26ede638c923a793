"""The core's conformance suite on this engine: on one rank, and on meshes of several."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import ClassVar

import pytest

from rollcast_testing import EngineSuite, Layout

pytestmark = pytest.mark.long

PACKED, CONTEXT = {"use_remove_padding": True}, {"context_parallel_size": 2}
TENSOR, PIPELINE = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
INTERLEAVED = {**PIPELINE, "virtual_pipeline_model_parallel_size": 2}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
EXPERTS = {"expert_model_parallel_size": 2}
FULL = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
#: Layouts that always run: each way to split a model. The others run with ROLLCAST_ALL_CASES=1.
ALWAYS = (
    "sequence parallel, in chunks",
    "packed, interleaved",
    "tensor x pipeline",
    "context x copies",
)


def some(layouts: dict[str, Layout], always: Collection[str]) -> dict[str, Layout]:
    if os.environ.get("ROLLCAST_ALL_CASES"):
        return layouts
    return {name: layouts[name] for name in always}


class TestMegatronEngine(EngineSuite):
    name = "megatron"
    packing_config: ClassVar = PACKED
    layouts: ClassVar = some(
        {
            "tensor": Layout(2, TENSOR),
            "sequence parallel, in chunks": Layout(
                2, {**TENSOR, "sequence_parallel": True, "head_chunk_size": 3, **FULL}
            ),
            "pipeline": Layout(2, {**PIPELINE, "recompute_granularity": "selective"}),
            "interleaved": Layout(2, INTERLEAVED, layers=4),
            "packed, interleaved": Layout(2, {**INTERLEAVED, **PACKED, **FULL}, layers=4),
            "copies": Layout(2),
            "copies of the optimizer": Layout(2, {"use_distributed_optimizer": False}),
            "copies, overlapped": Layout(2, OVERLAP),
            "tensor x pipeline": Layout(4, {**TENSOR, **PIPELINE, "sequence_parallel": True}),
            "pipeline x copies": Layout(4, PIPELINE),
            "interleaved x copies": Layout(4, INTERLEAVED, layers=4),
            "uneven, interleaved": Layout(2, {**INTERLEAVED, "num_layers_in_first_pipeline_stage": 2}, layers=6),
            "four stages, interleaved": Layout(4, {**INTERLEAVED, "pipeline_model_parallel_size": 4}, layers=8),
            "packed, sequence parallel": Layout(2, {**TENSOR, **PACKED, "sequence_parallel": True}),
            "packed pipeline": Layout(2, {**PIPELINE, **PACKED, "recompute_granularity": "selective"}),
            "context": Layout(2, CONTEXT),
            "packed context": Layout(2, {**CONTEXT, **PACKED, **FULL, "use_distributed_optimizer": False}),
            "tensor x packed context": Layout(4, {**TENSOR, **CONTEXT, **PACKED, "sequence_parallel": True}),
            "packed context x pipeline": Layout(4, {**PIPELINE, **CONTEXT, **PACKED}),
            "context x copies": Layout(4, CONTEXT),
            "tensor x copies, overlapped": Layout(4, {**TENSOR, **OVERLAP, "sequence_parallel": True}),
        },
        ALWAYS,
    )


@pytest.mark.cases(1)
class TestMegatronEngineOfAMixture(EngineSuite):
    name = "megatron"
    packing_config: ClassVar = PACKED
    model_options: ClassVar = {"experts": 4}
    layouts: ClassVar = {
        "tensor x experts": Layout(4, {**TENSOR, **EXPERTS, "sequence_parallel": True}),
        "experts": Layout(2, EXPERTS),
        "experts, recomputed": Layout(2, {**EXPERTS, **FULL, "use_distributed_optimizer": False}),
        "pipeline": Layout(2, PIPELINE),
        "interleaved, recomputed": Layout(2, {**INTERLEAVED, **FULL}, layers=4),
        "experts x copies": Layout(4, EXPERTS),
        "experts x copies, overlapped": Layout(4, {**EXPERTS, **OVERLAP}),
        "experts over packed context": Layout(2, {**EXPERTS, **CONTEXT, **PACKED}),
        "tensor x experts over context": Layout(4, {**TENSOR, **EXPERTS, **CONTEXT, "sequence_parallel": True}),
    }
