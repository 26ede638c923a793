"""The recorder between agents and engines: it records every context of a rollout, token by token."""

from __future__ import annotations

import asyncio
import bisect
import itertools
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rollcast.contracts.rollout import RolloutOutput, RolloutRequest, RolloutSequence, SamplingParams
from rollcast.errors import RolloutError, SessionEnded
from rollcast_agents.chat import as_chat, key_of
from rollcast_agents.contracts.renderer import BaseRenderer, Message
from rollcast_agents.contracts.session import Budget, Reply, Session
from rollcast_agents.contracts.trajectory import End, Segment, Tokens, Trajectory, VersionRun
from rollcast_agents.shown import read_reply
from rollcast_data.chat_template import ChatMessage, ToolSchema, join_replies
from rollcast_serving.openai_format import cut_stop_token

__all__ = ["Generate", "RecordingSession"]

#: Sends a request to an engine; requests of one session go to one replica.
Generate = Callable[[RolloutRequest], Awaitable[RolloutOutput]]

_SEEDS = 2**63


@dataclass(eq=False)
class _Leaf:
    """A context that can be extended: its exact ids, and the conversation that they represent."""

    ids: Tokens
    segments: list[Segment]
    end: End | None = None
    #: Keys of each message; a reply has one for each form in which it may be repeated.
    keys: list[frozenset[tuple[object, ...]]] = field(default_factory=list)
    tools: Sequence[ToolSchema] = ()

    def continues_with(self, keys: Sequence[tuple[object, ...]]) -> bool:
        """True if a conversation begins with this one and has further messages."""
        return 0 < len(self.keys) < len(keys) and all(key in forms for key, forms in zip(keys, self.keys, strict=False))


@dataclass(frozen=True, eq=False)
class _Prompt:
    """A call's context, with its conversation if it was given as messages."""

    ids: Tokens
    keys: list[tuple[object, ...]]
    tools: Sequence[ToolSchema]
    #: Last message of the conversation if it is the assistant's, which the reply continues.
    prefill: ChatMessage | None = None


