"""verl's scores and reward managers, called as they are.

``reward=verl`` scores a sample with verl's ``default_compute_score``, by the column ``data_source``. The managers
``verl_naive``, ``verl_dapo``, ``verl_batch`` and ``verl_prime``, and those of verl's reward loop (``verl_loop_naive``,
``verl_loop_dapo``, ``verl_loop_rate_limited``), get batches as verl makes them and call the run's reward as verl's
``compute_score``. :func:`manager_class` adapts a manager that you registered with verl.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from rollcast.contracts.reward import (
    BaseReward,
    BaseRewardManager,
    RewardResult,
    RewardSample,
    RewardSettings,
    RewardValue,
    finite_number,
)
from rollcast.errors import ConfigError, PluginNotFoundError, RewardError
from rollcast_verl.need import need_verl
from rollcast_verl.programs import use_sandbox

if TYPE_CHECKING:
    import torch

__all__ = ["VerlManager", "VerlReward", "manager_class"]

#: Key of ``extra_info`` with the number of the sample, removed before the reward sees the sample.
_ROW = "__rollcast_row"
_MANAGERS = ("naive", "dapo", "batch", "prime")
_LOOP_MANAGERS = ("naive", "dapo", "rate_limited")


class VerlReward(BaseReward):
    """verl's ``default_compute_score``, or another of its functions of this signature.

    Programs that verl would run in this process, those of ``prime_code``, run in the sandbox of the reward ``code``.

    Args:
        function: name of the function in verl, as ``module:function``.
        allow_missing: promised kinds of isolation without which programs may run on this machine.
        **kwargs: further keyword arguments of the function, such as ``sandbox_fusion_url``.
    """

    name = "verl"

    def __init__(
        self,
        function: str = "verl.utils.reward_score:default_compute_score",
        allow_missing: Collection[str] = (),
        **kwargs: Any,
    ) -> None:
        self._allow_missing = tuple(allow_missing)
        use_sandbox(self._allow_missing)
        module, _, name = function.partition(":")
        attribute = getattr(need_verl(module, "the reward verl"), name, None)
        if not callable(attribute):
            raise ConfigError(f"reward.reward_kwargs.function is {function!r}, but {module} has no function {name!r}")
        self._compute_score: Callable[..., Any] = attribute
        self._kwargs = kwargs

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self._compute_score)

    def score(self, sample: RewardSample) -> Any:
        """Return verl's score; an awaitable if the function is asynchronous.

        Raises:
            RewardError: the function returned no score. Its own exceptions pass through.
        """
        use_sandbox(self._allow_missing)  # another process of the manager `prime` has verl's own module
        value = self._compute_score(
            data_source=sample.data_source,
            solution_str=sample.response,
            ground_truth=sample.ground_truth,
            extra_info=dict(sample.extra_info),
            **self._kwargs,
        )
        return _later(value) if inspect.isawaitable(value) else _result(value)


async def _later(value: Any) -> Any:
    return _result(await value)


def _result(value: Any) -> Any:
    """Convert what a function of verl returns: a number, a mapping with ``score``, or a tuple that starts with it.

    The numbers are unchanged, so that ``reward.on_error`` applies to those that are not finite.
    """
    if isinstance(value, Mapping):
        return _split(value.get("score"), value)
    return value[0] if isinstance(value, tuple | list) and value else value


def _split(score: Any, parts: Mapping[str, Any]) -> RewardResult:
    if score is None:
        raise RewardError(f"verl's function returned a mapping without 'score'; its keys: {', '.join(parts)}")
    correct = parts.get("acc")
    extra = {
        key: value
        for key, value in parts.items()
        if key not in ("score", "acc") and not isinstance(value, str) and hasattr(value, "__float__")
    }
    return RewardResult(score, None if correct is None else bool(correct), extra)


class _Texts:
    """A tokenizer that knows the texts of a batch, so that the reward sees exactly the text that rollcast decoded."""

    eos_token = "\x00"  # noqa: S105  # no text ends with it
    pad_token_id = 0

    def __init__(self, samples: Sequence[RewardSample]) -> None:
        self._samples = samples

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        """Return the text whose ids are the number of its sample: below 0 the prompt, above 0 the response."""
        first = int(ids[0]) if len(ids) else 0
        if first == 0:
            return ""
        return self._samples[-first - 1].prompt if first < 0 else self._samples[first - 1].response

    def batch_decode(self, rows: Any, skip_special_tokens: bool = True) -> list[str]:
        """Return the text of each row."""
        return [self.decode(row, skip_special_tokens) for row in rows]


def _batch_of(samples: Sequence[RewardSample]) -> Any:
    """Build verl's batch of these samples; see :class:`_Texts` for the ids."""
    import numpy as np
    import torch

    protocol = need_verl("verl.protocol", "a reward manager of verl")
    lengths = torch.tensor([max(len(sample.response_ids), 1) for sample in samples])
    there = torch.arange(int(lengths.max())) < lengths.unsqueeze(-1)
    numbers = torch.arange(1, len(samples) + 1).unsqueeze(-1)
    columns: dict[str, list[Any]] = {
        "data_source": [sample.data_source for sample in samples],
        "reward_model": [{"ground_truth": sample.ground_truth, "style": "rule"} for sample in samples],
        "extra_info": [{**sample.extra_info, _ROW: row} for row, sample in enumerate(samples)],
        "uid": [str(row) for row in range(len(samples))],
    }
    arrays = {}
    for name, values in columns.items():
        arrays[name] = np.empty(len(values), dtype=object)
        arrays[name][:] = values
    tensors = {
        "prompts": -numbers,
        "responses": numbers * there,
        "attention_mask": torch.cat([torch.ones_like(numbers), there.long()], 1),
        "response_mask": there.long(),
    }
    return protocol.DataProto.from_dict(tensors, arrays)


