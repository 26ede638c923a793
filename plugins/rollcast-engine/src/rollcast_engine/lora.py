"""LoRA adapters by PEFT inside a module: the one that an engine trains, or a skeleton that only has its names.

PEFT replaces each target layer: the base weight is renamed to ``<target>.base_layer.weight``, and
``<target>.lora_A.default.weight`` ``[r, in]`` and ``<target>.lora_B.default.weight`` ``[out, r]`` are added.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn

from rollcast.contracts.weights import find_stacked
from rollcast.errors import CapabilityError, CheckpointError, ConfigError
from rollcast_engine.hf import ValueModel, transformer
from rollcast_engine.weights import WeightFolder, describe_differences

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast.contracts.engine import ModelConfig
    from rollcast.contracts.weights import AdapterWeights

__all__ = [
    "ADAPTER_FOLDER",
    "Adapter",
    "LoraPair",
    "attach_adapter",
    "merge_pair",
    "require_adapter",
    "write_adapter",
]

#: Subfolder of an export that holds the adapter, beside the merged weights.
ADAPTER_FOLDER = "adapter"

_NAME = "default"
_PEFT_PREFIX = "base_model.model."
_CONFIG_FILE, _WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
#: Keys of PEFT's config that need more than the matrices A and B, and the values at which they do not.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "lora_bias": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    "layer_replication": (None, []),
    "use_rslora": (None, False),
    "lora_dropout": (None, 0, 0.0),
}


@dataclass(frozen=True)
class LoraPair:
    """The names of the two matrices added to a base weight: ``weight + scaling * B @ A``."""

    a: str
    b: str
    scaling: float


def merge_pair(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Return ``weight + scaling * b @ a`` in the weight's dtype, computed in float32."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scaling).to(weight.dtype)


class Adapter:
    """The adapter of a module.

    Attributes:
        config: PEFT's ``adapter_config.json``.
        pairs: matrices by the Hugging Face name of their base weight.

    Args:
        module: module with PEFT's layers.
        config: PEFT's config.
        seed: seed of A's initial values; the same on all ranks.
        source: folder with initial values; None draws them from the seed.
    """

    #: Fingerprint of the base weights; None if they are not from safetensors.
    base_fingerprint: str | None = None

    def __init__(self, module: nn.Module, config: Mapping[str, Any], seed: int, source: WeightFolder | None) -> None:
        self.config = dict(config)
        self._seed = seed
        self._source = source
        self._layers: list[Any] = []
        self.pairs: dict[str, LoraPair] = {}
        for name, layer in module.named_modules():
            if hasattr(layer, "lora_A") and hasattr(layer, "base_layer"):
                self._layers.append(layer)
                a, b = (f"{name}.lora_{half}.{_NAME}.weight" for half in "AB")
                self.pairs[f"{name}.weight"] = LoraPair(a, b, float(layer.scaling[_NAME]))
        self._own = {name: index for index, pair in enumerate(self.pairs.values()) for name in (pair.a, pair.b)}

    @property
    def names(self) -> list[str]:
        """Names of the adapter's tensors in the module."""
        return list(self._own)

    def owns(self, name: str) -> bool:
        """Return True if a tensor of the module belongs to the adapter."""
        return name in self._own

    @staticmethod
    def base_name(name: str) -> str:
        """Return the Hugging Face name of a base tensor of the module."""
        return name.replace(".base_layer.", ".")

    @staticmethod
    def peft_name(name: str) -> str:
        """Return the name of an adapter tensor in PEFT's files."""
        return _PEFT_PREFIX + name.replace(f".{_NAME}.", ".")

    def initial(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return the initial value of an adapter tensor, whole, float32: read from the folder, or drawn from the seed.

        B is zero, and A is uniform within ``1 / sqrt(in)``, as in PEFT and ``nn.Linear``.
        """
        if self._source is not None:
            return self._source.read(self.peft_name(name)).float()
        if ".lora_B." in name:
            return torch.zeros(tuple(shape))
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._own[name])
        bound = 1.0 / math.sqrt(shape[1])
        return torch.empty(tuple(shape)).uniform_(-bound, bound, generator=generator)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Use only the base model in forward passes during the block."""
        # PEFT's own property would also change requires_grad; the set of trained tensors must not change.
        before = [layer._disable_adapters for layer in self._layers]
        for layer in self._layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer, was in zip(self._layers, before, strict=True):
                layer._disable_adapters = was


def attach_adapter(module: nn.Module, model: ModelConfig, seed: int) -> Adapter:
    """Add a LoRA adapter to ``module`` and freeze everything else except a value head.

    The adapter's matrices are float32 regardless of the model's dtype, on the module's device; :meth:`Adapter.initial`
    provides their values.

    Raises:
        ConfigError: PEFT is not installed, ``model.target_modules`` names no linear layer, or the folder
            ``model.lora_adapter_path`` has no adapter of this model.
    """
    peft = _import_peft()
    source: WeightFolder | None = None
    if model.lora_adapter_path is not None:
        config, source = _read_adapter(peft, Path(model.lora_adapter_path))
        if model.lora_rank not in (0, config.r):
            raise ConfigError(
                f"model.lora_rank is {model.lora_rank}, but the adapter in {model.lora_adapter_path} has {config.r}"
            )
    else:
        config = peft.LoraConfig(
            r=model.lora_rank, lora_alpha=model.lora_alpha, target_modules=_targets(model.target_modules, module)
        )
    config.task_type = "CAUSAL_LM"
    if isinstance(module, ValueModel):
        config.task_type, config.exclude_modules = "TOKEN_CLS", ["score"]
    try:
        peft.inject_adapter_in_model(config, module, _NAME, low_cpu_mem_usage=True)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"model.target_modules={model.target_modules} cannot be adapted: {error}") from error
    _check_layers(module, model)
    adapter = Adapter(module, _plain_config(config, model), seed, source)
    _make_float(module, adapter)
    if source is not None:
        _check_source(module, adapter, source)
    if isinstance(module, ValueModel):
        module.score.requires_grad_(True)
    return adapter


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"model.lora_rank and model.lora_adapter_path need PEFT ({error}); pip install 'rollcast-engine[lora]'"
        ) from error
    return peft


