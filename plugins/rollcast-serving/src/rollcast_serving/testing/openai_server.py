"""A scripted rollout and servers in a thread, for :class:`~rollcast_serving.testing.openai_api.OpenAISuite`."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rollcast.contracts.rollout import (
    BaseRollout,
    RolloutCapabilities,
    RolloutOutput,
    RolloutRequest,
    RolloutSequence,
    RolloutSetup,
    SamplingParams,
    WeightReport,
)
from rollcast_serving.requests import ModelLimits, check_request

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ScriptedRollout", "ServedApi", "build_byte_tokenizer", "serve_in_thread"]

_TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{%- endfor -%}
<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def build_byte_tokenizer(folder: Path) -> Any:
    """Write a tokenizer whose tokens are single bytes, with a ChatML template, to a folder; return it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *alphabet])}
    inner = Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast
    tokenizer = fast(
        tokenizer_object=inner,
        eos_token=_SPECIAL[2],
        pad_token=_SPECIAL[0],
        additional_special_tokens=list(_SPECIAL[:2]),
        chat_template=_TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


class ScriptedRollout(BaseRollout):
    """A rollout that replies with given texts, as the contract says: it ends at stops and at ``max_tokens``.

    Args:
        setup: setup of the rollout.
        tokenizer: tokenizer of the texts.

    Attributes:
        texts: texts of the next replies; without any a reply is ``fine``.
        requests: requests so far.
    """

    capabilities: ClassVar[RolloutCapabilities] = RolloutCapabilities(
        seeds=True, sampling=frozenset({"min_p", "repetition_penalty", "logit_bias"})
    )

    def __init__(self, setup: RolloutSetup, tokenizer: Any) -> None:
        super().__init__(setup)
        self._tokenizer = tokenizer
        self.texts: deque[str] = deque()
        self.requests: list[RolloutRequest] = []

    async def generate(self, request: RolloutRequest) -> RolloutOutput:
        check_request(request, ModelLimits(len(self._tokenizer), None), self.capabilities)
        self.requests.append(request)
        await asyncio.sleep(0)
        sequences = [self._sequence(request.sampling) for _ in range(request.sampling.n)]
        return RolloutOutput(request.request_id, sequences, request.sampling)

    def _sequence(self, sampling: SamplingParams) -> RolloutSequence:
        text = self.texts.popleft() if self.texts else "fine"
        ids = [*self._tokenizer.encode(text, add_special_tokens=False), self.setup.eos_token_id]
        stop_ids = self.setup.stop_ids(sampling)
        ends = range(1, len(ids) + 1)
        stopped = next((end for end in ends if ids[end - 1] in stop_ids or self._has_stop(ids[:end], sampling)), None)
        count = min(stopped or len(ids), sampling.max_tokens)
        reason: Any = "stop" if count == stopped else "length"
        log_probs = (-0.5 - np.arange(count) / 1024).astype(np.float32)
        return RolloutSequence(ids[:count], log_probs.tolist(), reason, [0] * count)

    def _has_stop(self, ids: Sequence[int], sampling: SamplingParams) -> bool:
        return any(stop in self._tokenizer.decode(ids) for stop in sampling.stop)

    async def update_weights(
        self, buckets: Iterable[Sequence[tuple[str, Tensor]]], version: int
    ) -> WeightReport:  # nothing sends weights to a script
        raise NotImplementedError


@dataclass(frozen=True)
class ServedApi:
    """A server of OpenAI's API with a scripted rollout behind it.

    Attributes:
        base_url: URL of the API, which ends with ``/v1``.
        api_key: key of the API.
        rollout: rollout behind the server.
        model: name of the model.
    """

    base_url: str
    api_key: str
    rollout: ScriptedRollout
    model: str = "policy"

    def say(self, *texts: str) -> None:
        """Set the texts of the next replies."""
        self.rollout.texts.clear()
        self.rollout.texts.extend(texts)

    @property
    def sampled(self) -> int:
        """Number of requests that the rollout answered."""
        return len(self.rollout.requests)


@contextmanager
def serve_in_thread(serve: Callable[[], AbstractAsyncContextManager[ServedApi]]) -> Iterator[ServedApi]:
    """Run a server in the event loop of a thread, and yield it.

    Args:
        serve: returns an asynchronous context manager that starts the server and ends it.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def enter(manager: AbstractAsyncContextManager[ServedApi]) -> ServedApi:
        return await manager.__aenter__()

    async def leave(manager: AbstractAsyncContextManager[ServedApi]) -> None:
        await manager.__aexit__(None, None, None)

    manager = serve()
    try:
        yield asyncio.run_coroutine_threadsafe(enter(manager), loop).result(60)
    finally:
        asyncio.run_coroutine_threadsafe(leave(manager), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
