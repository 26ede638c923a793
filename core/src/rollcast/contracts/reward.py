"""Contract of rewards: a function of one sample, or a class that can score a batch; both may be ``async``.

Example::

    def short_answer(sample: RewardSample) -> float:
        return 1.0 if sample.finished and len(sample.response) < 20 else 0.0

Register it in the entry-point group ``rollcast.rewards`` and select it with ``reward.name``.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollcast.errors import ConfigError
from rollcast.plugins import Registry, any_of, is_callable, subclass_of

__all__ = [
    "MAX_REWARD",
    "BaseReward",
    "BaseRewardManager",
    "Judge",
    "RewardFunction",
    "RewardResult",
    "RewardSample",
    "RewardSettings",
    "RewardValue",
    "build_reward",
    "build_reward_manager",
    "finite_number",
    "reward_managers",
    "rewards",
]


#: Largest magnitude of a number that enters training. Squares of it, summed over 1e14 tokens or parameters, stay
#: finite in float32.
MAX_REWARD = 1e12
_EXCERPT = 200


def finite_number(name: str, value: Any, limit: float = MAX_REWARD) -> float:
    """Return a user's number as a float: Python's, numpy's, or a tensor of one element.

    Args:
        name: name of the number, for messages.
        value: anything; text is not parsed.
        limit: largest magnitude.

    Raises:
        ValueError: the value is not a number, is NaN or infinite, or exceeds the limit.
    """
    try:
        # float() alone would parse strings, and would drop the imaginary part of numpy's complex numbers.
        is_number = hasattr(value, "__float__") and not isinstance(value, complex | str)
        is_number = is_number and getattr(getattr(value, "dtype", None), "kind", "f") in "biuf"
        number = float(value) if is_number else None
    except OverflowError:  # an integer above 1.8e308
        number = math.inf
    except Exception:  # noqa: BLE001 -- a user's class may raise anything
        number = None
    if number is None:
        raise ValueError(f"gave {name} = {_excerpt(value)}, which is not a number ({type(value).__name__})")
    if not math.isfinite(number):
        raise ValueError(f"gave {name} = {number}, which is not finite")
    if abs(number) > limit:
        raise ValueError(f"gave {name} = {number:g}, which is beyond the limit of {limit:g}")
    return number


def _excerpt(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 -- a user's class may raise anything
        return f"an object of {type(value).__name__}"
    half = _EXCERPT // 2
    return text if len(text) <= _EXCERPT else f"{text[:half]} … {text[-half:]}"


@dataclass(frozen=True)
class RewardSample:
    """One finished generation as text and ids, with the fields of its dataset row.

    Attributes:
        prompt, response: decoded text without special tokens.
        ground_truth: reference answer from the dataset, unchanged.
        data_source: name of the row's source, for rewards that depend on the source.
        finished: True if the response ended by a stop token, False if it was cut at the length limit.
        response_ids: ids of the tokens that the policy chose, without padding.
        extra_info: further columns of the row.
        turn_ids: turn of each token in ``response_ids``, not decreasing; empty if turns are unknown.
        raw_prompt: prompt as the dataset has it, a text or a list of messages; None if unknown.
        step: number of completed training steps when the sample is scored; 0 outside a training run.
        total_steps: number of training steps of the run; 0 if unknown.
    """

    prompt: str
    response: str
    ground_truth: Any = None
    data_source: str = ""
    finished: bool = True
    response_ids: Sequence[int] = ()
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    turn_ids: Sequence[int] = ()
    raw_prompt: str | Sequence[Mapping[str, Any]] | None = None
    step: int = 0
    total_steps: int = 0


@dataclass(frozen=True)
class RewardResult:
    """A score with optional further metrics and an optional distribution of the score over tokens or turns.

    Attributes:
        score: score of the whole sample. The difference between it and the sum of ``token_scores`` or
            ``turn_scores`` is placed at the last token.
        correct: True if the answer is correct, for ``val/accuracy``; None to compare ``score`` with the reward's
            ``max_score``.
        extra: further metrics; each becomes ``reward/<name>``, and is a component of the score for estimators that
            read components. None where a component does not apply to the sample.
        error: reason why the sample has no score of its own; set by managers.
        dropped: True if the sample is left out of the update; set by managers, and by rewards that have no score for a
            sample.
        token_scores: one score for each token in ``sample.response_ids``, or None.
        turn_scores: one score for each turn of ``sample.turn_ids``, in order, or None. A manager places each score
            at the turn's last token and returns them as ``token_scores``. Excludes ``token_scores``.
        columns: further columns of the sample in ``samples.jsonl`` and in the sample tables of trackers, such as an
            extracted answer; values without a JSON form are logged as text.
    """

    score: float
    correct: bool | None = None
    extra: Mapping[str, float | None] = field(default_factory=dict)
    error: str = ""
    dropped: bool = False
    token_scores: Sequence[float] | None = None
    turn_scores: Sequence[float] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def per_token(cls, scores: Sequence[float], **fields: Any) -> RewardResult:
        """Return a result whose score is the sum of one score for each response token."""
        return cls(sum(scores), token_scores=scores, **fields)

    @classmethod
    def per_turn(cls, scores: Sequence[float], **fields: Any) -> RewardResult:
        """Return a result whose score is the sum of one score for each turn."""
        return cls(sum(scores), turn_scores=scores, **fields)


#: Values of ``reward.on_error``, the policy for bad samples.
ON_ERROR = ("stop", "zero", "drop")

RewardValue = float | RewardResult
RewardFunction = Callable[[RewardSample], RewardValue | Awaitable[RewardValue]]


class Judge(ABC):
    """A language model that rewards can query; in a run, replicas serve it (config section ``judge``)."""

    @abstractmethod
    async def ask(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
    ) -> str:
        """Return the judge's reply as text without special tokens; may be called on any event loop.

        Args:
            messages: conversation of ``role`` and ``content``, rendered by the judge's chat template; or a text to
                continue.
            max_tokens: largest length of the reply in tokens; None for ``judge.max_tokens``.
            temperature: sampling temperature, 0 for greedy; None for the temperature of ``judge.rollout``.
            seed: seed of a sampled reply.

        Raises:
            RollcastError: the judge cannot answer. If the reward does not catch this error, the sample is bad.
        """


class BaseReward(ABC):
    """Base class of rewards with settings or state; built once per run with ``reward.reward_kwargs``."""

    #: Score of a fully correct answer; used for ``val/accuracy`` where ``correct`` is None.
    max_score: float = 1.0
    #: Name used in messages; by default the registry name.
    name: str = ""
    #: True if all samples must be scored in one process, because the reward keeps state between samples.
    sequential: bool = False
    #: Judge of the run, set by :meth:`bind_judge` before the first sample if the reward uses the judge.
    judge: Judge | None = None

    @property
    def uses_judge(self) -> bool:
        """True if the reward queries the run's judge; :meth:`score` must then be ``async``."""
        return False

    def bind_judge(self, judge: Judge) -> None:
        """Set the judge of the run."""
        self.judge = judge

    @abstractmethod
    def score(self, sample: RewardSample) -> RewardValue | Awaitable[RewardValue]:
        """Score one sample. May be ``async def``; many samples are then awaited at a time."""

    def score_batch(self, samples: Sequence[RewardSample]) -> Sequence[RewardValue | Awaitable[RewardValue]]:
        """Return one result per sample, in order; override if batches are cheaper. Must not be ``async def``.

        The managers that score in batches await awaitables of one call together, on one event loop for all calls.
        """
        return [self.score(sample) for sample in samples]

    @property
    def scores_batches(self) -> bool:
        """True if managers should call :meth:`score_batch` with all samples that they get at once."""
        return type(self).score_batch is not BaseReward.score_batch

    @property
    def is_async(self) -> bool:
        """True if :meth:`score` and :meth:`score_batch` return awaitables."""
        return inspect.iscoroutinefunction(self.score)

    def close(self) -> None:  # noqa: B027 -- most rewards hold nothing
        """Release what the reward holds, such as a client or a file; called once, after the last sample.

        Called where the reward was built. Copies in the processes of the manager ``prime`` end with their process.
        """


