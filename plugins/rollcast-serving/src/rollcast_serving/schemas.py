"""Schema of the config's ``judge`` section; importable without torch."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from rollcast.contracts.config import Positive, config

__all__ = ["JudgeConfig", "JudgeModelConfig"]


@config
class JudgeModelConfig:
    """The judge's model."""

    path: str | None = None
    """Hugging Face folder of the judge's model and tokenizer."""
    trust_remote_code: bool = False
    """Run Python code that comes with the folder."""


@config
class JudgeConfig:
    """A language model that rewards ask, served by replicas of a rollout of its own."""

    enable: bool = False
    """Serve a judge. Its replicas are the role `judge` of `placement.mapping`."""
    model: JudgeModelConfig = field(default_factory=JudgeModelConfig)
    """The judge's model."""
    rollout: dict[str, Any] = field(default_factory=dict)
    """The judge's rollout: `name`, and the keys of `rollout` that say how an engine serves and samples. Replies are
    greedy unless `temperature` is among them."""
    max_tokens: Positive = 512
    """Largest length of a reply in tokens, where a reward asks for none."""