class RecordingSession(Session):
    """A session that samples through one renderer and engine, and records what the engine returned.

    Args:
        session_id: id of the rollout.
        group_id: prompt that the rollout belongs to.
        generate: sends a request to the engine.
        renderer: renderer of the model.
        sampling: default sampling parameters of a reply.
        budget: limits of the rollout.
        max_model_len: maximum tokens of the engine's context; None if unknown.
        seed: seed of the rollout, from which each reply's seed is derived; None for the engine's stream.
    """

    def __init__(
        self,
        session_id: str,
        *,
        group_id: str,
        generate: Generate,
        renderer: BaseRenderer,
        sampling: SamplingParams,
        budget: Budget | None = None,
        max_model_len: int | None = None,
        seed: int | None = None,
    ) -> None:
        self._id, self._group = session_id, group_id
        self._generate, self._renderer, self._sampling = generate, renderer, sampling
        self._budget = budget or Budget()
        limits = [limit for limit in (self._budget.max_total_tokens, max_model_len) if limit is not None]
        self._limit = min(limits, default=None)
        self._seed = seed
        self._deadline = None if self._budget.timeout_s is None else time.monotonic() + self._budget.timeout_s
        self._leaves: list[_Leaf] = []
        self._started = itertools.count()
        self._turns = self._reserved = self._waiting = self._forks = 0
        self._call_ids: set[str] = set()
        self._end: End | None = None
        self._messages: Sequence[ChatMessage] = ()
        self._metrics: Callable[[], Mapping[str, float]] | None = None

    # ---- state ----

    @property
    def session_id(self) -> str:
        return self._id

    @property
    def group_id(self) -> str:
        """Prompt that the rollout belongs to."""
        return self._group

    @property
    def sampling(self) -> SamplingParams:
        """Default sampling parameters of a reply."""
        return self._sampling

    @property
    def turns(self) -> int:
        return self._turns

    @property
    def is_waiting(self) -> bool:
        """True while a reply is being sampled."""
        return self._waiting > 0

    @property
    def forks(self) -> int:
        """Number of contexts besides the first one."""
        return self._forks

    @property
    def end(self) -> End | None:
        if self._end is None and self._deadline is not None and time.monotonic() >= self._deadline:
            self._end = "timeout"
        return self._end

    @property
    def messages(self) -> Sequence[ChatMessage]:
        """Conversation so far: the loop's if the session follows it, else the last request's."""
        return self._messages

    def metrics(self) -> dict[str, float]:
        """Return the loop's metrics so far; empty if the session does not follow it."""
        return {} if self._metrics is None else dict(self._metrics())

    def follow(self, messages: Sequence[ChatMessage], metrics: Callable[[], Mapping[str, float]]) -> None:
        self._messages, self._metrics = messages, metrics

    def close(self, end: End) -> None:
        """Refuse further calls, with this reason."""
        self._end = self._end or end

    def trajectories(self) -> list[Trajectory]:
        return [
            Trajectory(tuple(leaf.segments), self._group, self._id, leaf.end or self._end or "done")
            for leaf in self._leaves
        ]

    # ---- sampling ----

    async def sample(
        self,
        prompt: Sequence[ChatMessage] | Tokens,
        tools: Sequence[ToolSchema] = (),
        sampling: SamplingParams | None = None,
    ) -> Reply:
        self._refuse_if_ended()
        context = self._context(prompt, tools)
        said = () if isinstance(prompt, np.ndarray) else prompt
        if self._metrics is None and len(said):
            self._messages = list(said)
        params = self._fitted(sampling or self._sampling, len(context.ids))
        turn = next(self._started)
        self._reserved += 1
        try:
            output = await self._ask(
                RolloutRequest(f"{self._id}/{turn}", array("i", context.ids.tobytes()), params, self._seed_of(turn))
            )
        except BaseException:
            self._reserved -= 1
            raise
        reply = self._record(context, self._cut(_only(output), params.stop), params)
        if self._metrics is None and len(said):
            self._messages = [*said, as_chat(reply.message)]
        return reply

    def _cut(self, sequence: RolloutSequence, stops: Sequence[str]) -> RolloutSequence:
        """Return the sequence up to the token that completes a stop string."""
        if not any(stop in self._renderer.decode(np.asarray(sequence.token_ids, np.int32)) for stop in stops):
            return sequence
        ids = np.asarray(sequence.token_ids, np.int32)
        count = bisect.bisect_left(
            range(len(ids)), True, key=lambda end: any(stop in self._renderer.decode(ids[:end]) for stop in stops)
        )
        part = slice(0, count)
        routed = sequence.routed_experts
        return replace(
            sequence,
            routed_experts=None if routed is None else routed[: len(routed) - len(ids) + count],
            token_ids=sequence.token_ids[part],
            log_probs=sequence.log_probs[part],
            weight_versions=sequence.weight_versions[part],
            finish_reason="stop",
        )

    def _refuse_if_ended(self) -> None:
        if self.end is not None:
            raise SessionEnded(f"session {self._id} has ended: {self._end}", self._end or "aborted")
        limit = self._budget.max_assistant_turns
        if limit is not None and self._reserved >= limit:
            # Not set at the last allowed reply: a loop that needs no further reply ends by itself.
            self._end = "max_turns"
            raise SessionEnded(f"session {self._id} has had its {limit} replies", "max_turns")

    def _fitted(self, sampling: SamplingParams, used: int) -> SamplingParams:
        room = sampling.max_tokens if self._limit is None else self._limit - used
        if room < 1:
            self._end = "length"
            raise SessionEnded(
                f"session {self._id}: a context of {used} tokens leaves no room for a reply within {self._limit}",
                "length",
            )
        most = min(sampling.max_tokens, self._budget.max_response_length or sampling.max_tokens, room)
        stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *self._renderer.stop_token_ids)))
        return replace(sampling, max_tokens=most, stop_token_ids=stops, n=1)

    def _seed_of(self, turn: int) -> int | None:
        if self._seed is None:
            return None
        return int(np.random.SeedSequence([self._seed, turn]).generate_state(1, np.uint64)[0]) % _SEEDS

    async def _ask(self, request: RolloutRequest) -> RolloutOutput:
        left = None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)
        self._waiting += 1
        try:
            async with asyncio.timeout(left):
                return await self._generate(request)
        except TimeoutError:
            if self.end != "timeout":
                raise  # a timeout of the engine itself
            raise SessionEnded(f"session {self._id} passed its {self._budget.timeout_s:g} s", "timeout") from None
        finally:
            self._waiting -= 1

    # ---- contexts ----

    def _context(self, prompt: Sequence[ChatMessage] | Tokens, tools: Sequence[ToolSchema]) -> _Prompt:
        if isinstance(prompt, np.ndarray):
            return _Prompt(prompt.astype(np.int32, copy=False), [], tools)
        messages = join_replies(prompt)
        keys = [key_of(message) for message in messages]
        leaf = self._leaf_of(keys, tools)
        ids = self._renderer.extend(leaf.ids, prompt, tools) if leaf is not None else None
        if ids is None:
            ids = self._renderer.start(prompt, tools)
        prefill = messages[-1] if messages and messages[-1].get("role") == "assistant" else None
        return _Prompt(np.asarray(ids, np.int32), keys, tools, prefill)

    def _leaf_of(self, keys: list[tuple[object, ...]], tools: Sequence[ToolSchema]) -> _Leaf | None:
        """Return the leaf with the longest conversation that these messages continue."""
        leaves = [leaf for leaf in self._leaves if leaf.continues_with(keys) and leaf.tools == tools]
        return max(leaves, key=lambda leaf: len(leaf.keys), default=None)

    def _record(self, context: _Prompt, sequence: RolloutSequence, sampling: SamplingParams) -> Reply:
        tokens = np.asarray(sequence.token_ids, np.int32)
        log_probs = np.asarray(sequence.log_probs, np.float32)
        # Looked up only now: calls of one session may end in another order than they began.
        leaf = next((candidate for candidate in self._leaves if _begins_with(context.ids, candidate.ids)), None)
        length = 0 if leaf is None else len(leaf.ids)
        if leaf is None:
            self._forks += bool(self._leaves)
            leaf = _Leaf(context.ids, [])
            self._leaves.append(leaf)
        turn = self._turns
        self._turns += 1
        routed, start = sequence.routed_experts, len(context.ids)
        if routed is not None and leaf.segments:
            leaf.segments[-1] = _read_to_end(leaf.segments[-1], routed[length - 1])
        if length < start:
            routes = None if routed is None else routed[length:start]
            leaf.segments.append(Segment(context.ids[length:], sampled=False, turn=turn, routed_experts=routes))
        own = None if routed is None else routed[start:]
        leaf.segments.append(Segment(tokens, True, turn, log_probs, _runs(sequence.weight_versions), own))
        leaf.ids = np.concatenate([context.ids, tokens])
        ends = set(sampling.stop_token_ids) - set(self._renderer.stop_token_ids)
        parsed = self._renderer.parse(cut_stop_token(tokens, sequence.finish_reason, ends), context.tools)
        message = self._with_call_ids(parsed)
        forms = read_reply(self._renderer, message, tokens, sequence.finish_reason, sampling).forms()
        leaf.keys = _keys_after(context, [as_chat(form) for form in forms])
        leaf.tools = context.tools
        leaf.end = {"stop": None, "length": "length", "abort": "aborted"}[sequence.finish_reason]
        return Reply(message, context.ids, tokens, log_probs, sequence.finish_reason, leaf.end or self._end)

    def _with_call_ids(self, message: Message) -> Message:
        """Return a message whose calls have ids that no other call of the session has; the model may write ids."""
        calls = []
        for call in message.tool_calls:
            new = (f"call_{number}" for number in itertools.count(len(self._call_ids)))
            call_id = next(name for name in itertools.chain([call.call_id], new) if name and name not in self._call_ids)
            self._call_ids.add(call_id)
            calls.append(replace(call, call_id=call_id))
        return replace(message, tool_calls=tuple(calls))


