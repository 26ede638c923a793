"""Dry runs of training engines: one cell is an engine with its keys, a model, and one of its ranks."""

from __future__ import annotations

import math
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from rollcast.contracts.engine import (
    BaseEngine,
    EngineSetup,
    ForwardSettings,
    LossInputs,
    LossOutput,
    ModelConfig,
    ModelType,
    OptimConfig,
    engines,
)
from rollcast.contracts.worker import WorkerContext
from rollcast.protocol import DataProto, Jagged
from rollcast_dryrun.harness import fake_cuda
from rollcast_dryrun.models import write_sparse_model
from rollcast_dryrun.record import Recorder
from rollcast_dryrun.transformer_engine import forget_devices

__all__ = ["EngineCell", "Phases", "build_engine", "dry_run_engine", "own_groups", "record_engine", "run_step"]

_TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
#: Experts in groups, of which some are shared by all tokens, after a dense layer.
_SHARED_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
#: Heads whose rotated part, queries and values differ in size.
_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
#: Architecture of the class → what it needs beside ``_TINY``.
_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "llama": ("LlamaForCausalLM", {}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _EXPERTS),
    "glm4_moe": ("Glm4MoeForCausalLM", {**_SHARED_EXPERTS, "attention_bias": True, "use_qk_norm": True}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**_SHARED_EXPERTS, **_LATENT}),
}
#: Models that see images, which :mod:`rollcast_testing.tiny_vision` makes.
_VISION = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
#: Attributes of Megatron's classes that are of a device: module, class, attribute.
_OF_A_DEVICE = (
    ("megatron.core.transformer.moe.token_dispatcher", "MoEAlltoAllTokenDispatcher", "cuda_dtoh_stream"),
    ("megatron.core.transformer.moe.moe_utils", "MoEAuxLossAutoScaler", "main_loss_backward_scale"),
    ("megatron.core.extensions.transformer_engine", "TEDotProductAttention", "cp_stream"),
)
#: First stage of a pipeline → phase → whole numbers that it sent.
_SENT: dict[str, dict[str, list[list[int]]]] = {}


@dataclass(frozen=True)
class EngineCell:
    """One dry run of an engine.

    Attributes:
        engine: registry name of the engine.
        keys: its config keys.
        model: ``model_type`` of the model's configuration.
        changes: changes of the configuration, which is tiny by default.
        model_type: kind of output.
        model_keys: keys of ``model``, such as ``lora_rank``.
        settings: settings of the passes.
        world, rank, node_ranks: ranks of the group, the one that runs, and the ranks of a node.
        device: kind of device.
        rows, prompt, response: rows of this rank's batch, and the largest numbers of their tokens.
        is_even: True if all rows have these lengths.
        transformer_engine: True if Megatron's layers are Transformer Engine's, which the process then has to have.
    """

    engine: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    model: str = "qwen2"
    changes: Mapping[str, Any] = field(default_factory=dict)
    model_type: ModelType = "language_model"
    model_keys: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    world: int = 1
    rank: int = 0
    node_ranks: int = 8
    device: str = "h100"
    rows: int = 4
    prompt: int = 24
    response: int = 40
    is_even: bool = False
    transformer_engine: bool = False

    @property
    def name(self) -> str:
        """The properties of the cell, in one line."""
        keys = {**self.keys, **self.changes, **self.model_keys, **self.settings}
        parts = [f"{key}={value}" for key, value in keys.items()]
        kind = [] if self.model_type == "language_model" else [self.model_type]
        layers = ["transformer_engine"] if self.transformer_engine else []
        return " ".join([self.engine, *layers, self.model, *kind, *parts, f"rank={self.rank}/{self.world}"])