class _FunctionReward(BaseReward):
    def __init__(self, function: RewardFunction) -> None:
        self._function = function

    def score(self, sample: RewardSample) -> RewardValue | Awaitable[RewardValue]:
        return self._function(sample)

    @property
    def is_async(self) -> bool:
        call = getattr(self._function, "__call__", None)  # noqa: B004  # an object may have an async __call__
        return inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(call)


@dataclass(frozen=True)
class RewardSettings:
    """Settings of every reward manager.

    Attributes:
        on_error: policy for a bad sample, that is one whose reward raised, took too long or returned something other
            than a finite number of at most ``MAX_REWARD``, or whose environment or agent did: ``stop`` the run, score
            the sample ``zero``, or ``drop`` it from the update.
        max_bad_share: with ``zero`` and ``drop``, largest share of bad samples in a batch, from 0 to 1; a larger share
            stops the run.
        timeout_s: time limit of one sample in seconds; None for no limit.
        max_response_length: largest length of a response in the run, in tokens; None if unknown.

    Raises:
        ConfigError: a value is out of its range; names the key.
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
    """Base class of reward managers, which apply a reward to a batch.

    Further keyword arguments of a subclass come from ``reward.reward_manager_kwargs``.
    """

    def __init__(self, reward: BaseReward, settings: RewardSettings | None = None) -> None:
        self.reward = reward
        self.settings = settings or RewardSettings()

    @abstractmethod
    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """Score a batch: return one finite result per sample, in order.

        ``token_scores`` of a result have the length of ``response_ids``, or are None.

        Raises:
            RewardError: a sample is bad and ``on_error`` is ``stop``, too many samples are bad, or the reward
                returned the wrong number of scores; the message shows the sample.
        """

    @property
    def is_concurrent(self) -> bool:
        """True if several threads may call the manager at once; it then awaits the reward in this process."""
        return False

    def close(self) -> None:  # noqa: B027 -- most managers have nothing to release
        """Release processes and threads; may be called more than once."""


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
    """Build the reward called ``name``.

    Raises:
        PluginError: the reward does not exist or does not load.
        TypeError: the reward does not accept these options; a plain function accepts none.
    """
    plugin = rewards.get(name)
    options = dict(options or {})
    if isinstance(plugin, type) and issubclass(plugin, BaseReward):
        built: BaseReward = plugin(**options)
    elif options:
        raise TypeError(f"reward {name!r} is a plain function and takes no options, got {sorted(options)}")
    else:
        built = _FunctionReward(plugin)
    built.name = built.name or name
    return built


def build_reward_manager(
    name: str, reward: BaseReward, settings: RewardSettings | None = None, options: Mapping[str, Any] | None = None
) -> BaseRewardManager:
    """Build the reward manager called ``name`` for ``reward``.

    Raises:
        PluginError: the manager does not exist or does not load.
        ConfigError: the manager does not accept these options.
    """
    plugin = reward_managers.get(name)
    try:
        return plugin(reward, settings or RewardSettings(), **dict(options or {}))
    except TypeError as error:
        raise ConfigError(f"reward.reward_manager_kwargs do not fit the manager {name!r}: {error}") from error
