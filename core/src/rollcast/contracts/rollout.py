"""Contract of rollout engines: token ids in, token ids out, asynchronous.

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
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rollcast.contracts.weights import AdapterWeights, WeightReport
from rollcast.errors import CapabilityError
from rollcast.plugins import Registry, subclass_of

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast.contracts.engine import BaseEngine

__all__ = [
    "BaseRollout",
    "EngineLoad",
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


class RolloutMode(Enum):
    """Placement of a rollout with respect to the trainer."""

    HYBRID = "hybrid"
    """In the trainer's own process or on its own devices, taking turns."""
    COLOCATED = "colocated"
    """In another process on the trainer's placement group."""
    STANDALONE = "standalone"
    """On a resource pool of its own."""


@dataclass(frozen=True)
class RolloutCapabilities:
    """Features of a rollout; checked against engine and weight sync before anything starts.

    Attributes:
        modes: supported placements.
        in_process: can generate with the engine's own module, in the trainer's process.
        abort: can end requests early.
        prefix_caching: reuses the cache of a common prefix.
        lora: takes adapters apart from the model (:meth:`BaseRollout.update_adapter`).
        tensor_parallel: one engine can use several devices.
        releases_memory: :meth:`BaseRollout.release` frees memory.
        seeds: a request's own seed decides its tokens.
        continuous_batching: a request joins those in flight; otherwise requests are computed in batches.
        multi_modal: takes requests with ``multi_modal_data``.
        max_world_size: largest number of processes of the pool it runs in; None for any.
        sampling: optional fields of :class:`SamplingParams` that the rollout applies: ``min_p``,
            ``repetition_penalty``, ``logit_bias``. A request that sets another one is refused.
    """

    modes: frozenset[RolloutMode] = frozenset()
    in_process: bool = False
    abort: bool = False
    prefix_caching: bool = False
    lora: bool = False
    tensor_parallel: bool = False
    releases_memory: bool = False
    seeds: bool = False
    continuous_batching: bool = True
    multi_modal: bool = False
    max_world_size: int | None = None
    sampling: frozenset[str] = frozenset()


