"""The reward ``function``: a user's Python function, named by file or module.

Example, in ``my_rewards.py``::

    def short(sample, limit=20):
        return 1.0 if len(sample.response) < limit else 0.0

and in the config ``reward=function reward.reward_kwargs.path=my_rewards.py:short``. A function
with verl's signature ``(data_source, solution_str, ground_truth, extra_info=None)`` works too, and one with that of
verl's batches, ``(data_sources, solution_strs, ground_truths, extra_infos)``. All may be ``async def``. An asynchronous
function of one sample with a parameter ``judge`` gets the run's judge there.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rollcast.contracts.reward import BaseReward, Judge, RewardResult, RewardSample, RewardValue
from rollcast.errors import ConfigError, RewardError
from rollcast_rewards.shared_call import SharedCall
from rollcast_rewards.user_code import UserFunction, find_function

__all__ = ["FunctionReward", "result_from_mapping"]

_KEY = "reward.reward_kwargs.path"
_COLUMNS = ("data_source", "solution_str", "ground_truth")
_BATCH_COLUMNS = ("data_sources", "solution_strs", "ground_truths")
#: Name of verl's functions where the config gives none.
_DEFAULT_NAME = "compute_score"


class FunctionReward(BaseReward):
    """A reward that calls a function from a Python file or module.

    It is pickled as path and options, and the file is imported again in the other process, where it
    has to exist under the same path.

    Args:
        path: ``file.py:function``, relative to the working directory or absolute, or ``module:function``. Without a
            colon the option ``name`` is the function's name, by default ``compute_score``.
        **kwargs: further keyword arguments of the function.

    Raises:
        ConfigError: the file does not exist or cannot be imported, or has no such function, or the function does
            not accept the arguments.
    """

    #: True, because the file's functions may keep state.
    sequential = True

    def __init__(self, path: str, **kwargs: Any) -> None:
        path = str(path)
        if ":" not in path:
            path = f"{path}:{kwargs.pop('name', _DEFAULT_NAME)}"
        function = find_function(path, _KEY)
        self.name = function.label
        self._found = function
        self._kwargs = kwargs
        self._is_async = is_async_callable(function.call)
        self._takes_judge = _takes_judge(function, kwargs)
        self._by_batch = _takes_batches(function)
        options = {**kwargs, **({"judge": None} if self._takes_judge else {})}
        self._call_batch = _adapt_batch(function, options) if self._by_batch else None
        self._call = _adapt(function, options) if not self._by_batch else None

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._found.path, self._kwargs)

    @property
    def scores_batches(self) -> bool:
        return self._by_batch

    @property
    def is_async(self) -> bool:
        return self._is_async

    @property
    def uses_judge(self) -> bool:
        return self._takes_judge

    def bind_judge(self, judge: Judge) -> None:
        super().bind_judge(judge)
        self._call = _adapt(self._found, {**self._kwargs, "judge": judge})

    def score(self, sample: RewardSample) -> RewardValue | Awaitable[RewardValue]:
        """Return the function's value for this sample; an awaitable if the function is ``async``.

        Raises:
            RewardError: the function returned a mapping without a score, or a batch of one without one score. Its own
                exceptions pass through.
        """
        if self._call is None:
            return self.score_batch([sample])[0]
        value = self._call(sample)
        return _await_result(value) if inspect.isawaitable(value) else _as_result(value)

    def score_batch(self, samples: Sequence[RewardSample]) -> Sequence[RewardValue | Awaitable[RewardValue]]:
        """Return the function's values; awaitables if it is ``async``.

        Raises:
            RewardError: the function of a batch returned another number of scores than it got samples.
        """
        if self._call_batch is None or not samples:
            return [self.score(sample) for sample in samples]
        values = self._call_batch(samples)
        if inspect.isawaitable(values):
            return SharedCall(self._checked_later(values, len(samples))).parts(len(samples))
        return self._checked(values, len(samples))

    async def _checked_later(self, values: Awaitable[Any], count: int) -> list[Any]:
        return self._checked(await values, count)

    def _checked(self, values: Any, count: int) -> list[Any]:
        if not isinstance(values, Sequence) and not hasattr(values, "__len__"):
            raise RewardError(f"{self.name} returned {type(values).__name__}, not a list of {count} scores")
        if len(values) != count:
            raise RewardError(f"{self.name} returned {len(values)} scores for {count} samples")
        return [_as_result(value) for value in values]


async def _await_result(value: Awaitable[Any]) -> RewardValue:
    result: RewardValue = _as_result(await value)
    return result


def _as_result(value: Any) -> Any:
    return result_from_mapping(value) if isinstance(value, Mapping) else value


def _rebuild(path: str, kwargs: dict[str, Any]) -> FunctionReward:
    return FunctionReward(path, **kwargs)


def is_async_callable(function: Any) -> bool:
    """Return True for an ``async def``, also below :func:`functools.partial`, and for objects that are called so."""
    function = getattr(function, "func", function)
    call = getattr(function, "__call__", None)  # noqa: B004 -- an object may have an async __call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _takes_judge(function: UserFunction, kwargs: Mapping[str, Any]) -> bool:
    """Return True if the function has a parameter for the run's judge that no option sets.

    Raises:
        ConfigError: the function has such a parameter and is not ``async``, or is called with batches.
    """
    parameters = signature_of(function, _KEY).parameters
    if "judge" not in parameters or "judge" in kwargs:
        return False
    if not is_async_callable(function.call) or _takes_batches(function):
        raise ConfigError(
            f"{_KEY}: {function.path} has a parameter judge, whose replies are awaited; make it an async def of one "
            "sample"
        )
    return True


def _takes_batches(function: UserFunction) -> bool:
    parameters = signature_of(function, _KEY).parameters
    return all(column in parameters for column in _BATCH_COLUMNS)


def signature_of(function: UserFunction, key: str) -> inspect.Signature:
    """Return the signature of a user's function.

    Raises:
        ConfigError: Python cannot read it.
    """
    try:
        return inspect.signature(function.call)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}: {function.path} has no signature that Python can read") from error


def takes_any_keyword(signature: inspect.Signature) -> bool:
    """Return True if the signature has ``**kwargs``."""
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in signature.parameters.values())


def _adapt(user_function: UserFunction, kwargs: dict[str, Any]) -> Callable[[RewardSample], Any]:
    function, signature = user_function.call, signature_of(user_function, _KEY)
    by_column = all(column in signature.parameters for column in _COLUMNS)
    takes_extra = "extra_info" in signature.parameters or takes_any_keyword(signature)

    def call_by_column(sample: RewardSample) -> Any:
        extra = {"extra_info": dict(sample.extra_info)} if takes_extra else {}
        return function(
            data_source=sample.data_source,
            solution_str=sample.response,
            ground_truth=sample.ground_truth,
            **extra,
            **kwargs,
        )

    def call_with_sample(sample: RewardSample) -> Any:
        return function(sample, **kwargs)

    if by_column:
        names = (*_COLUMNS, "extra_info") if takes_extra else _COLUMNS
        _bind(user_function, signature, kwargs, **dict.fromkeys(names))
        return call_by_column
    _bind(user_function, signature, kwargs, None)
    return call_with_sample


def _adapt_batch(user_function: UserFunction, kwargs: dict[str, Any]) -> Callable[[Sequence[RewardSample]], Any]:
    function, signature = user_function.call, signature_of(user_function, _KEY)
    takes_extra = "extra_infos" in signature.parameters or takes_any_keyword(signature)

    def call(samples: Sequence[RewardSample]) -> Any:
        extra = {"extra_infos": [dict(sample.extra_info) for sample in samples]} if takes_extra else {}
        return function(
            data_sources=[sample.data_source for sample in samples],
            solution_strs=[sample.response for sample in samples],
            ground_truths=[sample.ground_truth for sample in samples],
            **extra,
            **kwargs,
        )

    names = (*_BATCH_COLUMNS, "extra_infos") if takes_extra else _BATCH_COLUMNS
    _bind(user_function, signature, kwargs, **dict.fromkeys(names))
    return call


def _bind(
    function: UserFunction, signature: inspect.Signature, kwargs: dict[str, Any], *args: Any, **names: Any
) -> None:
    """Check that the function can be called with these arguments and options.

    Raises:
        ConfigError: it cannot; the message says what it may take.
    """
    if "completions" in signature.parameters and not names:
        raise ConfigError(
            f"{_KEY}: {function.path}{signature} takes completions, as TRL's functions do; "
            f"use reward=trl 'reward.reward_kwargs.reward_funcs=[{function.path}]'"
        )
    try:
        signature.bind(*args, **names, **kwargs)
    except TypeError as error:
        problem = f" with the options {', '.join(kwargs)}" if kwargs else ""
        raise ConfigError(
            f"{_KEY}: {function.path}{signature} cannot be called{problem}: {error}. It has to take one RewardSample, "
            "or "
            "(data_source, solution_str, ground_truth, extra_info=None), or "
            "(data_sources, solution_strs, ground_truths, extra_infos), and the other keys of reward_kwargs"
        ) from error


def result_from_mapping(value: Mapping[str, Any]) -> RewardResult:
    """Convert verl's form, a mapping with ``score``, optionally ``acc``, and further numbers, to a result.

    Numbers are Python's, numpy's and tensors of one element; texts, lists and None are left out. An array or
    tensor of several elements is kept in the result, whose check rejects it by name.

    Raises:
        RewardError: there is no score.
    """
    if "score" not in value:
        raise RewardError(f"the reward gave a mapping without 'score'; its keys: {', '.join(map(str, value))}")
    correct = value.get("acc")
    extra = {
        str(key): item for key, item in value.items() if key not in ("score", "acc") and hasattr(item, "__float__")
    }
    return RewardResult(value["score"], None if correct is None else bool(correct), extra)
