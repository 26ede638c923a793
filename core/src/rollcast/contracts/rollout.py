"""Contract of rollout engines, which generate asynchronously: token ids in, token ids out.

Example::

    output = await rollout.generate(RolloutRequest("r0", prompt_ids, SamplingParams(max_tokens=8)))
    output.sequences[0].token_ids, output.sequences[0].log_probs
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from rollcast.contracts.weights import AdapterWeights, WeightReport
from rollcast.errors import CapabilityError
from rollcast.plugins import Registry, subclass_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from rollcast.contracts.engine import BaseEngine

__all__ = [
    "MULTI_MODAL_DATA",
    "ROUTED_EXPERTS",
    "BaseRollout",
    "EngineLoad",
    "EngineNode",
    "EnginePart",
    "RolloutCapabilities",
    "RolloutMode",
    "RolloutOutput",
    "RolloutRequest",
    "RolloutSequence",
    "RolloutSetup",
    "SamplingParams",
    "WeightReport",
    "rollouts",
]

MULTI_MODAL_DATA: Final = "multi_modal_data"
"""Object column of a batch with each row's :attr:`RolloutRequest.multi_modal_data`, or None; only in batches of which a
row has any. The rows of one prompt share one object, which a batch sends once.
"""
ROUTED_EXPERTS: Final = "routed_experts"
"""Column of a batch with the experts that a mixture's routers chose, jagged int16 ``[prompt and response tokens, layers
with experts, experts of a token]``; -1 where there is no choice.
"""


class RolloutMode(Enum):
    """A rollout's placement with respect to the trainer."""

    HYBRID = "hybrid"
    """In the trainer's process or on its devices, taking turns with training."""
    COLOCATED = "colocated"
    """In other processes on the trainer's devices, at the same time as training."""
    STANDALONE = "standalone"
    """On a resource pool of its own."""


@dataclass(frozen=True)
class RolloutCapabilities:
    """Features of a rollout; checked against the engine and the weight sync before the run starts.

    Attributes:
        modes: supported placements.
        in_process: True if the rollout can generate with the engine's own module, in the trainer's process.
        abort: True if requests can be ended early.
        lora: True if adapters can be loaded separately from the model (:meth:`BaseRollout.update_adapter`).
        tensor_parallel: True if several devices of one engine can share each layer.
        pipeline_parallel, data_parallel, expert_parallel: True if ``rollout.pipeline_model_parallel_size``,
            ``data_parallel_size`` or ``expert_parallel_size`` may exceed 1.
        multi_node: True if one engine can span nodes (:meth:`BaseRollout.join`).
        releases_memory: True if :meth:`BaseRollout.release` frees memory.
        seeds: True if a request's seed determines its tokens.
        continuous_batching: True if a new request joins the requests in flight; False if requests are computed in
            batches.
        update_in_flight: True if requests may be in flight during an update, and tokens then carry the version that
            drew them; False if a replica has to finish them first, whatever ``rollout.update_in_flight`` says.
        multi_modal: True if requests may have ``multi_modal_data``.
        routing_replay: True if sequences of a mixture of experts have ``routed_experts`` on request
            (``rollout.enable_rollout_routing_replay``).
        quantization: values of ``rollout.quantization`` with which the rollout computes, and takes weight updates.
        max_world_size: largest number of processes of the rollout's pool; None for no limit.
        sampling: optional fields of :class:`SamplingParams` that the rollout applies: ``min_p``,
            ``repetition_penalty``, ``logit_bias``. A request that sets a field not listed here is rejected.
    """

    modes: frozenset[RolloutMode] = frozenset()
    in_process: bool = False
    abort: bool = False
    lora: bool = False
    tensor_parallel: bool = False
    pipeline_parallel: bool = False
    data_parallel: bool = False
    expert_parallel: bool = False
    multi_node: bool = False
    releases_memory: bool = False
    seeds: bool = False
    continuous_batching: bool = True
    update_in_flight: bool = True
    multi_modal: bool = False
    routing_replay: bool = False
    quantization: frozenset[str] = frozenset()
    max_world_size: int | None = None
    sampling: frozenset[str] = frozenset()