@dataclass(frozen=True)
class EngineLoad:
    """Load of an engine at one moment.

    Attributes:
        limit: number of sequences that the engine computes at once, at most.
        running: number of sequences that it computes now.
        waiting: number of sequences in its queue.
        kv_cache_usage: fraction of the key-value cache that sequences hold, 0 to 1; 0 where the engine has no pool.
        preemptions: number of sequences taken out of computation for lack of cache, since the start.
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
        stop_token_ids: ids that end generation; the one generated stays in the output.
        stop: texts that end generation. The token that completes one is the last of the output and stays whole, as a
            stop token does, so that the output's text contains the stop and ends in that token's text. Text is the
            tokenizer's, special tokens included.
        n: sequences for the prompt.
        ignore_eos: stop at ``stop_token_ids`` alone, not at the tokenizer's EOS and the model's other stop tokens.
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
        """Return the fields set here that a rollout needs ``capabilities.sampling`` for."""
        off = {"min_p": 0.0, "repetition_penalty": 1.0, "logit_bias": ()}
        return tuple(name for name, value in off.items() if getattr(self, name) != value)


@dataclass(frozen=True)
class RolloutRequest:
    """One prompt to continue.

    Attributes:
        request_id: caller's id, returned with the output.
        prompt_ids: token ids of the prompt.
        sampling: sampling parameters.
        seed: seed of the request's random numbers, 0 to ``2**63 - 1``; None for the rollout's own stream. With
            ``capabilities.seeds`` the tokens depend only on prompt, sampling, weights and seed, up to rounding.
        multi_modal_data: inputs beside the tokens by modality, such as ``{"image": [...]}`` (verl's name); only
            for rollouts with ``capabilities.multi_modal``.
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
        token_ids: new tokens, with the stop token if there was one; engines return arrays (int32), not lists.
        log_probs: log-prob of each token under the distribution it was sampled from (after penalty, bias,
            temperature, min-p, top-k and top-p; for greedy, under the softmax at temperature 1).
        finish_reason: ``stop``, ``length`` or ``abort``.
        weight_versions: version of the weights that each token was computed with.
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: Literal["stop", "length", "abort"]
    weight_versions: Sequence[int]


@dataclass(frozen=True)
class RolloutOutput:
    """The ``n`` sequences of a request, and the sampling that their log-probs refer to."""

    request_id: str
    sequences: Sequence[RolloutSequence]
    sampling: SamplingParams


@dataclass(frozen=True)
class RolloutSetup:
    """Arguments that a rollout is built from.

    Attributes:
        config: config's ``rollout`` section, an instance of the rollout's ``config_schema``, which derives from
            :class:`~rollcast.contracts.sections.RolloutConfig`.
        model_path: Hugging Face folder of the model and tokenizer.
        seed: seed of the sampler; differs between ranks and replicas.
        pad_token_id, eos_token_id: tokenizer's ids.
        stop_token_ids: ids that end every response, such as those of the model's ``generation_config.json``.
    """

    config: Any
    model_path: str
    seed: int
    pad_token_id: int
    eos_token_id: int
    stop_token_ids: tuple[int, ...] = ()

    def stop_ids(self, sampling: SamplingParams) -> tuple[int, ...]:
        """Return the ids that end a request's sequences, each once: the request's, then the model's."""
        own = () if sampling.ignore_eos else (self.eos_token_id, *self.stop_token_ids)
        return tuple(dict.fromkeys((*sampling.stop_token_ids, *own)))


class BaseRollout(ABC):
    """One engine that generates."""

    capabilities: ClassVar[RolloutCapabilities] = RolloutCapabilities()
    #: Dataclass of the ``rollout`` config section; importable without torch.
    config_schema: ClassVar[type]

    def __init__(self, setup: RolloutSetup) -> None:
        self.setup = setup

    @classmethod
    def environment(cls, config: Any) -> dict[str, str]:  # noqa: ARG003  # for subclasses
        """Return environment variables that the rollout's process needs from its start.

        A launcher sets those that neither its own environment nor ``config.replica.env`` has. The engine's
        library must not be imported here: the launcher's environment may lack it.
        """
        return {}

    @classmethod
    def weight_dtype(cls, config: Any, model_path: str, device: str) -> str | None:  # noqa: ARG003  # for subclasses
        """Return torch's name of the dtype that the engine holds weights in, such as ``bfloat16``; None if not known.

        A weight sync casts to it before it sends, so it has to be the dtype to which :meth:`update_weights` would
        convert. The engine's library must not be imported here.

        Args:
            config: the ``rollout`` section, an instance of ``config_schema``.
            model_path: Hugging Face folder of the model.
            device: ``placement.device``, the kind of device that the rollout runs on.
        """
        return None

    @abstractmethod
    async def generate(self, request: RolloutRequest) -> RolloutOutput:
        """Continue one prompt; many calls may be in flight at once.

        Raises:
            RequestError: the request cannot be served (empty prompt, no room, unknown token id).
            CapabilityError: the request asks for a feature that the rollout lacks, such as multi-modal data.
            RolloutError: the engine died; requests in flight are not answered otherwise. A replica then asks
                :meth:`check_health`, and is dead if that fails.
        """

    @abstractmethod
    async def update_weights(self, buckets: Iterable[Sequence[tuple[str, Tensor]]], version: int) -> WeightReport:
        """Load a whole model, bucket by bucket; tokens from now on carry ``version``.

        Requests may be in flight. Each of their tokens must be drawn from the weights whose version it carries,
        given all tokens before it, so a key-value cache of other weights must not be reused; the rollout may pause
        or recompute such requests. An adapter that was loaded before is dropped.

        Args:
            buckets: iterable to consume once. A bucket's tensors are valid until the next bucket. An engine with
                processes of its own may pickle it and consume it there.
            version: version to report from now on.

        Raises:
            WeightSyncError: a tensor is corrupt, unknown or missing; names it. :meth:`generate` raises it too
                until an update succeeds.
        """

    async def update_adapter(self, adapter: AdapterWeights, version: int) -> WeightReport:
        """Load a LoRA adapter in place of the previous one; CapabilityError without ``capabilities.lora``."""
        raise CapabilityError(f"{type(self).__name__} takes no adapters")

    async def check_health(self) -> None:
        """Return if the engine can serve; RolloutError, with the cause if known, if it is dead or hangs."""
        return

    async def report_load(self) -> EngineLoad:
        """Return the engine's load; callers keep no more than its ``limit`` in flight, less when the cache is short.

        The default is for an engine that says nothing of itself.
        """
        return EngineLoad(limit=256)

    def bind_engine(self, engine: BaseEngine, version: int) -> WeightReport:
        """Generate with the engine's own module from now on; CapabilityError without ``capabilities.in_process``."""
        raise CapabilityError(f"{type(self).__name__} does not generate in the trainer's process")

    def generating(self) -> AbstractContextManager[None]:
        """Return a context in which each rank may call :meth:`generate` as often as it likes, whatever the others do.

        For rollouts with ``capabilities.in_process``, whose engine may have to gather its weights: all ranks enter
        together. Outside of it, all ranks call :meth:`generate` for equally many batches.
        """
        return nullcontext()

    async def release(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Free the named memory; without effect for a rollout that holds none."""
        return

    async def resume(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Allocate the named memory again."""
        return

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End the requests (None for all) with the tokens so far; CapabilityError without ``capabilities.abort``."""
        raise CapabilityError(f"{type(self).__name__} cannot abort requests")

    def state_dict(self) -> dict[str, Any]:
        """Return the state that sampling the same tokens after a restart needs (random state)."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        return

    def close(self) -> None:
        """Stop what the rollout started; called once."""
        return


rollouts: Registry[type[BaseRollout]] = Registry(
    "rollcast.rollouts", subclass_of(BaseRollout), "rollout.name", description="generation backends"
)