class VerlManager(BaseRewardManager):
    """Base class of managers that call one of verl's; :func:`manager_class` makes them.

    Args:
        reward, settings: see :class:`BaseRewardManager`. Errors of the reward stop the run: verl's managers have no
            policy for them, so ``reward.on_error`` has to be ``stop``.
        num_examine: number of samples of each data source that verl prints.
        **options: further arguments of verl's manager, such as ``max_resp_len`` and ``overlong_buffer_cfg``.

    Raises:
        ConfigError: ``reward.on_error`` is not ``stop``, or verl's manager does not accept the options.
    """

    #: Name in verl's registry, and True for a manager of verl's reward loop.
    theirs: ClassVar[str] = ""
    is_loop: ClassVar[bool] = False

    def __init__(
        self, reward: BaseReward, settings: RewardSettings | None = None, num_examine: int = 0, **options: Any
    ) -> None:
        super().__init__(reward, settings)
        if self.settings.on_error != "stop":
            raise ConfigError(
                f"reward.on_error is {self.settings.on_error!r}, but verl's manager {self.theirs!r} has no policy for "
                "samples that fail; set it to stop, or choose one of rollcast's managers"
            )
        self._num_examine = num_examine
        self._options = options
        self._cls = _manager_of_verl(self.theirs, self.is_loop)

    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """Score a batch with verl's manager.

        Raises:
            RewardError: the reward or the manager raised.
        """
        if not samples:
            return []
        data, score = _batch_of(samples), _ComputeScore(self.reward, samples, self.theirs == "prime")
        try:
            run = self._run_loop if self.is_loop else self._run
            return run(samples, data, score)
        except (ConfigError, RewardError):
            raise
        except Exception as error:
            raise RewardError(
                f"verl's reward manager {self.theirs!r} failed: {type(error).__name__}: {error}"
            ) from error

    def _config(self) -> Any:
        from omegaconf import OmegaConf

        return OmegaConf.create(self._options)

    def _run(self, samples: Sequence[RewardSample], data: Any, score: Callable[..., Any]) -> list[RewardResult]:
        try:
            options = {key: getattr(self._config(), key) for key in self._options}
            manager = self._cls(_Texts(samples), self._num_examine, score, **options)
        except (TypeError, AssertionError) as error:
            raise ConfigError(
                f"reward.reward_manager_kwargs do not fit verl's manager {self.theirs!r}: {error}"
            ) from error
        outcome = manager(data, return_dict=True)
        extra = {key: list(values) for key, values in outcome.get("reward_extra_info", {}).items()}
        return [
            _place(outcome["reward_tensor"][row], sample, {key: values[row] for key, values in extra.items()})
            for row, sample in enumerate(samples)
        ]

    def _run_loop(self, samples: Sequence[RewardSample], data: Any, score: Callable[..., Any]) -> list[RewardResult]:
        from omegaconf import OmegaConf

        async def run() -> list[Any]:
            config = OmegaConf.create({"reward": {"reward_kwargs": self._options, **self._options}})
            manager = self._cls(config, _Texts(samples), score)
            return await asyncio.gather(*(manager.run_single(data[row : row + 1]) for row in range(len(samples))))

        results = asyncio.run(run())
        return [
            _finite(result["reward_score"], {k: v for k, v in result["reward_extra_info"].items() if k != "score"})
            for result in results
        ]


