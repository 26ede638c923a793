"""The contract of rewards: a function of one sample, or a class that scores many at once.

Example::

    from rollcast.contracts.reward import RewardSample

    def short_answer(sample: RewardSample) -> float:
        return 1.0 if sample.finished and len(sample.response) < 20 else 0.0

Announce it in the group ``rollcast.rewards``; the config names it as ``reward.name``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollcast.errors import ConfigError
from rollcast.plugins import Registry, any_of, is_callable, subclass_of

__all__ = [
    "BaseReward",
    "BaseRewardManager",
    "RewardFunction",
    "RewardResult",
    "RewardSample",
    "RewardSettings",
    "build_reward",
    "build_reward_manager",
    "reward_managers",
    "rewards",
]


@dataclass(frozen=True)
class RewardSample:
    """One finished generation, as text and ids, with what the dataset says of its prompt.

    Attributes:
        prompt, response: decoded text, special tokens left out.
        ground_truth: the row's reference answer as it stands in the dataset.
        data_source: the row's source name, for rewards that differ by source.
        finished: the response ended by itself (stop token), it was not cut at the length limit.
        response_ids: token ids of the response, without padding.
        extra_info: the row's further columns.
    """

    prompt: str
    response: str
    ground_truth: Any = None
    data_source: str = ""
    finished: bool = True
    response_ids: Sequence[int] = ()
    extra_info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardResult:
    """A score with named further numbers (each becomes the metric ``reward/<name>``).

    ``correct`` feeds ``val/accuracy``; without it a sample counts as correct if its score is the
    reward's ``max_score``. A manager sets ``error``, which says why a sample has no score of its own, and
    ``dropped``, which leaves it out of the update.
    """

    score: float
    correct: bool | None = None
    extra: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    dropped: bool = False


#: What may become of a bad sample.
ON_ERROR = ("stop", "zero", "drop")

RewardFunction = Callable[[RewardSample], float | RewardResult]


class BaseReward(ABC):
    """A reward with settings or state; built once per run with ``reward.reward_kwargs`` as keyword arguments."""

    #: The score of a fully correct answer; decides ``val/accuracy`` where ``correct`` is not given.
    max_score: float = 1.0
    #: For messages; by default the name that it was asked for by.
    name: str = ""
    #: It may remember things from one sample to the next, so that one process scores all unless told otherwise.
    sequential: bool = False

    @abstractmethod
    def score(self, sample: RewardSample) -> float | RewardResult:
        """Score one sample."""

    def score_batch(self, samples: Sequence[RewardSample]) -> Sequence[float | RewardResult]:
        """Score many samples, one result each, in order; override where a batch is cheaper."""
        return [self.score(sample) for sample in samples]


class _FunctionReward(BaseReward):
    def __init__(self, function: RewardFunction) -> None:
        self._function = function

    def score(self, sample: RewardSample) -> float | RewardResult:
        return self._function(sample)


@dataclass(frozen=True)
class RewardSettings:
    """What every manager is told of the run.

    Attributes:
        on_error: ``stop`` the run at a bad sample (its reward raised, took too long, or gave no finite
            number), score it ``zero``, or ``drop`` it from the update.
        max_bad_share: with ``zero`` and ``drop``, the share of a batch from 0 to 1 that may be bad; more stop the run.
        timeout_s: the longest that one sample's reward may take, in seconds; None sets no limit.
        max_response_length: the run's limit of a response, in tokens; None where it is not known.

    Raises:
        ConfigError: a value is out of its range; names the config's key.
    """

    on_error: str = "stop"
    max_bad_share: float = 0.1
    timeout_s: float | None = 30.0
    max_response_length: int | None = None

    def __post_init__(self) -> None:
        if self.on_error not in ON_ERROR:
            raise ConfigError(f"reward.on_error is {self.on_error!r}; valid: {', '.join(ON_ERROR)}")
        if not 0.0 <= self.max_bad_share <= 1.0:
            raise ConfigError(f"reward.max_bad_share is {self.max_bad_share}; it is a share, from 0 to 1")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError(f"reward.timeout_s is {self.timeout_s}; it has to be above 0, or null for no limit")


class BaseRewardManager(ABC):
    """Applies a reward to a batch; further keyword arguments of a subclass are ``reward.reward_manager_kwargs``."""

    def __init__(self, reward: BaseReward, settings: RewardSettings | None = None) -> None:
        self.reward = reward
        self.settings = settings or RewardSettings()

    @abstractmethod
    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """One finite result a sample, in order.

        Raises:
            RewardError: a sample is bad and the policy is to stop, too many are bad, or the reward
                gave the wrong number of scores; the message shows the sample.
        """

    def close(self) -> None:  # noqa: B027 -- most managers hold nothing
        """Release processes and threads; may be called again."""


RewardPart = type[BaseReward] | RewardFunction

rewards: Registry[Any] = Registry(
    "rollcast.rewards",
    any_of(subclass_of(BaseReward), is_callable(1)),
    "reward.name",
    description="rewards: functions, or classes with state",
)
reward_managers: Registry[type[BaseRewardManager]] = Registry(
    "rollcast.reward_managers",
    subclass_of(BaseRewardManager),
    "reward.reward_manager",
    description="computation and placement of the rewards of a batch",
)


def build_reward(name: str, options: Mapping[str, Any] | None = None) -> BaseReward:
    """The reward called ``name``, ready to score.

    Raises:
        PluginError: no such reward, or it does not load.
        TypeError: a function reward was given options, or a class does not take them.
    """
    part = rewards.get(name)
    options = dict(options or {})
    if isinstance(part, type) and issubclass(part, BaseReward):
        built: BaseReward = part(**options)
    elif options:
        raise TypeError(f"reward {name!r} is a plain function and takes no options, got {sorted(options)}")
    else:
        built = _FunctionReward(part)
    built.name = built.name or name
    return built


def build_reward_manager(
    name: str, reward: BaseReward, settings: RewardSettings | None = None, options: Mapping[str, Any] | None = None
) -> BaseRewardManager:
    """The reward manager called ``name`` over ``reward``.

    Raises:
        PluginError: no such manager, or it does not load.
        ConfigError: it does not take these options.
    """
    part = reward_managers.get(name)
    try:
        return part(reward, settings or RewardSettings(), **dict(options or {}))
    except TypeError as error:
        raise ConfigError(f"reward.reward_manager_kwargs do not fit the manager {name!r}: {error}") from error
