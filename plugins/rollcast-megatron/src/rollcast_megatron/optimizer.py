"""megatron-core's optimizer over a stage, with access to its state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rollcast.contracts.device import empty_cache
from rollcast_engine.optim import learning_rate
from rollcast_engine.transfer import CopyStream, HostRoom
from rollcast_megatron import cpu
from rollcast_megatron.overlap import start_reductions

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast.contracts.engine import OptimConfig

__all__ = ["StageOptimizer"]

#: A parameter's id, and the name of its state.
_Key = tuple[int, str]
_WEIGHT = "param"


class StageOptimizer:
    """AdamW over this rank's parameters or, if distributed, over its share of them.

    Args:
        chunks: the chunks of the stage, each inside megatron-core's ``DistributedDataParallel``.
        optim: settings of the optimizer.
        is_distributed: distribute the state over the data-parallel ranks.
        dtype: dtype of the weights.
    """

    def __init__(self, chunks: list[Any], optim: OptimConfig, is_distributed: bool, dtype: torch.dtype) -> None:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.chunks, self.optim, self.is_distributed, self.dtype = chunks, optim, is_distributed, dtype
        config = OptimizerConfig(
            optimizer="adam",
            lr=learning_rate(optim, 0),
            weight_decay=optim.weight_decay,
            adam_beta1=optim.betas[0],
            adam_beta2=optim.betas[1],
            adam_eps=optim.eps,
            clip_grad=optim.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=is_distributed,
            overlap_param_gather=chunks[0].ddp_config.overlap_param_gather,
        )
        with cpu.cuda_type_names():
            # No overrides: weight decay applies to every parameter, as in all engines.
            self.whole: Any = get_megatron_optimizer(config, chunks, config_overrides={})
        self._prime()
        #: False while the state is in host memory.
        self.is_on_device = True
        self._hosts: dict[_Key, Tensor] = {}

    @property
    def inner(self) -> list[torch.optim.Optimizer]:
        """The wrapped torch optimizers."""
        optimizers = (part.optimizer for part in self.whole.chained_optimizers)
        return [optimizer for optimizer in optimizers if optimizer is not None]

    def _prime(self) -> None:
        """Create AdamW's state now, as zeros: checkpoints then have the same entries before and after the first
        step.
        """
        for optimizer in self.inner:
            is_torch = isinstance(optimizer, torch.optim.AdamW)
            for group in optimizer.param_groups:
                if is_torch:
                    group |= {"fused": True, "foreach": False}
                for parameter in group["params"]:
                    state = optimizer.state[parameter]
                    state["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
                    state["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
                    if is_torch:
                        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)

    @property
    def overlaps(self) -> bool:
        """True if gradients are reduced in the backward pass."""
        return bool(self.chunks[0].ddp_config.overlap_grad_reduce)

    def zero_grad(self) -> None:
        """Drop the gradients of the parameters that the optimizer steps; those in the chunks' buffers stay."""
        self.whole.zero_grad()

    def gradient_norm(self) -> float:
        """Reduce gradients over the ranks that share parameters, and return their global norm."""
        from megatron.core.distributed import finalize_model_grads

        start_reductions(self.chunks)
        finalize_model_grads(self.chunks, None)
        self.whole.prepare_grads()
        return float(self.whole.get_grad_norm())

    def step(self, norm: float, rate: float) -> None:
        """Clip gradients that have this norm, and step with the learning rate ``rate``."""
        scale = self.optim.clip_grad / (norm + 1e-6)
        for part in self.whole.chained_optimizers:
            gradients = [p.grad for p in part.get_parameters() if p.grad is not None]
            if scale < 1.0 and gradients:
                torch._foreach_mul_(gradients, scale)
        for group in self.whole.param_groups:
            group["lr"] = rate
        self.whole.step_with_ready_grads()

    def steps_taken(self) -> int:
        """Return the number of steps so far, the same for every parameter."""
        for optimizer in self.inner:
            for group in optimizer.param_groups:
                if "step" in group and not isinstance(optimizer, torch.optim.AdamW):
                    return int(group["step"])
                for parameter in group["params"]:
                    if "step" in optimizer.state[parameter]:
                        return int(optimizer.state[parameter]["step"])
        return 0

    def set_steps_taken(self, steps: int) -> None:
        """Set the number of steps so far; megatron-core's checkpoints do not restore torch's count."""
        for optimizer in self.inner:
            for group in optimizer.param_groups:
                if not isinstance(optimizer, torch.optim.AdamW):
                    group["step"] = steps
                    continue
                for parameter in group["params"]:
                    optimizer.state[parameter]["step"] = torch.tensor(float(steps), device=parameter.device)

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state kept per parameter: AdamW's moments, and float32 weights if the model's dtype is lower."""
        return ("exp_avg", "exp_avg_sq", "param") if self.dtype != torch.float32 else ("exp_avg", "exp_avg_sq")

    def collect(self, parameter: Tensor) -> dict[str, Tensor] | None:
        """Return the state of a parameter of this stage, float32, in its shape and in host memory.

        With a distributed optimizer all ranks that hold the parameter must call; the first returns the state, the
        others None.
        """
        local, start = self._state_of(parameter)
        if not self.is_distributed:
            return {name: local[name].detach().float().cpu() for name in self.state_names}
        group = self._part(parameter).data_parallel_group
        first = dist.get_global_rank(group, 0)
        whole = {}
        for name in self.state_names:
            flat = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
            if name in local:
                flat[start : start + local[name].numel()] = local[name].detach().to(flat)
            dist.reduce(flat, first, group=group)
            whole[name] = flat.view(parameter.shape).cpu()
        return whole if dist.get_rank(group) == 0 else None

    def restore(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        """Set this rank's state of a parameter from the whole state."""
        local, start = self._state_of(parameter)
        with torch.no_grad():
            for name in self.state_names:
                if name in local:
                    share = state[name].reshape(-1)[start : start + local[name].numel()]
                    local[name].copy_(share.view(local[name].shape))

    def _part(self, parameter: Tensor) -> Any:
        """Return megatron-core's optimizer of a parameter: experts have their own, which other ranks share."""
        is_expert = not getattr(parameter, "allreduce", True)
        for part in self.whole.chained_optimizers:
            if any(group.get("is_expert_parallel", False) == is_expert for group in part.param_groups):
                return part
        return self.whole.chained_optimizers[0]

    def _state_of(self, parameter: Tensor) -> tuple[dict[str, Tensor], int]:
        """Return this rank's state of a parameter and its start offset; empty if this rank has no share."""
        if not self.is_distributed:
            main = getattr(parameter, "main_param", parameter)
            return {"param": main, **self._part(parameter).optimizer.state[main]}, 0
        part = self._part(parameter)
        if parameter not in part.model_param_group_index_map:
            return {}, 0
        state: dict[str, Tensor] = part._get_main_param_and_optimizer_states(parameter)
        return state, part._get_model_param_range_map(parameter)["param"].start

    def offload(self, copies: CopyStream) -> None:
        """Move the state, and the float32 copies of bfloat16 weights if there are any, to host memory.

        On return their memory on the device is free. Gradients of the copies are dropped.
        """
        if not self.is_on_device:
            return
        for weight in self._master_weights():
            weight.grad = None
        room = HostRoom(copies)
        copies.wait_for_compute()
        with copies.enter():
            for key, value in self._movable():
                if key not in self._hosts:
                    self._hosts[key] = room.take(value.shape, value.dtype)
                copies.copy(self._hosts[key], value)
        copies.wait(copies.mark())
        self._replace(self._hosts)
        self.is_on_device = False
        empty_cache()

    def load(self, copies: CopyStream) -> None:
        """Move the state back to the device; what the computation queues from now on finds it there."""
        if self.is_on_device:
            return
        arrived = {}
        with copies.enter():
            for key, host in self._movable():
                arrived[key] = copies.device_buffer(host.shape, host.dtype)
                copies.copy(arrived[key], host)
        copies.make_compute_wait(copies.mark(), list(arrived.values()))
        self._replace(arrived)
        self.is_on_device = True

    def _movable(self) -> Iterator[tuple[_Key, Tensor]]:
        """Yield the tensors that move."""
        # Counts of steps do not: they are single numbers, which a fused optimizer wants on the device.
        for weight in self._master_weights():
            yield (id(weight), _WEIGHT), weight.data
        for optimizer in self.inner:
            for parameter, state in optimizer.state.items():
                tensors = ((name, value) for name, value in state.items() if isinstance(value, torch.Tensor))
                yield from (((id(parameter), name), value) for name, value in tensors if value.dim())

    def _replace(self, tensors: Mapping[_Key, Tensor]) -> None:
        for weight in self._master_weights():
            weight.data = tensors[id(weight), _WEIGHT]
        for optimizer in self.inner:
            for parameter, state in optimizer.state.items():
                state.update({name: tensors[id(parameter), name] for name in state if (id(parameter), name) in tensors})

    def _master_weights(self) -> Iterator[Tensor]:
        for part in self.whole.chained_optimizers:
            groups = getattr(part, "shard_fp32_from_float16_groups", None)
            groups = groups or getattr(part, "fp32_from_float16_groups", None) or ()
            yield from (parameter for group in groups for parameter in group if parameter is not None)
