"""Loading a Hugging Face folder as the module that the engine trains."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn

from rollcast.contracts.weights import StackedWeights, find_stacked, has_prefixed_files, keep_float32
from rollcast.errors import CheckpointError, ConfigError
from rollcast_data.vision.model_inputs import auto_class_name, is_vision_model
from rollcast_engine.hf import WEIGHT_PATTERNS, ValueModel, is_converted, load_hf_config, transformer
from rollcast_engine.keys import EngineKeyError
from rollcast_engine.lora import attach_adapter
from rollcast_engine.process_group import agree, join_process_group
from rollcast_engine.rng import kept_rng
from rollcast_engine.weights import WeightFolder
from rollcast_fsdp.loading import VALUE_HEAD, fill_module, match_names, meta_parameters, read_stacked

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast.contracts.engine import EngineSetup, ModelConfig
    from rollcast_engine.lora import Adapter
    from rollcast_fsdp.schemas import FsdpConfig

__all__ = ["ModelPlan", "build_module", "check_state", "enable_checkpointing"]

log = logging.getLogger(__name__)


class BroadcastWeights:
    """Weights that rank 0 has as a whole and sends to the other ranks, one tensor at a time.

    Args:
        whole: the complete module on rank 0; None on the others.
    """

    def __init__(self, whole: nn.Module | None) -> None:
        self._state = None if whole is None else whole.state_dict()

    def read(self, name: str, region: Sequence[slice], like: Tensor, device: torch.device) -> Tensor:
        """Return a region of a tensor; all ranks read the same tensors in the same order."""
        tensor = torch.empty(like.shape, dtype=like.dtype, device=device)
        if self._state is not None:
            tensor.copy_(self._state[name])
        dist.broadcast(tensor, src=0)
        return tensor[tuple(region)]


@dataclass
class ModelPlan:
    """A module, and the source of its weights.

    Attributes:
        module: its parameters are on the meta device until :meth:`fill` if ``source`` is set; otherwise it is complete,
            in host memory.
        source: safetensors of the folder, or rank 0; None if the module is complete.
        names: for each tensor of the module, without its adapter, by checkpoint name the name in ``source``.
        kinds: kinds of tensors that hold several tensors of a checkpoint.
        adapter: adapter inside the module; None without LoRA.
    """

    module: nn.Module
    source: WeightFolder | BroadcastWeights | None = None
    names: dict[str, str] | None = None
    kinds: tuple[StackedWeights, ...] = ()
    adapter: Adapter | None = None

    def fill(self, device: torch.device, home: torch.device) -> None:
        """Read this rank's region of each weight; call it after sharding.

        Args:
            device: device that computes; the buffers are there.
            home: device of the weights.

        Raises:
            ConfigError: a weight cannot be read; the message names the weight and its file.
        """
        if self.source is not None:
            tensors: dict[str, Tensor] = self.module.state_dict(keep_vars=True)
            fill_module(self.module, lambda name, region: self._read(name, region, tensors[name], device), device, home)
        move: Any = self.module._apply
        move(lambda tensor: tensor.to(home if isinstance(tensor, nn.Parameter) else device))
        if isinstance(self.source, WeightFolder):
            log.info("%.1f MB of weights read from %s", self.source.bytes_read / 1e6, self.source.folder)
            self.source.close()
        self.source = None

    def _read(self, name: str, region: Sequence[slice], like: Tensor, device: torch.device) -> Tensor:
        if self.adapter is not None:
            if self.adapter.owns(name):
                return self.adapter.initial(name, tuple(like.shape))[tuple(region)]
            name = self.adapter.base_name(name)
        if isinstance(self.source, BroadcastWeights):
            return self.source.read(name, region, like, device)
        for kind in self.kinds:
            parts = kind.parts(name, like.shape)
            if parts is not None:
                return read_stacked(parts, region, like, self._read_named)
        return self._read_named(name, region)

    def _read_named(self, name: str, region: Sequence[slice]) -> Tensor:
        theirs = (self.names or {}).get(name)
        if theirs is None or not isinstance(self.source, WeightFolder):
            return torch.zeros([axis.stop - axis.start for axis in region])  # a value head starts at zero
        return self.source.read(theirs, region)


def build_module(setup: EngineSetup, dtype: torch.dtype) -> ModelPlan:
    """Return the module that the engine trains; the caller's RNG state is unchanged.

    Weights in safetensors are read after the module is sharded, so that no rank ever holds all of them. Random weights,
    other formats, and models whose files transformers has to convert are loaded whole by rank 0 alone, which sends each
    rank its part.

    Raises:
        ConfigError: the folder is missing or incomplete, its architecture is not a causal LM, or the requested adapter
            cannot be built.
    """
    model = setup.model
    config = load_hf_config(model)
    _check_weights(model)
    if is_vision_model(config):
        _refuse_vision(setup)
    with kept_rng():
        torch.manual_seed(setup.seed)
        plan = None if model.random_init else _plan_reading(setup, config, dtype)
        if plan is None:
            plan = _plan_whole(setup, config, dtype)
        _train_pad_token(plan.module)
        if model.trains_adapter:
            plan.adapter = attach_adapter(plan.module, model, setup.seed)
            if plan.source is None:
                _fill_adapter(plan.module, plan.adapter)
            elif isinstance(plan.source, WeightFolder):
                plan.adapter.base_fingerprint = plan.source.fingerprint()
    return plan


def _train_pad_token(module: nn.Module) -> None:
    """Unfreeze the pad token's embedding, which has no gradient in transformers.

    In many models the pad token is also the one that ends turns. Positions that are padding have no gradient either
    way, since no loss depends on them.
    """
    embeddings = transformer(module).get_input_embeddings()
    if isinstance(embeddings, nn.Embedding):
        embeddings.padding_idx = None


def check_state(module: nn.Module, config: FsdpConfig) -> None:
    """Check that the layers of a model can compute rows in the layout that the config requests.

    Layers with a recurrent state, such as those of Mamba or of Qwen3-Next's linear attention, pass it on from one
    packed row to the next, and from a prompt to a response without its gradient.

    Raises:
        EngineKeyError: the layers carry a state.
    """
    body = transformer(module)
    if not getattr(body, "_is_stateful", False):
        return
    for key in ("use_remove_padding", "share_prompts"):
        if getattr(config, key):
            raise EngineKeyError(
                key, f"is true, but {type(body).__name__} carries a state from token to token; set it to false"
            )


def _refuse_vision(setup: EngineSetup) -> None:
    """Check that the engine can train a vision-language model as asked.

    Raises:
        ConfigError: it is to have an adapter or a value head.
    """
    if setup.model_type != "language_model":
        raise ConfigError(
            f"{setup.section}.model.path {setup.model.path} is a vision-language model, of which no value model is "
            "made; use an estimator without a critic, such as grpo"
        )
    if setup.model.trains_adapter:
        raise ConfigError(
            f"model.lora_rank={setup.model.lora_rank}: LoRA is not supported for the vision-language model "
            f"{setup.model.path}; train all weights (model.lora_rank=0)"
        )


def enable_checkpointing(module: nn.Module) -> None:
    """Make the layers recompute their activations in the backward pass."""
    body: Any = module.body if isinstance(module, ValueModel) else module
    options = {"use_reentrant": False}
    if hasattr(body, "activation_checkpointing_enable"):  # the name in newer versions of transformers
        body.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        body.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _check_weights(model: ModelConfig) -> None:
    folder = Path(model.path)
    if not model.random_init and not any(any(folder.glob(pattern)) for pattern in WEIGHT_PATTERNS):
        raise ConfigError(
            f"model.path {folder} contains no weights (*.safetensors or pytorch_model*.bin); "
            "set model.random_init=true to start from random ones"
        )


def _plan_reading(setup: EngineSetup, config: Any, dtype: torch.dtype) -> ModelPlan | None:
    """Return a plan to read the folder's safetensors tensor by tensor; None if the model does not support that."""
    folder = Path(setup.model.path)
    if not any(folder.glob("*.safetensors*")) or getattr(config, "quantization_config", None) is not None:
        return None
    source = WeightFolder(folder)
    module = _build_empty(setup, config, dtype)
    if module is None:
        return None
    try:
        names = match_names(module, source, VALUE_HEAD if isinstance(module, ValueModel) else ())
    except ConfigError:
        if is_converted(module) or has_prefixed_files(transformer(module)):
            log.info("transformers has to convert the weights in %s, so a rank loads them whole", folder)
            return None
        raise
    return ModelPlan(module, source, names, find_stacked(transformer(module)) or ())


