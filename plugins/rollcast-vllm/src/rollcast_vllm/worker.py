"""Loading weights inside vLLM's worker processes; vLLM mixes the class into its own worker."""

from __future__ import annotations

import os
import pickle
import select
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rollcast.contracts.weights import WeightReport
from rollcast.errors import RollcastError, WeightSyncError
from rollcast_serving.bucket_memory import ServedBucket, SharedBucket
from rollcast_serving.model_weights import ModelWeights, UpdateCheck
from rollcast_serving.receiving import BucketsForReaders, WeightTally
from rollcast_vllm.environment import engine_owner

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["WeightsExtension"]


class WeightsExtension:
    """Methods that the rollout calls by ``collective_rpc``; all of them start with ``rollcast_``.

    Arguments and results other than plain values are pickled, because vLLM's own encoding loses their types. Errors are
    returned as results, so that they arrive with their class and fields.
    """

    model_runner: Any
    vllm_config: Any
    rank: int
    _rollcast_load: _Load | None = None

    def rollcast_watch_owner(self) -> None:
        """End this process when its node's rollcast process is gone: if that is killed, it cannot stop this one."""
        try:
            owner = os.pidfd_open(engine_owner())
        except (AttributeError, OSError):
            return  # not Linux, or an old kernel
        threading.Thread(target=_die_with, args=(owner,), name="rollcast-watch-owner", daemon=True).start()

    def rollcast_allocate_inputs(self) -> None:
        """Allocate what a pipeline stage receives from the one before; on a CPU vLLM 0.32 does not, and fails."""
        runner = self.model_runner
        if runner.intermediate_tensors is None:
            dtype, model = runner.model_config.dtype, runner.get_model()
            runner.intermediate_tensors = model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=dtype, device=runner.device
            )

    def rollcast_neutralize(self, placeholder_ids: list[int], neutral_id: int) -> None:
        """Make the model read sampled placeholders, for which there is no image, as the token ``neutral_id``."""
        _neutralize(self.model_runner.get_model(), placeholder_ids, neutral_id)

    def rollcast_load_all(self, pickled: bytes, version: int) -> bytes:
        """Load all of ``(ModelWeights, buckets)``; return a report or an error."""

        def load() -> WeightReport:
            expected, buckets = pickle.loads(pickled)
            if isinstance(buckets, BucketsForReaders):
                buckets = buckets.for_reader(self.rank, self.vllm_config.parallel_config.world_size)
            self._rollcast_load = _Load(self, expected)
            return self._rollcast_load.take(buckets, version)

        return self._answer(load)

    def rollcast_load_begin(self, pickled: bytes) -> bytes:
        """Begin an update with pickled :class:`ModelWeights`."""

        def begin() -> None:
            self._rollcast_load = _Load(self, pickle.loads(pickled))

        return self._answer(begin)

    def rollcast_load_bucket(self, pickled: bytes, version: int) -> bytes:
        """Load one bucket, which is read where it is; return a report or an error."""

        def load() -> WeightReport:
            bucket: SharedBucket | ServedBucket = pickle.loads(pickled)
            return self._present_load().take(bucket, version)

        return self._answer(load)

    def rollcast_load_finish(self, version: int) -> bytes:
        """End an update after checking that it is complete."""

        def finish() -> None:
            self._present_load().finish(version)
            self._rollcast_load = None

        return self._answer(finish)

    def rollcast_load_abandon(self) -> None:
        """Abandon a failed update; tensors that were already loaded stay."""
        from vllm.config import set_current_vllm_config

        if self._rollcast_load is not None:
            with set_current_vllm_config(self.vllm_config):
                self._rollcast_load.abandon()
            self._rollcast_load = None

    def _answer(self, call: Callable[[], object]) -> bytes:
        """Return the pickled result or error of a call, during which layers find vLLM's configuration.

        vLLM's own worker loads in this context; layers of experts choose their kernels by it.
        """
        from vllm.config import set_current_vllm_config

        try:
            with set_current_vllm_config(self.vllm_config):
                return pickle.dumps(call())
        except RollcastError as error:
            return pickle.dumps(error)
        except Exception as error:  # noqa: BLE001  # raised again in the rollout's process
            return pickle.dumps(WeightSyncError(f"vLLM failed to load weights: {type(error).__name__}: {error}"))

    def _present_load(self) -> _Load:
        if self._rollcast_load is None:
            raise WeightSyncError("no update of the weights has begun")
        return self._rollcast_load


class _Load:
    """One update of a worker's model. vLLM collects a layer's tensors until they are complete, then converts them."""

    def __init__(self, worker: WeightsExtension, expected: ModelWeights) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._worker = worker
        self._model = worker.model_runner.get_model()
        self._checks = UpdateCheck(expected)
        initialize_layerwise_reload(self._model)

    def take(self, buckets: Iterable[Sequence[tuple[str, Tensor]]], version: int) -> WeightReport:
        tally = WeightTally(buckets)
        for bucket in tally:
            self._model.load_weights(self._admitted(bucket))
            self._keep(bucket)
        return tally.report(version)

    def finish(self, version: int) -> None:
        self._checks.finish(version)
        self._finalize()
        _repack_experts(self._model)
        runner = self._worker.model_runner
        runner.reset_lora_state()
        runner.reset_encoder_cache()
        runner.reset_mm_cache()

    def abandon(self) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        # An incomplete layer keeps its old weights; without this it would get uninitialized memory.
        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        self._finalize()

    def _admitted(self, bucket: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in bucket:
            known = self._checks.admit(name, tensor)
            if known is not None:
                yield known, tensor

    def _keep(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Copy the parts of a bucket that vLLM keeps for incomplete layers, because the bucket's memory is reused.

        For complete layers each rank has already copied its shard from the bucket.
        """
        from torch import Tensor
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        memory = {tensor.untyped_storage().data_ptr() for _, tensor in bucket}
        for layer in self._model.modules():
            for _, call in get_layerwise_info(layer).loaded_weights:
                for name, value in call.arguments.items():
                    if isinstance(value, Tensor) and value.untyped_storage().data_ptr() in memory:
                        call.arguments[name] = value.clone()

    def _finalize(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self._model, self._worker.vllm_config.model_config)
        _repack_heads(self._model)


def _neutralize(model: Any, placeholder_ids: list[int], neutral_id: int) -> None:
    import torch

    embed = model.embed_input_ids

    def embed_without_placeholders(
        input_ids: Tensor, *rest: Any, is_multimodal: Tensor | None = None, **named: Any
    ) -> Tensor:
        wrong = torch.isin(input_ids, input_ids.new_tensor(placeholder_ids))
        if is_multimodal is not None:
            wrong &= ~is_multimodal.to(wrong.device)
        read = torch.where(wrong, neutral_id, input_ids)
        embedded: Tensor = embed(read, *rest, is_multimodal=is_multimodal, **named)
        return embedded

    model.embed_input_ids = embed_without_placeholders


def _repack_heads(model: Any) -> None:
    """Make a tied head compute with the embedding's current weights.

    On a CPU vLLM 0.32 packs a copy of each vocabulary layer's weight when it is loaded, but does not repack a head that
    shares the embedding's weight.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def _repack_experts(model: Any) -> None:
    """Make the layers of a mixture compute with their current weights, of which all were loaded.

    On a CPU vLLM 0.32 packs a mixture's weights when it loads them first, and not when it loads them again.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if isinstance(experts, CPUUnquantizedExperts):
            experts.process_weights_after_loading(module)


def _die_with(owner: int) -> None:
    select.select([owner], [], [])
    os.kill(os.getpid(), signal.SIGKILL)