def dry_run_engine(cell: EngineCell) -> Recorder:
    """Run a step of an engine: log-probs or values, an update, the export of its weights, and moves off the device.

    The phases are ``init``, ``infer``, ``forward_backward``, ``optimizer_step``, ``sync``, ``offload`` and ``load``.
    """
    if cell.keys.get("pipeline_model_parallel_size", 1) == 1:
        return _run(cell, None)
    # Every stage announces the shapes of the same micro-batches; the first one is told none that it has not sent.
    first = replace(cell, rank=0)
    if cell != first:
        if repr(first) not in _SENT:
            dry_run_engine(first)
        return _run(cell, _SENT[repr(first)])
    recorder = _run(first, None)
    _SENT[repr(first)] = {name: phase.sent for name, phase in recorder.phases.items()}
    return recorder


def _settings(cell: EngineCell) -> ForwardSettings:
    return replace(ForwardSettings(micro_batch_size_per_gpu=2), **cell.settings)


def _run(cell: EngineCell, received: Mapping[str, Sequence[Sequence[int]]] | None) -> Recorder:
    """Run the step of a cell without a device."""
    with fake_cuda(cell.world, cell.rank, cell.device, cell.node_ranks, received) as recorder, own_groups():
        run_step(cell, recorder)
    return recorder


class Phases(Protocol):
    """A record with phases; :class:`~rollcast_dryrun.record.Recorder` is one."""

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Record the block as a phase."""
        ...


def run_step(cell: EngineCell, recorder: Phases) -> None:
    """Run the step of a cell on the device, real or not, that torch has."""
    engine = build_engine(cell)
    _step(cell, engine, recorder)
    with recorder.phase("sync"):
        deque(engine.get_per_tensor_param(), maxlen=0)
    with recorder.phase("offload"):
        engine.to("cpu")
    with recorder.phase("load"):
        engine.to("accelerator")


def record_engine(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a cell as a value of JSON, for another process."""
    recorder = dry_run_engine(EngineCell(**cell))
    faults = [f"{fault.text} ({fault.kind}, {fault.place})" for fault in recorder.faults.values()]
    phases = {name: phase.as_dict() for name, phase in recorder.phases.items() if name}
    return {"faults": faults, "phases": phases}


def build_engine(cell: EngineCell, frozen: bool = False) -> BaseEngine:
    """Return the engine of a cell, inside :func:`~rollcast_dryrun.harness.fake_cuda`; a frozen one has no optimizer."""
    folder = _model_folder(cell.model, tuple(sorted(cell.changes.items())))
    local = min(cell.node_ranks, cell.world)
    context = WorkerContext(
        rank=cell.rank,
        world_size=cell.world,
        local_rank=cell.rank % local,
        local_world_size=local,
        master_port=1,
        device_index=0,
        role="actor",
    )
    engine_class = engines.get(cell.engine)
    return engine_class(
        EngineSetup(
            cell.model_type,
            ModelConfig(path=folder.name, **cell.model_keys),
            engine_class.config_schema(**cell.keys),
            None if frozen else OptimConfig(),
            context,
        )
    )


@contextmanager
def own_groups() -> Iterator[None]:
    """Forget what Megatron keeps for the life of a process after the block: groups of one mesh, streams, workspaces."""
    try:
        yield
    finally:
        state: Any = sys.modules.get("megatron.core.parallel_state")
        if state is not None:
            state.destroy_model_parallel()
        forget_devices()
        for module, name, attribute in _OF_A_DEVICE:
            if module in sys.modules:
                setattr(getattr(sys.modules[module], name), attribute, None)


def _step(cell: EngineCell, engine: BaseEngine, recorder: Phases) -> None:
    settings, batch = _settings(cell), _batch(cell, engine)
    with recorder.phase("init"):
        engine.initialize()
        if settings.vocabulary_kl is not None:
            reference = build_engine(cell, frozen=True)
            reference.initialize()
            engine.set_reference(reference)
    with recorder.phase("infer"), engine.eval_mode():
        outputs, _ = engine.infer_batch(batch, replace(settings, vocabulary_kl=None))
    if settings.record_routing:  # an update replays the choices of experts
        batch = batch.with_columns({"routed_experts": outputs["routed_experts"]})
        settings = replace(settings, record_routing=False)
    loss = _value_loss if engine.setup.model_type == "value_model" else _policy_loss
    with engine.train_mode():
        engine.optimizer_zero_grad()
        with recorder.phase("forward_backward"):
            engine.forward_backward_batch(batch, loss, settings)
        with recorder.phase("optimizer_step"):
            norm, _ = engine.optimizer_step()
    if not math.isfinite(norm):
        raise FloatingPointError(f"the gradient's norm is {norm}")