def _plan_whole(setup: EngineSetup, config: Any, dtype: torch.dtype) -> ModelPlan:
    """Return a plan with all weights in the memory of rank 0, or of every rank if the model can only be built whole."""
    context = setup.context
    empty = _build_empty(setup, config, dtype) if context.world_size > 1 else None
    if empty is None:
        return ModelPlan(_load_whole(setup, config, dtype))
    whole, problem = None, ""
    if context.rank == 0:
        try:
            whole = _load_whole(setup, config, dtype)
        except ConfigError as error:
            problem = str(error)
    join_process_group(context)
    try:
        agree(problem, "", context.world_size)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    return ModelPlan(empty, BroadcastWeights(whole))


def _build_empty(setup: EngineSetup, config: Any, dtype: torch.dtype) -> nn.Module | None:
    """Return the module with its parameters on the meta device; None if it cannot be built so."""
    try:
        with meta_parameters():
            return _from_config(setup, config, dtype)
    except (NotImplementedError, RuntimeError) as error:
        log.info("%s cannot be built without memory for its weights: %s", setup.model.path, error)
        return None


def _auto_class(setup: EngineSetup, config: Any) -> str:
    return auto_class_name(config) if setup.model_type == "language_model" else "AutoModel"


def _options(model: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "attn_implementation": model.attn_implementation,
        "trust_remote_code": model.trust_remote_code,
    }


