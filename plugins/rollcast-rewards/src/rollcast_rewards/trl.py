"""The reward ``trl``: reward functions as TRL's ``GRPOTrainer`` takes them, unchanged, and their weighted sum.

Example, in ``my_rewards.py``::

    def accuracy(completions, answer, **kwargs):
        return [float(a in c[0]["content"]) for c, a in zip(completions, answer)]

and in the config ``reward=trl 'reward.reward_kwargs.reward_funcs=[my_rewards.py:accuracy]'``.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rollcast.contracts.reward import BaseReward, RewardResult, RewardSample, RewardValue, finite_number, rewards
from rollcast.errors import ConfigError, RewardError
from rollcast_data.chat_template import join_replies
from rollcast_rewards.function import is_async_callable, signature_of, takes_any_keyword
from rollcast_rewards.policy import describe_error
from rollcast_rewards.shared_call import SharedCall
from rollcast_rewards.user_code import FORM, UserFunction, find_function
from rollcast_rewards.weighted_sum import is_weight

__all__ = ["TrainerState", "TrlReward"]

logger = logging.getLogger(__name__)

_KEY = "reward.reward_kwargs.reward_funcs"
_WEIGHTS = "reward.reward_kwargs.reward_weights"
#: Arguments that every function is offered besides the columns of the dataset.
_PER_SAMPLE = ("prompts", "completions", "completion_ids")
_PER_CALL = ("trainer_state", "log_extra", "log_metric")
#: Columns that are not passed on: TRL's own arguments are made of them.
_NOT_PASSED = frozenset({"prompt", "completion", "completion_ids", "messages"})

Conversation = list[dict[str, Any]]


@dataclass(frozen=True)
class TrainerState:
    """The attributes of ``transformers.TrainerState`` that a run here has.

    Attributes:
        global_step: number of completed training steps.
        max_steps: number of training steps of the run; 0 outside a training run.
        is_world_process_zero: True; rewards of a batch are computed once.
    """

    global_step: int = 0
    max_steps: int = 0
    is_world_process_zero: bool = True

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(self.__dataclass_fields__)
        raise AttributeError(f"trainer_state has no {name!r} in rollcast; it has {known}")


@dataclass
class _Logged:
    """The values that one function logged during one call: a column has one per sample, a metric one per log."""

    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        self.columns.setdefault(column, []).extend(values)

    def log_metric(self, name: str, value: float) -> None:
        self.metrics[name].append(value)


@dataclass(frozen=True)
class _Scores:
    """The results of one function for one batch; None for samples to which it does not apply."""

    values: Sequence[Any]
    logged: _Logged


class _Batch:
    """The keyword arguments that TRL would pass for these samples."""

    def __init__(self, samples: Sequence[RewardSample]) -> None:
        pairs = [_split(sample) for sample in samples]
        self.size = len(samples)
        self.arguments: dict[str, Any] = {
            "prompts": [prompt for prompt, _ in pairs],
            "completions": [completion for _, completion in pairs],
            "completion_ids": [list(sample.response_ids) for sample in samples],
            **_columns(samples),
        }
        self.trainer_state = TrainerState(samples[0].step, samples[0].total_steps)

    def describe(self) -> str:
        """Return the arguments with the types of their values, for messages."""
        arguments = [f"{name}: {self.size} x {_type_of(values)}" for name, values in self.arguments.items()]
        return ", ".join((*arguments, *_PER_CALL))

    def row(self, index: int) -> str:
        """Return the arguments of one sample, shortened, for messages."""
        return ", ".join(f"{name}={_short(values[index])}" for name, values in self.arguments.items())


class _Function:
    """One of the reward functions, either TRL's, which gets a batch, or rollcast's, which gets each sample.

    Args:
        function: function and its place.
        label: name in metrics.
    """

    def __init__(self, function: UserFunction, label: str) -> None:
        self.label, self.path = label, function.label
        self.is_async = is_async_callable(function.call)
        self._call = function.call
        signature = signature_of(function, _KEY)
        self._takes_all = takes_any_keyword(signature)
        self._parameters = {
            name: parameter
            for name, parameter in signature.parameters.items()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        }
        if "completions" not in self._parameters and not self._takes_all:
            raise ConfigError(
                f"{_KEY}: {function.path}{signature} does not take completions, so it is no function for TRL; "
                "functions "
                "of one sample or with verl's signature belong to reward=function"
            )
        if refused := [
            name for name, parameter in self._parameters.items() if parameter.kind is parameter.POSITIONAL_ONLY
        ]:
            raise ConfigError(
                f"{_KEY}: {function.path}{signature} has positional-only parameters: {', '.join(refused)}"
            )

    def start(self, batch: _Batch) -> tuple[Any, _Logged]:
        """Call the function; return what it returned, an awaitable if it is asynchronous, and its log.

        Raises:
            RewardError: it raised, or a parameter has no column.
        """
        logged = _Logged()
        offered = {
            **batch.arguments,
            "trainer_state": batch.trainer_state,
            "log_extra": logged.log_extra,
            "log_metric": logged.log_metric,
        }
        self._check_columns(offered, batch)
        arguments = {name: value for name, value in offered.items() if self._takes_all or name in self._parameters}
        try:
            return self._call(**arguments), logged
        except Exception as error:
            raise self._failed(error, batch) from error

    async def finish(self, value: Awaitable[Any], batch: _Batch, logged: _Logged) -> _Scores:
        """Await an asynchronous function."""
        try:
            returned = await value
        except Exception as error:
            raise self._failed(error, batch) from error
        return self.scores(returned, batch, logged)

    def scores(self, returned: Any, batch: _Batch, logged: _Logged) -> _Scores:
        """Check what the function returned and logged.

        Raises:
            RewardError: it is no list, or has the wrong length; or a logged column has the wrong length.
        """
        if isinstance(returned, str | Mapping) or not hasattr(returned, "__iter__"):
            raise RewardError(
                f"{self.label} ({self.path}) returned {_short(returned)} ({type(returned).__name__}); "
                f"it has to return a list with one number or None for each completion, here {batch.size}"
            )
        values = list(returned)
        if len(values) != batch.size:
            raise RewardError(
                f"{self.label} ({self.path}) returned {len(values)} rewards for {batch.size} completions; "
                f"it was called with {batch.describe()}"
            )
        for column, items in logged.columns.items():
            if len(items) != batch.size:
                raise RewardError(
                    f"{self.label} ({self.path}) logged {len(items)} values in the column {column!r} by log_extra, for "
                    f"{batch.size} completions"
                )
        return _Scores(values, logged)

    def _check_columns(self, offered: Mapping[str, Any], batch: _Batch) -> None:
        missing = [
            name
            for name, parameter in self._parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind is not parameter.VAR_POSITIONAL
            and name not in offered
        ]
        if missing:
            columns = [name for name in batch.arguments if name not in _PER_SAMPLE]
            raise RewardError(
                f"{self.label} ({self.path}) needs {', '.join(missing)}, and the dataset has no such column; its "
                f"columns: {', '.join(columns) or 'none'}"
            )

    def _failed(self, error: BaseException, batch: _Batch) -> RewardError:
        return RewardError(
            f"{self.label} ({self.path}) raised {describe_error(error)}; it was called with {batch.describe()}"
        )


class TrlReward(BaseReward):
    """The weighted sum of TRL's reward functions.

    A function gets all samples that the manager scores at once, as lists: ``prompts`` and ``completions`` (texts, or
    lists of messages where the dataset's prompt is one), ``completion_ids``, each further column of the dataset,
    ``trainer_state``, ``log_extra`` and ``log_metric``. Of these a function without ``**kwargs`` gets those that it
    names. It returns one number per sample; None leaves the function out of the sample's sum. A sample for which all
    return None leaves the update.

    Asynchronous functions run together on one event loop, after the others. A function's score, without its weight,
    is an extra number under the function's name; a metric that it logs is ``<function>/<metric>``.

    Args:
        reward_funcs: functions, each ``file.py:function``, ``module:function`` or the name of an entry point in
            ``rollcast.rewards``.
        reward_weights: one weight for each function; null for 1 each.
        correct_from: least score of the first applicable function at which the sample counts as correct.

    Raises:
        ConfigError: there is no function, one cannot be found or called, or the weights are not as many.
    """

    #: True, because the modules of the functions may keep state.
    sequential = True
    name = "trl"

    def __init__(
        self,
        reward_funcs: str | Sequence[str],
        reward_weights: Sequence[float] | None = None,
        correct_from: float = 1.0,
    ) -> None:
        paths = [reward_funcs] if isinstance(reward_funcs, str) else list(reward_funcs)
        if not paths:
            raise ConfigError(f"{_KEY} is empty; give at least one function as {FORM}")
        self._correct_from = correct_from
        functions = [_find(path, f"{_KEY}[{place}]") for place, path in enumerate(paths)]
        self._paths = [function.path for function in functions]
        self._functions = [
            _Function(function, label) for function, label in zip(functions, _labels(functions), strict=True)
        ]
        self._weights = _weights(reward_weights, paths)
        self.max_score = sum(max(weight, 0.0) for weight in self._weights)
        #: Held during synchronous functions, which may not be made for several threads.
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), reward_weights=self._weights, correct_from=self._correct_from), (self._paths,)

    @property
    def is_async(self) -> bool:
        return any(function.is_async for function in self._functions)

    def score(self, sample: RewardSample) -> RewardValue | Awaitable[RewardValue]:
        """Score one sample, as a batch of one."""
        return self.score_batch([sample])[0]

    def score_batch(self, samples: Sequence[RewardSample]) -> Sequence[RewardValue | Awaitable[RewardValue]]:
        """Return the sums; awaitables if a function is asynchronous.

        Raises:
            RewardError: a function raised, or returned something other than one reward per sample.
        """
        if not samples:
            return []
        batch = _Batch(samples)
        scores: dict[int, _Scores] = {}
        with self._lock:
            for place, function in enumerate(self._functions):
                if not function.is_async:
                    scores[place] = function.scores(*self._started(function, batch))
        if not self.is_async:
            return self._add(scores, batch)
        return SharedCall(self._finish(scores, batch)).parts(len(samples))

    @staticmethod
    def _started(function: _Function, batch: _Batch) -> tuple[Any, _Batch, _Logged]:
        value, logged = function.start(batch)
        return value, batch, logged

    async def _finish(self, scores: dict[int, _Scores], batch: _Batch) -> list[RewardResult]:
        places = [place for place, function in enumerate(self._functions) if function.is_async]
        calls = [self._functions[place].finish(*self._started(self._functions[place], batch)) for place in places]
        scores |= zip(places, await asyncio.gather(*calls), strict=True)
        return self._add(scores, batch)

    def _add(self, scores: Mapping[int, _Scores], batch: _Batch) -> list[RewardResult]:
        results = [self._result(scores, index) for index in range(batch.size)]
        without = [index for index, result in enumerate(results) if result.dropped]
        if without:
            logger.warning(
                "reward %s: every function returned None for %d of %d samples, which are left out of the update; the "
                "first one: %s",
                self.name,
                len(without),
                batch.size,
                batch.row(without[0]),
            )
        return results

    def _result(self, scores: Mapping[int, _Scores], index: int) -> RewardResult:
        total, correct = 0.0, None
        extra: dict[str, Any] = {}
        columns: dict[str, Any] = {}
        for place, (function, weight) in enumerate(zip(self._functions, self._weights, strict=True)):
            values, logged = scores[place].values, scores[place].logged
            columns |= {name: items[index] for name, items in logged.columns.items()}
            extra |= {f"{function.label}/{name}": sum(of) / len(of) for name, of in logged.metrics.items()}
            # A value that is no finite number makes the sample bad; the check of the extra numbers names the function.
            extra[function.label] = values[index]
            if values[index] is None:
                continue
            try:
                number = finite_number(function.label, values[index])
            except ValueError:
                number = 0.0
            total += weight * number
            if correct is None:
                correct = number >= self._correct_from
        if correct is None:
            reason = f"every function of reward {self.name} returned None"
            return RewardResult(0.0, False, extra, error=reason, dropped=True, columns=columns)
        return RewardResult(total, correct, extra, columns=columns)


def _find(path: Any, key: str) -> UserFunction:
    if not isinstance(path, str):
        raise ConfigError(f"{key} is {path!r}; it has to be {FORM}, or the name of a function in rollcast.rewards")
    if ":" in path:
        return find_function(path, key)
    if Path(path).expanduser().is_dir():
        raise ConfigError(
            f"{key}: {path} is a folder; a reward model is reward_model.enable=true reward_model.model.path={path} "
            "reward_model.rule_weight=1, whose score is added to that of the functions"
        )
    plugin = rewards.get(path)
    if isinstance(plugin, type):
        raise ConfigError(
            f"{key}: {path} is a reward with settings, not a function of completions; reward=weighted_sum adds such "
            "rewards up"
        )
    return UserFunction(path, path, path, plugin)


def _labels(functions: Sequence[UserFunction]) -> Iterator[str]:
    seen: Counter[str] = Counter()
    for function in functions:
        seen[function.name] += 1
        yield function.name if seen[function.name] == 1 else f"{function.name}_{seen[function.name]}"


def _weights(asked: Sequence[float] | None, paths: Sequence[str]) -> list[float]:
    if asked is None:
        return [1.0] * len(paths)
    # A user's YAML may hold a number or a text here.
    value: Any = asked
    weights = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if not all(is_weight(weight) for weight in weights) or len(weights) != len(paths):
        raise ConfigError(f"{_WEIGHTS} is {asked!r}; it needs one number for each of {', '.join(paths)}")
    return [float(weight) for weight in weights]


def _split(sample: RewardSample) -> tuple[str | Conversation, str | Conversation]:
    """Return prompt and completion of a sample: two texts, or two lists of messages if the prompt is one."""
    if sample.raw_prompt is None or isinstance(sample.raw_prompt, str):
        return sample.prompt if sample.raw_prompt is None else sample.raw_prompt, sample.response
    prompt = [dict(message) for message in sample.raw_prompt]
    messages = [dict(message) for message in sample.extra_info.get("messages") or ()]
    if not messages:
        messages = [*prompt, {"role": "assistant", "content": sample.response}]
    if not _starts_with(messages, prompt):
        # An environment began the conversation in its own way.
        first = next(
            (place for place, message in enumerate(messages) if message.get("role") == "assistant"), len(messages)
        )
        return messages[:first], messages[first:]
    if prompt and prompt[-1].get("role") == "assistant":
        # A prefill: as in TRL, the completion's first message has it and the reply that continues it.
        return prompt[:-1], [dict(message) for message in join_replies(messages)[len(prompt) - 1 :]]
    return prompt, messages[len(prompt) :]


def _starts_with(messages: Conversation, prompt: Conversation) -> bool:
    return len(messages) >= len(prompt) and all(
        (one.get("role"), one.get("content")) == (other.get("role"), other.get("content"))
        for one, other in zip(messages, prompt, strict=False)
    )


def _columns(samples: Sequence[RewardSample]) -> dict[str, list[Any]]:
    """Return the further columns of the dataset, with None where a sample has none."""
    names = dict.fromkeys(name for sample in samples for name in sample.extra_info if name not in _NOT_PASSED)
    columns = {name: [sample.extra_info.get(name) for sample in samples] for name in names}
    if any(sample.ground_truth is not None for sample in samples):
        columns.setdefault("ground_truth", [sample.ground_truth for sample in samples])
    if any(sample.data_source for sample in samples):
        columns.setdefault("data_source", [sample.data_source for sample in samples])
    return {name: values for name, values in columns.items() if name not in (*_PER_SAMPLE, *_PER_CALL)}


def _type_of(values: Sequence[Any]) -> str:
    kinds = {
        "list of messages"
        if isinstance(value, list) and value and isinstance(value[0], Mapping) and "role" in value[0]
        else type(value).__name__
        for value in values
    }
    return " or ".join(sorted(kinds))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:90]} … {text[-25:]}"