@dataclass(frozen=True)
class EngineLoad:
    """An engine's load at one moment.

    Attributes:
        limit: largest number of sequences that the engine computes at once.
        running: number of sequences being computed.
        waiting: number of queued sequences.
        kv_cache_usage: used fraction of the key-value cache, 0 to 1; 0 if the engine has no cache pool.
        preemptions: number of sequences preempted for lack of cache since the start.
    """

    limit: int
    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    preemptions: int = 0


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request.

    Attributes:
        temperature: divisor of the logits; 0 for greedy.
        top_p: nucleus mass, 1 for all.
        top_k: number of candidates; -1 or 0 for all (verl's key).
        max_tokens: largest number of new tokens.
        stop_token_ids: ids that end generation; the generated stop token stays in the output.
        stop: texts that end generation. The token that completes a stop text is the last token of the output and is
            kept whole, like a stop token, so the output's text contains the stop text and ends with that token's text.
            Text is the tokenizer's decoded text, including special tokens.
        n: number of sequences to generate for the prompt.
        ignore_eos: True to stop only at ``stop_token_ids``, not at the tokenizer's EOS or the model's other stop
            tokens.
        min_p: smallest probability of a candidate, as a fraction of the most likely one's; 0 for all. Applied after
            the temperature, before top-k and top-p.
        repetition_penalty: divisor of the positive logits, and factor of the negative ones, of tokens that the
            prompt or the response already holds; 1 for none. Applied before the temperature.
        logit_bias: pairs of a token id and the number added to its logit, -100 to 100, before the penalty.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    n: int = 1
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def optional(self) -> tuple[str, ...]:
        """Return the names of the fields set here that a rollout must list in ``capabilities.sampling``."""
        off = {"min_p": 0.0, "repetition_penalty": 1.0, "logit_bias": ()}
        return tuple(name for name, value in off.items() if getattr(self, name) != value)


@dataclass(frozen=True)
class RolloutRequest:
    """One prompt to continue.

    Attributes:
        request_id: id chosen by the caller and returned with the output.
        prompt_ids: token ids of the prompt.
        sampling: sampling parameters.
        seed: seed of the request's random numbers, 0 to ``2**63 - 1``; None for the rollout's own stream. With
            ``capabilities.seeds`` the tokens depend only on prompt, sampling, weights and seed, up to rounding.
        multi_modal_data: inputs in addition to the tokens, by modality (verl's name); only for rollouts with
            ``capabilities.multi_modal``. Under ``image`` a tuple of the prompt's images in the order of their
            placeholders, each as the bytes of an image file. ``prompt_ids`` has a placeholder for each token of an
            image. The requests of one prompt share one object.
    """

    request_id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    seed: int | None = None
    multi_modal_data: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class RolloutSequence:
    """One continuation of a prompt.

    Attributes:
        token_ids: new tokens, including the stop token if there was one; engines return int32 arrays, not lists.
        log_probs: log-prob of each token under the distribution it was sampled from (after penalty, bias,
            temperature, min-p, top-k and top-p; for greedy, under the softmax at temperature 1).
        finish_reason: ``stop``, ``length`` or ``abort``.
        weight_versions: version of the weights that computed each token.
        routed_experts: experts that the routers chose for each token of the prompt and of the sequence, int16
            ``[tokens, layers with experts, experts of a token]``, -1 for a last token that was not read; None if they
            were not recorded.
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: Literal["stop", "length", "abort"]
    weight_versions: Sequence[int]
    routed_experts: NDArray[np.int16] | None = None


@dataclass(frozen=True)
class RolloutOutput:
    """The ``n`` sequences of a request, with the sampling parameters that their log-probs refer to."""

    request_id: str
    sequences: Sequence[RolloutSequence]
    sampling: SamplingParams


@dataclass(frozen=True)
class EngineNode:
    """A node's place in an engine.

    Attributes:
        rank: number of the node; the rollout is on node 0, and the others have an :class:`EnginePart`.
        nodes: number of nodes, each with the same number of devices.
        host: address of this node.
        address: address of node 0.
        port: port of node 0 on which the engine's processes meet; 0 if the engine has one node.
    """

    rank: int = 0
    nodes: int = 1
    host: str = "127.0.0.1"
    address: str = "127.0.0.1"
    port: int = 0


@dataclass(frozen=True)
class RolloutSetup:
    """Constructor arguments of a rollout.

    Attributes:
        config: ``rollout`` section of the config, an instance of the rollout's ``config_schema``, which derives from
            :class:`~rollcast.contracts.sections.RolloutConfig`.
        model_path: Hugging Face folder of the model and tokenizer.
        seed: seed of the sampler; differs between ranks and replicas.
        pad_token_id, eos_token_id: padding and EOS ids of the tokenizer.
        stop_token_ids: ids that end every response, such as those of the model's ``generation_config.json``.
        trust_remote_code: allow the folder's own Python code.
        node: this process's place in the engine.
    """

    config: Any
    model_path: str
    seed: int
    pad_token_id: int
    eos_token_id: int
    stop_token_ids: tuple[int, ...] = ()
    trust_remote_code: bool = False
    node: EngineNode = EngineNode()

    def stop_ids(self, sampling: SamplingParams) -> tuple[int, ...]:
        """Return the ids that end a request's sequences, without duplicates: the request's, then the model's."""
        own = () if sampling.ignore_eos else (self.eos_token_id, *self.stop_token_ids)
        return tuple(dict.fromkeys((*sampling.stop_token_ids, *own)))


class EnginePart(ABC):
    """The processes of an engine on a node other than its first; see :meth:`BaseRollout.join`."""

    @abstractmethod
    def check_health(self) -> None:
        """Check that the processes run; called every second.

        Raises:
            RolloutError: one has ended.
        """

    @abstractmethod
    def close(self) -> None:
        """End the processes."""


class BaseRollout(ABC):
    """Base class of rollouts, each of which is one engine that generates."""

    capabilities: ClassVar[RolloutCapabilities] = RolloutCapabilities()
    #: Dataclass of the ``rollout`` config section; importable without torch.
    config_schema: ClassVar[type]

    def __init__(self, setup: RolloutSetup) -> None:
        self.setup = setup

    @classmethod
    def environment(cls, config: Any) -> dict[str, str]:  # noqa: ARG003  # for subclasses
        """Return environment variables that the rollout's process needs at its start.

        A launcher sets those that are set neither in its own environment nor in ``config.replica.env``. Do not
        import the engine's library here: it may not be installed in the launcher's environment.
        """
        return {}

    @classmethod
    def weight_dtype(cls, config: Any, model_path: str, device: str) -> str | None:  # noqa: ARG003  # for subclasses
        """Return torch's name of the dtype of the engine's weights, such as ``bfloat16``; None if unknown.

        A weight sync casts to this dtype before it sends, so it must be the dtype to which :meth:`update_weights`
        would convert. Do not import the engine's library here.

        Args:
            config: the ``rollout`` section, an instance of ``config_schema``.
            model_path: Hugging Face folder of the model.
            device: ``placement.device``, the kind of device on which the rollout runs.
        """
        return None

    @classmethod
    def join(cls, setup: RolloutSetup) -> EnginePart:
        """Start this node's part of an engine whose first node has the rollout; return once it has joined the engine.

        Called on nodes with ``setup.node.rank`` above 0, while the rollout is built on node 0. If a part or the rollout
        ends, the launcher ends the whole replica.

        Raises:
            CapabilityError: the rollout lacks ``capabilities.multi_node``.
            RolloutError: the part did not start.
        """
        raise CapabilityError(f"{cls.__name__} cannot span the {setup.node.nodes} nodes of the replica")

    @abstractmethod
    async def generate(self, request: RolloutRequest) -> RolloutOutput:
        """Continue one prompt; many calls may be in flight at once.

        Raises:
            RequestError: the request cannot be served (empty prompt, prompt too long, unknown token id).
            CapabilityError: the request needs a feature that the rollout lacks, such as multi-modal data.
            RolloutError: the engine died; raised for every request in flight. A replica then calls
                :meth:`check_health`, and counts as dead if that fails.
        """

    @abstractmethod
    async def update_weights(self, buckets: Iterable[Sequence[tuple[str, Tensor]]], version: int) -> WeightReport:
        """Load all weights of the model, bucket by bucket; tokens sampled from now on carry ``version``.

        Requests may be in flight. Each token must be drawn from the weights whose version it carries, given all
        tokens before it, so a key-value cache computed with other weights must not be reused; the rollout may pause
        or recompute such requests. A previously loaded adapter is dropped.

        Args:
            buckets: iterable of buckets, to be consumed once. A bucket's tensors are valid until the next bucket. An
                engine with its own processes may pickle the iterable and consume it there.
            version: version of the new weights.

        Raises:
            WeightSyncError: a tensor is corrupt, unknown or missing; names the tensor. :meth:`generate` raises this
                error too until an update succeeds.
        """

    async def update_adapter(self, adapter: AdapterWeights, version: int) -> WeightReport:
        """Load a LoRA adapter, replacing the previous one.

        Raises:
            CapabilityError: the rollout lacks ``capabilities.lora``.
        """
        raise CapabilityError(f"{type(self).__name__} takes no adapters")

    async def check_health(self) -> None:
        """Check that the engine can serve requests.

        Raises:
            RolloutError: the engine is dead or hangs; chains the cause if known.
        """
        return

    async def report_load(self) -> EngineLoad:
        """Return the engine's load; callers keep at most ``limit`` sequences in flight, fewer if the cache is full.

        The default implementation is for engines that do not report their load.
        """
        return EngineLoad(limit=256)

    def bind_engine(self, engine: BaseEngine, version: int) -> WeightReport:
        """Generate with the engine's own module from now on.

        Raises:
            CapabilityError: the rollout lacks ``capabilities.in_process``.
        """
        raise CapabilityError(f"{type(self).__name__} does not generate in the trainer's process")

    def generating(self) -> AbstractContextManager[None]:
        """Return a context in which a rank may call :meth:`generate` independently of the other ranks.

        For rollouts with ``capabilities.in_process``. All ranks must enter the context together, because the engine
        may have to gather its weights. Outside the context, all ranks must call :meth:`generate` for the same number
        of batches.
        """
        return nullcontext()

    async def release(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Free the device memory named by ``tags``; do nothing if the rollout holds none."""
        return

    async def resume(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Allocate the device memory named by ``tags`` again."""
        return

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End requests early; each returns the tokens sampled so far.

        Args:
            request_ids: ids of the requests; None for all.

        Raises:
            CapabilityError: the rollout lacks ``capabilities.abort``.
        """
        raise CapabilityError(f"{type(self).__name__} cannot abort requests")

    def state_dict(self) -> dict[str, Any]:
        """Return the random state, which is needed to sample the same tokens after a restart."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore state returned by :meth:`state_dict`."""
        return

    def close(self) -> None:
        """Stop all threads and processes of the rollout; called once."""
        return


rollouts: Registry[type[BaseRollout]] = Registry(
    "rollcast.rollouts", subclass_of(BaseRollout), "rollout.name", description="generation backends"
)
