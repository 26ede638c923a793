"""Schema of the config's ``judge`` section; importable without torch."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from rollcast.contracts.config import Positive, config
from rollcast.contracts.storage import NodePath

__all__ = ["JudgeConfig", "JudgeModelConfig"]


@config
class JudgeModelConfig:
    """The judge's model."""

    path: NodePath | None = None
    """Hugging Face folder of the judge's model and tokenizer, or its URL."""
    trust_remote_code: bool = False
    """Run Python code that comes with the folder."""


@config
class JudgeConfig:
    """A language model that rewards call, served by replicas of its own rollout."""

    enable: bool = False
    """Serve a judge. Its replicas are the role `judge` in `placement.mapping`."""
    model: JudgeModelConfig = field(default_factory=JudgeModelConfig)
    """The judge's model."""
    rollout: dict[str, Any] = field(default_factory=dict)
    """Rollout of the judge: `name`, and keys of `rollout` about serving and sampling. Replies are greedy unless
    `temperature` is set.
    """
    max_tokens: Positive = 512
    """Maximum length of a reply in tokens, unless a reward sets one."""