def _from_config(setup: EngineSetup, config: Any, dtype: torch.dtype) -> nn.Module:
    import transformers

    auto_class = _auto_class(setup, config)
    auto = getattr(transformers, auto_class)
    try:
        module: Any = auto.from_config(config, **_options(setup.model, dtype))
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(f"model.path {setup.model.path} does not load with {auto_class}: {error}") from error
    module.tie_weights()
    keep_float32(module)
    return ValueModel(module) if setup.model_type == "value_model" else module


def _load_whole(setup: EngineSetup, config: Any, dtype: torch.dtype) -> nn.Module:
    """Return the module with all weights in host memory: random, or loaded by transformers."""
    if setup.model.random_init:
        return _from_config(setup, config, dtype)
    import transformers

    folder = Path(setup.model.path)
    auto_class = _auto_class(setup, config)
    try:
        module, info = getattr(transformers, auto_class).from_pretrained(
            folder, config=config, output_loading_info=True, **_options(setup.model, dtype)
        )
    except (ValueError, KeyError, OSError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"model.path {folder} does not load with {auto_class}: {error}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        # transformers would continue with random values in their place.
        raise ConfigError(f"the weights in {folder} lack {len(missing)} parameters, such as {', '.join(missing[:3])}")
    if setup.model_type == "language_model":
        whole: nn.Module = module
        return whole
    value_model = ValueModel(module)
    _load_value_head(value_model, folder)
    return value_model


def _load_value_head(module: ValueModel, folder: Path) -> None:
    """Load ``score.*`` if the folder is an exported value model; otherwise the head stays zero."""
    if not any(folder.glob("*.safetensors")):
        return
    source = WeightFolder(folder)
    with torch.no_grad():
        for name in VALUE_HEAD:
            parameter = module.get_parameter(name)
            if source.shapes.get(name) == tuple(parameter.shape):
                parameter.copy_(source.read(name))


def _fill_adapter(module: nn.Module, adapter: Adapter) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if adapter.owns(name):
                parameter.copy_(adapter.initial(name, tuple(parameter.shape)))