def _finite(score: Any, parts: Mapping[str, Any]) -> RewardResult:
    """Return the result of a manager of verl, whose numbers have to be finite because nothing checks them later.

    Raises:
        ValueError: a number is not finite.
    """
    result = _split(score, parts)
    extra = {key: finite_number(key, value) for key, value in result.extra.items()}
    return replace(result, score=finite_number("score", result.score), extra=extra)


def _place(scores: torch.Tensor, sample: RewardSample, extra: Mapping[str, Any]) -> RewardResult:
    """Return the result of a sample from verl's scores per token, which are usually one at the last token."""
    count = len(sample.response_ids)
    result = _finite(scores.sum(), {key: value for key, value in extra.items() if key != "score"})
    spread = scores[:count].tolist()
    return replace(result, token_scores=spread) if any(spread[:-1]) else result


class _ComputeScore:
    """The run's reward with the signature of verl's ``compute_score``, or of its form for batches; can be pickled.

    Args:
        reward, samples: the reward and the batch.
        is_plain: True to return numbers only.
    """

    def __init__(self, reward: BaseReward, samples: Sequence[RewardSample], is_plain: bool) -> None:
        self._reward, self._samples, self._is_plain = reward, samples, is_plain

    def __call__(
        self,
        data_source: Any = "",
        solution_str: str = "",
        ground_truth: Any = None,
        extra_info: Any = None,
        **batch: Any,
    ) -> Any:
        if "solution_strs" not in batch:
            return self._returned(self._reward.score(self._sample(data_source, solution_str, ground_truth, extra_info)))
        columns = (batch[name] for name in ("data_sources", "solution_strs", "ground_truths", "extra_infos"))
        rows = [self._sample(*row) for row in zip(*columns, strict=True)]
        return [self._returned(value) for value in self._reward.score_batch(rows)]

    def _sample(self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> RewardSample:
        extra = dict(extra_info or {})
        sample = self._samples[extra.pop(_ROW)]
        return replace(
            sample, response=solution_str, ground_truth=ground_truth, data_source=data_source, extra_info=extra
        )

    def _returned(self, value: Any) -> Any:
        result = _as_mapping(_awaited(value))
        return result["score"] if self._is_plain and isinstance(result, dict) else result


def _awaited(value: Any) -> Any:
    async def wait() -> Any:
        return await value

    return asyncio.run(wait()) if inspect.isawaitable(value) else value


def _as_mapping(value: RewardValue) -> Any:
    """Convert a result to the form in which verl's functions return it."""
    if not isinstance(value, RewardResult):
        return finite_number("score", value)
    if value.token_scores is not None or value.turn_scores is not None:
        raise RewardError("the reward scores tokens or turns, which verl's managers cannot take; use manager `naive`")
    parts = {"score": value.score, **value.extra}
    return parts if value.correct is None else {**parts, "acc": value.correct}


def _manager_of_verl(name: str, is_loop: bool) -> Any:
    place = "verl.experimental.reward_loop.reward_manager" if is_loop else "verl.workers.reward_manager"
    plugin = f"the reward manager verl_{'loop_' if is_loop else ''}{name}"
    registry = need_verl(f"{place}.registry", plugin)
    need_verl(place, plugin)  # registers verl's own
    known = registry.REWARD_MANAGER if is_loop else registry.REWARD_MANAGER_REGISTRY
    if name not in known:
        raise PluginNotFoundError(f"{plugin}: verl has no manager {name!r}; it has: {', '.join(sorted(known))}")
    return known[name]


def manager_class(name: str, is_loop: bool = False) -> type[VerlManager]:
    """Return a manager that calls verl's manager ``name``; verl is imported when it is built.

    Args:
        name: name in verl's registry of reward managers.
        is_loop: True for verl's reward loop (``verl.experimental.reward_loop``).
    """
    label = "".join(part.title() for part in ("verl", "loop" if is_loop else "", name, "manager"))
    return type(label, (VerlManager,), {"theirs": name, "is_loop": is_loop, "__module__": __name__})


def __getattr__(attribute: str) -> Any:
    """Return ``manager_NAME`` or ``loop_manager_NAME``, the values of the entry points."""
    is_loop = attribute.startswith("loop_manager_")
    name = attribute.removeprefix("loop_").removeprefix("manager_")
    if attribute.startswith(("manager_", "loop_manager_")) and name in (_LOOP_MANAGERS if is_loop else _MANAGERS):
        return manager_class(name, is_loop)
    raise AttributeError(f"module {__name__!r} has no attribute {attribute!r}")
