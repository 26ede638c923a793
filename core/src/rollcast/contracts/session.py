"""Contract of sessions: the one way from an agent to the engine, which records what is sampled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollcast.contracts.config import Positive, Seconds, config

if TYPE_CHECKING:
    from rollcast.contracts.renderer import ChatMessage, Message, ToolSchema
    from rollcast.contracts.rollout import SamplingParams
    from rollcast.contracts.trajectory import End, Floats, Tokens, Trajectory

__all__ = ["Budget", "Reply", "Session"]


@config
class Budget:
    """Limits of one rollout; null is no limit."""

    max_assistant_turns: Positive | None = None
    """Replies of the model in one rollout."""
    max_response_length: Positive | None = None
    """Tokens of one reply."""
    max_total_tokens: Positive | None = None
    """Tokens of a context, prompt and tool results included."""
    timeout_s: Seconds | None = None
    """Duration of one rollout in seconds."""


@dataclass(frozen=True, eq=False)
class Reply:
    """One reply of the model.

    Attributes:
        message: the reply, parsed.
        prompt_ids: ids that the engine was given, int32 ``[prompt]``.
        token_ids: ids that it sampled, with the stop token if there was one; int32 ``[tokens]``.
        log_probs: float32 ``[tokens]``.
        finish_reason: ``stop``, ``length`` or ``abort``.
        end: reason why nothing more can be sampled in this context; None if the conversation may go on.
    """

    message: Message
    prompt_ids: Tokens
    token_ids: Tokens
    log_probs: Floats
    finish_reason: str
    end: End | None = None


class Session(ABC):
    """Samples for one rollout and records each token that the engine returns.

    A call whose context begins with the exact ids of a recorded context extends that one; any other call forks.
    Tokens that were sampled before a fork are trained in the context in which they were sampled, and nowhere else.
    """

    @property
    @abstractmethod
    def session_id(self) -> str:
        """Id of the rollout; its requests go to one replica."""

    @property
    @abstractmethod
    def turns(self) -> int:
        """Number of replies so far."""

    @property
    @abstractmethod
    def end(self) -> End | None:
        """Reason why the budget allows no further reply; None if it does."""

    @abstractmethod
    async def sample(
        self,
        prompt: Sequence[ChatMessage] | Tokens,
        tools: Sequence[ToolSchema] = (),
        sampling: SamplingParams | None = None,
    ) -> Reply:
        """Continue a conversation, or exact ids, by one reply.

        Args:
            prompt: the whole conversation in OpenAI's chat format, or ids, int32 ``[tokens]``.
            tools: tools that the model may call; rendered by the template.
            sampling: parameters of this reply; by default the rollout's. The budget may lower ``max_tokens``.

        Raises:
            SessionEnded: the budget is spent, or the context has no room for a reply; its ``end`` says which.
            RolloutError: the engine did not answer.
            RendererError: the messages cannot be rendered.
        """

    @abstractmethod
    def follow(self, messages: Sequence[ChatMessage], metrics: Callable[[], Mapping[str, float]]) -> None:
        """Follow a loop's own record, so that a rollout that fails still shows what happened until then.

        Without this call a failed rollout shows the messages of its last request.

        Args:
            messages: conversation, to which the loop goes on adding.
            metrics: returns the numbers so far; called once, if the rollout fails.
        """

    @abstractmethod
    def trajectories(self) -> list[Trajectory]:
        """Return what was recorded so far: one trajectory for each leaf, without rewards."""