def _policy_loss(inputs: LossInputs) -> LossOutput:
    if inputs.log_probs is None:
        raise TypeError("a policy's loss needs log_probs")
    losses = -inputs.log_probs if inputs.vocabulary_kl is None else inputs.vocabulary_kl - inputs.log_probs
    loss = (losses * inputs.response_mask).sum() / inputs.denominators.tokens
    return LossOutput(loss, {"loss": loss.detach()})


def _value_loss(inputs: LossInputs) -> LossOutput:
    if inputs.values is None:
        raise TypeError("a critic's loss needs values")
    loss = (inputs.values.square() * inputs.response_mask).sum() / inputs.denominators.tokens
    return LossOutput(loss, {"loss": loss.detach()})


def _batch(cell: EngineCell, engine: BaseEngine) -> DataProto:
    """Return rows of different lengths, of which the first is as long as allowed; with images for a model that sees."""
    if cell.model in _VISION:
        return _batch_with_images(cell, Path(engine.setup.model.path))
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(cell.changes.get("vocab_size", _TINY["vocab_size"]))

    def column(longest: int) -> Jagged:
        lengths = torch.randint(1, longest + 1, (cell.rows,), generator=generator)
        lengths[: cell.rows if cell.is_even else 1] = longest
        total = int(lengths.sum())
        return Jagged.from_lengths(
            torch.randint(4, vocabulary, (total,), generator=generator, dtype=torch.int32), lengths
        )

    prompts, responses = column(cell.prompt), column(cell.response)
    mask = responses.like(torch.ones(len(responses.values), dtype=torch.bool))
    columns = {"prompts": prompts, "responses": responses, "response_mask": mask}
    return DataProto(columns, length=cell.rows)


def _batch_with_images(cell: EngineCell, folder: Path) -> DataProto:
    """Return rows with two images, one, and none."""
    from rollcast_testing.tiny_vision import noise_image, vision_prompt

    images = (noise_image(1), noise_image(2, 40, 32))
    parts: list[list[Sequence[int] | bytes]] = [[[5, 6], *images, [7]], [[5, 6, 7]], [images[0], [8, 9]], [[5]]]
    prompts = [vision_prompt(folder, *parts[row % len(parts)]) for row in range(cell.rows)]

    def jagged(rows: Sequence[Sequence[int]]) -> Jagged:
        values = torch.tensor([value for row in rows for value in row], dtype=torch.int32)
        return Jagged.from_lengths(values, torch.tensor([len(row) for row in rows]))

    responses = jagged([[9] * (cell.response - 3 * row) for row in range(cell.rows)])
    columns = {
        "prompts": jagged([ids for ids, _ in prompts]).column(),
        "responses": responses.column(),
        "response_mask": responses.like(torch.ones(len(responses.values), dtype=torch.bool)),
    }
    data = [{"image": found} if found else None for _, found in prompts]
    return DataProto.from_dict(columns, non_tensors={"multi_modal_data": data})


@cache
def _model_folder(model: str, changes: tuple[tuple[str, Any], ...]) -> tempfile.TemporaryDirectory[str]:
    """Return a folder with a model, which is removed when the process ends."""
    from transformers import AutoConfig

    if model in _VISION:
        from rollcast_testing.tiny_vision import VisionKind, tiny_vision_folder

        folder = tempfile.TemporaryDirectory(prefix="rollcast-dryrun-")
        tiny_vision_folder(Path(folder.name), cast(VisionKind, model))
        return folder
    architecture, needs = _ARCHITECTURES[model]
    options = {**_TINY, **needs, **dict(changes)}
    folder = tempfile.TemporaryDirectory(prefix="rollcast-dryrun-")
    write_sparse_model(Path(folder.name), AutoConfig.for_model(model, architectures=[architecture], **options))
    return folder