def _keys_after(context: _Prompt, forms: Sequence[ChatMessage]) -> list[frozenset[tuple[object, ...]]]:
    """Return the keys of a conversation with its reply in any of its forms; a prefill and its reply are one message."""
    if not context.keys:
        return []
    before, prefill = context.keys, []
    if context.prefill is not None:
        before, prefill = before[:-1], [context.prefill]
    replies = [[key_of(message) for message in join_replies([*prefill, form])] for form in forms]
    return [*(frozenset([key]) for key in before), *map(frozenset, zip(*replies, strict=True))]


def _read_to_end(segment: Segment, last: NDArray[np.int16]) -> Segment:
    """Return a segment with the choice for its last token, which the engine read only for the next reply."""
    routed = segment.routed_experts
    if routed is None or not len(routed):
        return segment
    return replace(segment, routed_experts=np.concatenate([routed[:-1], last[None]]))


def _begins_with(ids: Tokens, start: Tokens) -> bool:
    return len(ids) >= len(start) and bool(np.array_equal(ids[: len(start)], start))


def _runs(versions: Sequence[int]) -> tuple[VersionRun, ...]:
    return tuple(VersionRun(version, len(list(run))) for version, run in itertools.groupby(versions))


def _only(output: RolloutOutput) -> RolloutSequence:
    sequence = output.sequences[0] if len(output.sequences) == 1 else None
    if sequence is None or not len(sequence.token_ids) == len(sequence.log_probs) == len(sequence.weight_versions):
        raise RolloutError(
            f"the engine answered request {output.request_id} with {len(output.sequences)} sequences, or one without "
            "a log-prob and a weight version for each token"
        )
    if not bool(np.isfinite(np.asarray(sequence.log_probs, np.float32)).all()):
        raise RolloutError(
            f"the engine answered request {output.request_id} with a log-prob that is not finite; its model is broken"
        )
    return sequence