def _targets(value: Any, module: nn.Module) -> Any:
    kinds = find_stacked(transformer(module)) or ()
    if value == "all-linear" and kinds:
        # PEFT would also select the experts, which are one tensor here and not linear layers.
        experts = {source.split(".")[-2] for kind in kinds for source in kind.sources}
        head = None if isinstance(module, ValueModel) else module.get_output_embeddings()  # type: ignore[operator]
        layers = {name for name, layer in module.named_modules() if isinstance(layer, nn.Linear) and layer is not head}
        return sorted({name.rpartition(".")[2] for name in layers} - experts)
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and value and all(isinstance(name, str) for name in value):
        return list(value)
    raise ConfigError(
        f"model.target_modules is {value!r}; allowed are names of linear layers, a regular expression, or all-linear"
    )


def _plain_config(config: Any, model: ModelConfig) -> dict[str, Any]:
    """Return PEFT's config as JSON values; target paths of single layers are shortened to their last names."""
    plain: dict[str, Any] = config.to_dict()
    targets = plain["target_modules"]
    if not isinstance(targets, str):
        plain["target_modules"] = sorted({str(target).rpartition(".")[2] for target in targets})
    plain["peft_type"], plain["task_type"] = "LORA", str(getattr(config.task_type, "value", config.task_type))
    plain["base_model_name_or_path"] = model.path
    keys = ("peft_type", "task_type", "r", "lora_alpha", "lora_dropout", "bias", "target_modules")
    return {key: plain[key] for key in (*keys, "exclude_modules", "base_model_name_or_path", "fan_in_fan_out")}


def _check_layers(module: nn.Module, model: ModelConfig) -> None:
    from peft.tuners.lora import Linear, LoraLayer

    head = None if isinstance(module, ValueModel) else module.get_output_embeddings()  # type: ignore[operator]
    for name, layer in module.named_modules():
        if isinstance(layer, LoraLayer):
            problem = "" if isinstance(layer, Linear) else "which is not a linear layer"
            problem = "the vocabulary head" if layer is head else problem
            if problem:
                raise ConfigError(
                    f"model.target_modules={model.target_modules} selects {name}, {problem}; an adapter can only "
                    "extend linear layers of the transformer"
                )


def _make_float(module: nn.Module, adapter: Adapter) -> None:
    """Convert the adapter to float32: it is small, and its updates would be lost in the rounding of bf16."""
    device = next(parameter.device for name, parameter in module.named_parameters() if not adapter.owns(name))
    for name in adapter.names:
        place = module.get_submodule(name.removesuffix(".weight"))
        shape = place.get_parameter("weight").shape
        place.register_parameter("weight", nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device)))


def _read_adapter(peft: Any, folder: Path) -> tuple[Any, WeightFolder]:
    for name in (_CONFIG_FILE, _WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise ConfigError(f"model.lora_adapter_path {folder} has no {name}; set it to a folder that PEFT wrote")
    file = folder / _CONFIG_FILE
    try:
        text = dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if text.get("peft_type") != "LORA":
        raise ConfigError(f"{file} describes an adapter of type {text.get('peft_type')}; only LORA can be trained")
    for key, values in _PLAIN.items():
        if text.get(key) not in values:
            raise ConfigError(f"{file} has {key}={text[key]!r}, which is not supported; supported: {values[-1]!r}")
    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    config.inference_mode = False
    return config, WeightFolder(folder, [_WEIGHTS_FILE])


def _check_source(module: nn.Module, adapter: Adapter, source: WeightFolder) -> None:
    parameters = dict(module.named_parameters())
    expected = {adapter.peft_name(name): tuple(parameters[name].shape) for name in adapter.names}
    missing = sorted(expected.keys() - source.shapes.keys())
    unexpected = sorted(source.shapes.keys() - expected.keys())
    wrong = [name for name, shape in expected.items() if source.shapes.get(name, shape) != shape]
    problem = describe_differences(missing, unexpected, wrong)
    if problem:
        raise ConfigError(f"model.lora_adapter_path: {source.folder} does not fit this model: it {problem}")


def require_adapter(adapter: Adapter | None) -> Adapter:
    """Return the adapter after checking that there is one.

    Raises:
        CapabilityError: there is none.
    """
    if adapter is None:
        raise CapabilityError("the engine trains the whole model and has no adapter; set model.lora_rank")
    return adapter


def write_adapter(path: Path, adapter: AdapterWeights) -> None:
    """Write an adapter in PEFT's format to the subfolder ``adapter`` of an export.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    folder = path / ADAPTER_FOLDER
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in adapter.tensors.items()}
    try:
        folder.mkdir(exist_ok=True)
        (folder / _CONFIG_FILE).write_text(adapter.config_json())
        save_file(tensors, folder / _WEIGHTS_FILE)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error
