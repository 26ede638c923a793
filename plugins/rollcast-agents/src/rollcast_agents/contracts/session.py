"""Contract of sessions, through which an agent samples from the engine; a session records every sampled token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollcast.contracts.config import Positive, Seconds, config

if TYPE_CHECKING:
    from rollcast.contracts.rollout import SamplingParams
    from rollcast_agents.contracts.renderer import Message
    from rollcast_agents.contracts.trajectory import End, Floats, Tokens, Trajectory
    from rollcast_data.chat_template import ChatMessage, ToolSchema

__all__ = ["Budget", "Reply", "Session"]


@config
class Budget:
    """Limits of one rollout; null for no limit."""

    max_assistant_turns: Positive | None = None
    """Largest number of replies of the model in one rollout."""
    max_response_length: Positive | None = None
    """Largest number of tokens in one reply."""
    max_total_tokens: Positive | None = None
    """Largest number of tokens in a context, including prompt and tool results."""
    timeout_s: Seconds | None = None
    """Longest duration of one rollout in seconds."""


@dataclass(frozen=True, eq=False)
class Reply:
    """One reply of the model.

    Attributes:
        message: the parsed reply.
        prompt_ids: ids of the prompt sent to the engine, int32 ``[prompt]``.
        token_ids: sampled ids, including the stop token if there was one, int32 ``[tokens]``.
        log_probs: log-probs of the sampled ids, float32 ``[tokens]``.
        finish_reason: ``stop``, ``length`` or ``abort``.
        end: reason why nothing more can be sampled in this context; None if the conversation can continue.
    """

    message: Message
    prompt_ids: Tokens
    token_ids: Tokens
    log_probs: Floats
    finish_reason: str
    end: End | None = None


class Session(ABC):
    """Base class of sessions, which sample for one rollout and record each token that the engine returns.

    A call whose context starts with the exact ids of a recorded context extends that context; any other call forks.
    Tokens sampled before a fork are trained only in the context in which they were sampled.
    """

    @property
    @abstractmethod
    def session_id(self) -> str:
        """Id of the rollout; all requests with this id go to one replica."""

    @property
    @abstractmethod
    def turns(self) -> int:
        """Number of replies so far."""

    @property
    @abstractmethod
    def end(self) -> End | None:
        """Reason why the budget allows no further reply; None if it allows one."""

    @abstractmethod
    async def sample(
        self,
        prompt: Sequence[ChatMessage] | Tokens,
        tools: Sequence[ToolSchema] = (),
        sampling: SamplingParams | None = None,
    ) -> Reply:
        """Sample one reply to a conversation, or to exact ids.

        Args:
            prompt: the whole conversation in OpenAI's chat format, or ids, int32 ``[tokens]``.
            tools: tools that the model may call, rendered by the chat template.
            sampling: sampling parameters of this reply; by default the rollout's. The budget may lower
                ``max_tokens``.

        Raises:
            SessionEnded: the budget is spent, or the context has no room for a reply; its ``end`` says which.
            RolloutError: the engine did not answer.
            RendererError: the messages cannot be rendered.
        """

    @abstractmethod
    def follow(self, messages: Sequence[ChatMessage], metrics: Callable[[], Mapping[str, float]]) -> None:
        """Register a loop's own messages and metrics, so that a failed rollout still shows them.

        Without this call, a failed rollout shows the messages of its last request.

        Args:
            messages: the conversation; the loop keeps appending to this sequence.
            metrics: function that returns the metrics so far; called once, if the rollout fails.
        """

    @abstractmethod
    def trajectories(self) -> list[Trajectory]:
        """Return the trajectories recorded so far, one per leaf of the tree of contexts, without rewards."""
