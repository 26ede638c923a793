"""The judge of a run: a language model served by replicas, which rewards call."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import threading
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rollcast import build_section
from rollcast.contracts.reward import Judge
from rollcast.contracts.rollout import RolloutMode, RolloutOutput, RolloutRequest, SamplingParams, rollouts
from rollcast.errors import ConfigError
from rollcast_data.chat_template import ChatTemplate
from rollcast_data.tokenizer import encode_texts
from rollcast_serving.engines.arguments import check_device_arguments
from rollcast_serving.negotiation import check_quantization
from rollcast_serving.pools import JUDGE
from rollcast_serving.replicas import Replicas
from rollcast_serving.requests import check_sampling, check_token_ids, configured_sampling
from rollcast_serving.schemas import JudgeConfig
from rollcast_serving.served import ServedRole
from rollcast_serving.shapes import ReplicaShape, check_shape

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ServedJudge", "judge_role", "judge_sampling"]

_SECTION = "judge.rollout"
#: Keys of a rollout that only matter in training: a judge's weights are fixed, and rewards choose the number of
#: replies.
_OF_TRAINING = (
    *(
        "mode",
        "weight_sync",
        "n",
        "val_kwargs",
        "canary",
        "stragglers",
        "update_weights_bucket_megabytes",
        "update_in_flight",
    ),
    *("sync_timeout_s", "sync_folder", "on_long_prompt"),
)


def judge_role(config: JudgeConfig) -> ServedRole | None:
    """Return the role of a run's judge; None if the run has none.

    Raises:
        ConfigError: the model or the rollout is not set, or a key of the rollout does not apply to a judge.
        CapabilityError: the rollout lacks a feature that the judge's settings need.
        PluginError: the rollout does not exist or does not load.
    """
    if not config.enable:
        return None
    if not config.model.path:
        raise ConfigError("judge.enable=true needs judge.model.path, the folder of the judge's model")
    name = config.rollout.get("name")
    if not name:
        raise ConfigError(f"judge.enable=true needs {_SECTION}.name; rollouts: {', '.join(rollouts.names())}")
    for key in _OF_TRAINING:
        if key in config.rollout:
            raise ConfigError(f"{_SECTION}.{key} is not used: the judge's weights are fixed; remove the key")
    rollout_class = rollouts.get(str(name), requested_by=f"{_SECTION}.name")
    sampling = {"temperature": 0.0, **config.rollout, "mode": RolloutMode.STANDALONE.value}
    built: Any = build_section(rollout_class.config_schema, sampling, _SECTION, closed=True)
    capabilities = rollout_class.capabilities
    check_sampling(_SECTION, configured_sampling(built, config.max_tokens), capabilities)
    check_quantization(built, rollout_class, _SECTION)
    check_token_ids(built, config.model.path, _SECTION)
    check_shape(ReplicaShape.of(built), capabilities, str(name), _SECTION)
    check_device_arguments(built, _SECTION)
    return ServedRole(JUDGE, _SECTION, built, rollout_class)


def judge_sampling(config: JudgeConfig, role: ServedRole) -> SamplingParams:
    """Return the default sampling parameters of a reply."""
    return configured_sampling(role.config, config.max_tokens)


class ServedJudge(Judge):
    """A judge that answers through replicas.

    Args:
        generate: answers a request; called on the caller's event loop.
        tokenizer: tokenizer of the judge's model.
        sampling: default sampling parameters of replies.
    """

    def __init__(
        self,
        generate: Callable[[RolloutRequest], Awaitable[RolloutOutput]],
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingParams,
    ) -> None:
        self._generate, self._tokenizer, self._sampling = generate, tokenizer, sampling
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._replies = self._tokens = 0

    @classmethod
    def of_replicas(
        cls,
        replicas: Replicas,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingParams,
        busy: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> ServedJudge:
        """Return a judge over replicas of this process; it can be called from any event loop.

        Args:
            replicas: started replicas.
            tokenizer: tokenizer of the judge's model.
            sampling: default sampling parameters of replies.
            busy: returns a context manager that is entered while a reply is generated.
        """

        async def generate(request: RolloutRequest) -> RolloutOutput:
            with busy():
                return await asyncio.wrap_future(replicas.loop.submit(replicas.manager.generate(request)))

        return cls(generate, tokenizer, sampling)

    async def ask(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
    ) -> str:
        ids = self._encode(messages)
        sampling = replace(
            self._sampling,
            max_tokens=self._sampling.max_tokens if max_tokens is None else max_tokens,
            temperature=self._sampling.temperature if temperature is None else temperature,
        )
        # The seed is derived from the question, so that a resumed run gets the same reply.
        drawn = int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "little") >> 1
        request = RolloutRequest(f"judge-{next(self._numbers)}", ids, sampling, seed=drawn if seed is None else seed)
        output = await self._generate(request)
        (sequence,) = output.sequences
        with self._lock:
            self._replies, self._tokens = self._replies + 1, self._tokens + len(sequence.token_ids)
        return str(self._tokenizer.decode(list(sequence.token_ids), skip_special_tokens=True))

    def take_metrics(self) -> dict[str, float]:
        """Return the number of replies and their mean length in tokens since the last call; empty without replies."""
        with self._lock:
            replies, tokens, self._replies, self._tokens = self._replies, self._tokens, 0, 0
        return {"judge/replies": float(replies), "judge/reply_tokens": tokens / replies} if replies else {}

    def _encode(self, messages: str | Sequence[Mapping[str, Any]]) -> array[int]:
        tokenizer = self._tokenizer
        if isinstance(messages, str):
            return array("i", encode_texts(tokenizer, [messages])[0])
        if tokenizer.chat_template is None:
            return array("i", encode_texts(tokenizer, ["\n".join(str(message["content"]) for message in messages)])[0])
        text = ChatTemplate(tokenizer, "judge.model.path").prompt(messages)
        return array("i", tokenizer(text, add_special_tokens=False)["input_ids"])
