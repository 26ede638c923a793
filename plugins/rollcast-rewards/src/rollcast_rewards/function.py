"""The reward ``function``: a user's Python function, named by file.

Example, in ``my_rewards.py``::

    def short(sample, limit=20):
        return 1.0 if len(sample.response) < limit else 0.0

and in the config ``reward=function reward.reward_kwargs.path=my_rewards.py:short``. A function
with verl's signature ``(data_source, solution_str, ground_truth, extra_info=None)`` works too, and either may be
``async def``. An asynchronous function with a parameter ``judge`` gets the run's judge there.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rollcast.contracts.reward import BaseReward, Judge, RewardResult, RewardSample, RewardValue
from rollcast.errors import ConfigError, RewardError
from rollcast_rewards.policy import as_number

__all__ = ["FunctionReward", "result_from_mapping"]

_KEY = "reward.reward_kwargs.path"
_COLUMNS = ("data_source", "solution_str", "ground_truth")


class FunctionReward(BaseReward):
    """A reward that calls a function from a Python file.

    It is pickled as path and options, and the file is imported again in the other process, where it
    has to exist under the same path.

    Args:
        path: ``file.py:function``, relative to the working directory or absolute.
        **kwargs: further keyword arguments of the function.

    Raises:
        ConfigError: the file does not exist or cannot be imported, or has no such function, or the function does
            not accept the arguments.
    """

    #: True, because the file's functions may keep state.
    sequential = True

    def __init__(self, path: str, **kwargs: Any) -> None:
        file, name = _split(path)
        self.name = f"{file.name}:{name}"
        self._path = f"{file}:{name}"
        self._kwargs = kwargs
        self._function = _find_function(_import_file(file), file, name)
        self._takes_judge = _takes_judge(self._function, kwargs, self._path)
        self._call = _adapt(self._function, {**kwargs, **({"judge": None} if self._takes_judge else {})}, self._path)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._path, self._kwargs)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self._function)

    @property
    def uses_judge(self) -> bool:
        return self._takes_judge

    def bind_judge(self, judge: Judge) -> None:
        super().bind_judge(judge)
        self._call = _adapt(self._function, {**self._kwargs, "judge": judge}, self._path)

    def score(self, sample: RewardSample) -> RewardValue | Awaitable[RewardValue]:
        """Return the function's value for this sample; an awaitable if the function is ``async``.

        Raises:
            RewardError: the function returned a mapping without a score. Its own exceptions pass through.
        """
        value = self._call(sample)
        return _await_result(value) if inspect.isawaitable(value) else _as_result(value)


async def _await_result(value: Awaitable[Any]) -> RewardValue:
    result: RewardValue = _as_result(await value)
    return result


def _as_result(value: Any) -> Any:
    return result_from_mapping(value) if isinstance(value, Mapping) else value


def _rebuild(path: str, kwargs: dict[str, Any]) -> FunctionReward:
    return FunctionReward(path, **kwargs)


def _split(path: str) -> tuple[Path, str]:
    text, separator, name = str(path).rpartition(":")
    if not separator or not text or not name.isidentifier():
        raise ConfigError(f"{_KEY} is {path!r}; it has to be 'file.py:function'")
    file = Path(text).expanduser().absolute()
    if not file.is_file():
        folder = file.parent
        names = sorted(each.name for each in folder.glob("*.py")) if folder.is_dir() else []
        near = difflib.get_close_matches(file.name, names, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else f"; Python files there: {', '.join(names) or 'none'}"
        raise ConfigError(f"{_KEY}: {file} does not exist{hint}")
    return file, name


def _import_file(file: Path) -> ModuleType:
    # A unique module name, so that a file json.py hides no module and two files of one name differ.
    name = f"_rollcast_reward_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{_KEY}: {file} is not a Python file (its name does not end with .py)")
    module = importlib.util.module_from_spec(spec)
    previous = sys.modules.get(name)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        sys.modules.pop(name)
        if previous is not None:
            sys.modules[name] = previous
        raise ConfigError(f"{_KEY}: {file} does not import: {type(error).__name__}: {error}") from error
    return module


def _find_function(module: ModuleType, file: Path, name: str) -> Callable[..., Any]:
    if not hasattr(module, name):
        functions = sorted(
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
        )
        raise ConfigError(f"{_KEY}: {file} has no {name!r}; its functions: {', '.join(functions) or 'none'}")
    function = getattr(module, name)
    if not callable(function):
        raise ConfigError(f"{_KEY}: {name!r} in {file} is of type {type(function).__name__} and cannot be called")
    checked: Callable[..., Any] = function
    return checked


def _takes_judge(function: Callable[..., Any], kwargs: Mapping[str, Any], path: str) -> bool:
    """Return True if the function has a parameter for the run's judge that no option sets.

    Raises:
        ConfigError: the function has such a parameter and is not ``async``.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # reported by _adapt
        return False
    if "judge" not in parameters or "judge" in kwargs:
        return False
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"{_KEY}: {path} has a parameter judge, whose replies are awaited; make it an async def")
    return True


def _adapt(function: Callable[..., Any], kwargs: dict[str, Any], path: str) -> Callable[[RewardSample], Any]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{_KEY}: {path} has no signature that Python can read") from error
    parameters = signature.parameters
    by_column = all(column in parameters for column in _COLUMNS)
    takes_extra = "extra_info" in parameters or any(
        each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()
    )

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

    try:
        if by_column:
            names = (*_COLUMNS, "extra_info") if takes_extra else _COLUMNS
            signature.bind(**dict.fromkeys(names), **kwargs)
        else:
            signature.bind(None, **kwargs)
    except TypeError as error:
        given = f" with the options {', '.join(kwargs)}" if kwargs else ""
        raise ConfigError(
            f"{_KEY}: {path}{signature} cannot be called{given}: {error}. It has to take one RewardSample, or "
            "(data_source, solution_str, ground_truth, extra_info=None), and the other keys of reward_kwargs"
        ) from error
    return call_by_column if by_column else call_with_sample


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
        str(key): item if (number := as_number(item)) is None else number
        for key, item in value.items()
        if key not in ("score", "acc") and hasattr(item, "__float__")
    }
    return RewardResult(value["score"], None if correct is None else bool(correct), extra)
