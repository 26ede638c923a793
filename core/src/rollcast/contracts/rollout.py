"""The contract of rollout engines: token ids in, token ids out, asynchronous.

Example::

    output = await rollout.generate(RolloutRequest("r0", prompt_ids, SamplingParams(max_tokens=8)))
    output.sequences[0].token_ids, output.sequences[0].log_probs
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rollcast.contracts.weights import AdapterWeights, WeightReport
from rollcast.plugins import Registry, subclass_of

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast.contracts.engine import BaseEngine

__all__ = [
    "BaseRollout",
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
    """Where a rollout runs with respect to the trainer."""

    HYBRID = "hybrid"
    """In the trainer's own process or on its own devices, taking turns."""
    COLOCATED = "colocated"
    """In another process on the trainer's placement group."""
    STANDALONE = "standalone"
    """On a resource pool of its own."""


@dataclass(frozen=True)
class RolloutCapabilities:
    """What a rollout can do; compared with the engine's and the sync's before anything starts.

    Attributes:
        modes: where it can run.
        in_process: it can generate with the engine's own module, in the trainer's process.
        abort: requests can be ended early.
        prefix_caching: the cache of a prompt's beginning is used again.
        lora: it takes adapters apart from the model (:meth:`BaseRollout.update_adapter`).
        tensor_parallel: one engine can use several devices.
        releases_memory: :meth:`BaseRollout.release` gives memory back.
        seeds: a request's own seed decides its tokens.
        continuous_batching: a request joins those that are under way; else they are computed in batches,
            which are the better for being sent together.
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


@dataclass(frozen=True)
class SamplingParams:
    """How to sample.

    Attributes:
        temperature: 0 for greedy.
        top_p: nucleus mass, 1 for all.
        top_k: number of candidates; -1 or 0 for all (verl's key).
        max_tokens: largest number of new tokens.
        stop_token_ids: generation ends after one of these, which stays in the output.
        n: sequences for the one prompt.
        ignore_eos: do not stop at the tokenizer's EOS.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    ignore_eos: bool = False


@dataclass(frozen=True)
class RolloutRequest:
    """One prompt to continue; ``request_id`` is the caller's and comes back with the output.

    Attributes:
        seed: of the request's random numbers, 0 to ``2**63 - 1``. Where ``capabilities.seeds`` is set, its
            tokens then follow from prompt, sampling, weights and seed, up to rounding: not from what else
            is under way, or on which replica. None for the rollout's own stream.
    """

    request_id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    seed: int | None = None


@dataclass(frozen=True)
class RolloutSequence:
    """One continuation.

    Attributes:
        token_ids: the new tokens, with the stop token if there was one.
        log_probs: of each token under the distribution that it was sampled from (after
            temperature, top-k and top-p; for greedy, under the plain softmax at temperature 1).
        finish_reason: ``stop``, ``length`` or ``abort``.
        weight_versions: the version of the weights that each token came from.
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
    """Everything a rollout is built from.

    Attributes:
        config: the config's ``rollout`` section, an instance of its ``config_schema``, which derives from
            :class:`~rollcast.config.rollout.RolloutConfig`.
        model_path: Hugging Face folder of the model and tokenizer.
        seed: of the sampler; differs from rank to rank and from replica to replica.
        pad_token_id, eos_token_id: the tokenizer's.
    """

    config: Any
    model_path: str
    seed: int
    pad_token_id: int
    eos_token_id: int


class BaseRollout(ABC):
    """One engine that generates."""

    capabilities: ClassVar[RolloutCapabilities] = RolloutCapabilities()
    #: Dataclass of the ``rollout`` config section; importable without torch.
    config_schema: ClassVar[type]

    def __init__(self, setup: RolloutSetup) -> None:
        self.setup = setup

    @classmethod
    def environment(cls, config: Any) -> dict[str, str]:  # noqa: ARG003  # for those that override it
        """Environment variables that the rollout's process needs from its start.

        A launcher sets those that neither it nor ``config.replica.env`` has. May not import the engine's
        library, which the launcher's environment need not have.

        Args:
            config: an instance of ``config_schema``.
        """
        return {}

    @abstractmethod
    async def generate(self, request: RolloutRequest) -> RolloutOutput:
        """Continue one prompt; many calls may be under way at once.

        Raises:
            RollcastError: the request cannot be served (empty prompt, no room, unknown token id).
            RolloutError: the engine died; a request that was under way is not answered otherwise.
        """

    @abstractmethod
    async def update_weights(self, buckets: Iterable[Sequence[tuple[str, Tensor]]], version: int) -> WeightReport:
        """Load new weights, bucket by bucket; tokens from now on carry ``version``.

        May be called while requests are under way. Each of their tokens has to be drawn from the
        distribution of the weights whose version it carries, given everything before it: a cache of keys
        and values from other weights must not be used on. Whether running requests are held up or
        computed anew is the rollout's own affair. The weights are the whole model: an adapter that was
        loaded before is gone.

        Args:
            buckets: to go through once, with :class:`~rollcast.contracts.weights.WeightTally`. A bucket's
                tensors are valid until the next one is asked for. An engine with processes of its own
                may pickle it and go through it there, by
                :meth:`~rollcast.contracts.weights.BucketsForReaders.for_reader` where it has that.
            version: what the rollout has to report from now on.

        Raises:
            WeightSyncError: a tensor is not what was sent, not the model's, or did not come; names it.
                Until an update succeeds :meth:`generate` raises it too.
        """

    async def update_adapter(self, adapter: AdapterWeights, version: int) -> WeightReport:
        """Load a LoRA adapter, in place of the one before; the base weights stay.

        Raises:
            CapabilityError: the rollout cannot (``capabilities.lora`` is False).
        """
        from rollcast.errors import CapabilityError

        raise CapabilityError(f"{type(self).__name__} takes no adapters")

    async def check_health(self) -> None:
        """Return while the engine can serve.

        Raises:
            RolloutError: it is dead or hangs; says what is known of the cause.
        """
        return

    def bind_engine(self, engine: BaseEngine, version: int) -> WeightReport:
        """Generate with the engine's own module from now on (HYBRID without a copy).

        Raises:
            CapabilityError: the rollout cannot (``capabilities.in_process`` is False).
        """
        from rollcast.errors import CapabilityError

        raise CapabilityError(f"{type(self).__name__} does not generate in the trainer's process")

    async def release(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Give the named memory back; a rollout without any of its own does nothing."""
        return

    async def resume(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take the named memory again."""
        return

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End the requests (all for None) now; they come back with what they have.

        Raises:
            CapabilityError: the rollout cannot (``capabilities.abort`` is False).
        """
        from rollcast.errors import CapabilityError

        raise CapabilityError(f"{type(self).__name__} cannot abort requests")

    def state_dict(self) -> dict[str, Any]:
        """What must come back after a restart to sample the same tokens (RNG state)."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
        return

    def close(self) -> None:
        """Stop what was started; called once."""
        return


rollouts: Registry[type[BaseRollout]] = Registry(
    "rollcast.rollouts", subclass_of(BaseRollout), "rollout.name", description="generation backends"
)
