"""Metrics of several samples per prompt: mean@k, best@k and maj@k, each with a bootstrap interval.

Axes: ``P`` prompts, ``N`` samples of each, ``S`` subsets of the samples, ``R`` bootstrap resamples.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from rollcast.errors import RewardError

__all__ = [
    "ExtractsAnswers",
    "answer_extractor",
    "best_at_k",
    "bootstrap_interval",
    "extract_answer",
    "majority_at_k",
    "pick_samples",
    "summarize_notes",
    "summarize_samples",
]

Extractor = Callable[[str], str | None]

RESAMPLES = 1000
"""Number of bootstrap resamples of the prompts."""
CONFIDENCE = 0.95
"""Fraction of the resamples between ``low`` and ``high``."""
MAX_SUBSETS = 128
"""Largest number of subsets evaluated for maj@k; if there are more subsets, so many are drawn."""

_CHUNK = 1 << 22
_MARKED = (
    re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL | re.IGNORECASE),
    re.compile(r"####[ \t]*([^\n]+)"),
    re.compile(r"\banswer[ \t]*(?:is|:|=)[ \t]*:?[ \t]*([^\n]+)", re.IGNORECASE),
)
# A number with leading zeros is a text: it may well be a sequence of digits.
_NUMBER = re.compile(r"(?P<sign>[-+]?)[ $]*(?P<whole>(?:0|[1-9][0-9,]*)?)(?:\.(?P<fraction>[0-9]*))?")
_BOXED = "\\boxed{"


@runtime_checkable
class ExtractsAnswers(Protocol):
    """A reward that extracts the answer of a response; equal answers are equal texts."""

    def extract(self, response: str) -> str | None:
        """Return the answer; None if the response has none."""
        ...


def answer_extractor(reward: object) -> Extractor:
    """Return the function that reads the answers of a majority vote: the reward's own or :func:`extract_answer`."""
    if not isinstance(reward, ExtractsAnswers):
        return extract_answer

    def extract(response: str) -> str | None:
        try:
            answer = reward.extract(response)
        except Exception as error:
            name = getattr(reward, "name", "") or type(reward).__name__
            shown = response if len(response) <= 200 else f"{response[:200]}…"
            raise RewardError(f"{name}.extract failed on the response {shown!r}: {error}") from error
        return None if answer is None else str(answer)

    return extract


def extract_answer(response: str) -> str | None:
    r"""Return the answer of a response, normalized so that equal answers are equal texts; None for no answer.

    The answer is the content of the last ``\boxed{...}``; else of the last ``<answer>...</answer>``; else the
    text after the last ``####``, or after the last ``answer is`` or ``answer:``; else the whole response.
    Numbers are compared by value, so ``1,080``, ``$1080.`` and ``1080.0`` are one answer. Other text, including
    numbers with leading zeros, is compared without letter case, white space and a full stop at the end.
    """
    boxed = _last_boxed(response)
    for pattern in _MARKED:
        if boxed is not None:
            break
        matches = pattern.findall(response)
        boxed = matches[-1] if matches else None
    return _normalise(response if boxed is None else boxed)


def _last_boxed(response: str) -> str | None:
    start = response.rfind(_BOXED)
    if start < 0:
        return None
    begin = start + len(_BOXED)
    depth = 1
    for position in range(begin, len(response)):
        depth += (response[position] == "{") - (response[position] == "}")
        if depth == 0:
            return response[begin:position]
    return None


def _normalise(text: str) -> str | None:
    plain = " ".join(text.split()).strip(" $").rstrip(".").strip(" $*")
    number = _NUMBER.fullmatch(plain)
    if number is None or not (number["whole"] or number["fraction"]):
        return plain.casefold() or None
    whole, fraction = number["whole"].replace(",", "") or "0", (number["fraction"] or "").rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    return f"-{value}" if number["sign"] == "-" and value != "0" else value


def summarize_notes(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Summarize the notes of generators: the mean of each number, and the share of each end.

    Args:
        rows: samples; some may have ``metrics``, a mapping of numbers, ``end`` and ``failure``. A number that a sample
            lacks counts as 0.
    """
    noted = [row for row in rows if "end" in row]
    metrics: dict[str, float] = {}
    for row in noted:
        share = {f"rollout/{name}": float(value) for name, value in row.get("metrics", {}).items()}
        share[f"rollout/end/{row['end']}"] = 1.0
        if row.get("failure"):
            share[f"rollout/failures/{row['failure']['boundary']}"] = 1.0
        for name, value in share.items():
            metrics[name] = metrics.get(name, 0.0) + value / len(noted)
    return dict(sorted(metrics.items()))


def summarize_samples(
    rows: Sequence[Mapping[str, Any]], samples: int, extract: Extractor = extract_answer, seed: int = 0
) -> dict[str, float]:
    """Return metrics over the samples of each prompt, for all prompts and by data source.

    ``val/acc/mean@N`` is the share of correct samples; ``val/acc/best@k/mean`` is the chance that at
    least one of ``k`` samples is correct, and ``val/acc/maj@k/mean`` the chance that the most
    frequent answer among them is correct. ``k`` takes the powers of two below ``N``, and ``N``. Each metric has
    bounds ``/low`` and ``/high`` of its 95 % interval, by bootstrap over the prompts. The same metrics are under
    ``val/<source>/acc/`` for each ``data_source`` that is not empty.

    Args:
        rows: rows with ``correct``, ``response`` and ``data_source``; the ``samples`` rows of a prompt are adjacent.
        samples: number ``N`` of samples per prompt.
        extract: function that returns the answer of a response.
        seed: seed of the bootstrap and of the subsets; equal rows and seed return equal numbers.

    Raises:
        ValueError: the number of rows is not a multiple of ``samples``.
        RewardError: the reward could not extract an answer.
    """
    if samples < 1 or len(rows) % samples:
        raise ValueError(f"{len(rows)} rows are no whole number of prompts with {samples} samples each")
    if not rows:
        return {}
    values = _values(rows, samples, extract, seed)
    metrics = _with_intervals("val/acc", values, seed)
    sources = [str(row["data_source"]) for row in rows[::samples]]
    for source in sorted(set(sources) - {""}):
        chosen = torch.tensor([name == source for name in sources])
        metrics |= _with_intervals(f"val/{source}/acc", {name: column[chosen] for name, column in values.items()}, seed)
    return metrics


def _values(rows: Sequence[Mapping[str, Any]], samples: int, extract: Extractor, seed: int) -> dict[str, Tensor]:
    """Return the values of the prompts: name → float64 ``[P]``."""
    correct = torch.tensor([float(row["correct"]) for row in rows], dtype=torch.float64).reshape(-1, samples)
    values = {f"mean@{samples}": correct.mean(-1)}
    if samples == 1:
        return values
    numbers: dict[str, int] = {}
    extracted = [extract(str(row["response"])) for row in rows]
    ids = [-1 if answer is None else numbers.setdefault(answer, len(numbers)) for answer in extracted]
    answers = torch.tensor(ids).reshape(-1, samples)
    sizes = [size for size in (2**power for power in range(1, samples.bit_length())) if size < samples]
    for size in (*sizes, samples):
        values[f"best@{size}"] = best_at_k(correct, size)
        values[f"maj@{size}"] = majority_at_k(correct, answers, size, seed)
    return values


def _with_intervals(prefix: str, values: Mapping[str, Tensor], seed: int) -> dict[str, float]:
    stacked = torch.stack(list(values.values()), -1)
    means = stacked.mean(0).tolist()
    low, high = (bound.tolist() for bound in bootstrap_interval(stacked, seed))
    metrics: dict[str, float] = {}
    for index, name in enumerate(values):
        # The name mean@N without a suffix is the mean, as in other frameworks.
        metrics[f"{prefix}/{name}" if name.startswith("mean@") else f"{prefix}/{name}/mean"] = means[index]
        metrics |= {f"{prefix}/{name}/low": low[index], f"{prefix}/{name}/high": high[index]}
    return metrics


def best_at_k(values: Tensor, k: int) -> Tensor:
    r"""Return the exact expected best of ``k`` different samples, for each prompt.

    With the values in rising order this is :math:`\sum_i v_i \binom{i-1}{k-1} / \binom{N}{k}`; for values
    of 0 or 1 it is pass@k, :math:`1 - \binom{N-c}{k} / \binom{N}{k}` with ``c`` ones.

    Args:
        values: ``[P, N]``.
        k: from 1 to ``N``.

    Returns:
        float64 ``[P]``.

    Raises:
        ValueError: there are fewer than ``k`` samples.
    """
    count = _check_k(values, k)
    total = math.comb(count, k)
    weights = torch.tensor([math.comb(rank, k - 1) / total for rank in range(count)], dtype=torch.float64)
    return values.double().sort(-1).values @ weights


def majority_at_k(correct: Tensor, answers: Tensor, k: int, seed: int = 0) -> Tensor:
    """Return the chance that the most frequent answer of ``k`` samples is correct, for each prompt.

    Every sample with an answer has one vote; answers with equally many votes share the win. If samples with the
    same answer differ in ``correct``, their mean counts. All subsets of ``k`` samples are evaluated if there are
    at most 128, else 128 drawn ones.

    Args:
        correct: ``[P, N]``, from 0 to 1.
        answers: int64 ``[P, N]``; equal numbers are equal answers, negative numbers are missing answers.
        k: from 1 to ``N``.
        seed: seed of the drawn subsets.

    Returns:
        float64 ``[P]``; 0 where no sample has an answer.

    Raises:
        ValueError: there are fewer than ``k`` samples.
    """
    count = _check_k(correct, k)
    subsets = _subsets(count, k, seed)
    rows_at_once = max(_CHUNK // (len(subsets) * k * k), 1)
    parts = [
        _majority(correct[start : start + rows_at_once].double(), answers[start : start + rows_at_once], subsets)
        for start in range(0, len(correct), rows_at_once)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def _majority(correct: Tensor, answers: Tensor, subsets: Tensor) -> Tensor:
    right, picked = correct[:, subsets], answers[:, subsets]  # [P, S, k]
    has_vote = picked >= 0
    votes = (picked.unsqueeze(-1) == picked.unsqueeze(-2)).sum(-1).masked_fill(~has_vote, 0)
    # All winning answers occur equally often, so the mean over their samples weights them equally.
    wins = (votes == votes.amax(-1, keepdim=True)) & has_vote
    return ((right * wins).sum(-1) / wins.sum(-1).clamp(min=1)).mean(-1)


def _subsets(count: int, k: int, seed: int) -> Tensor:
    """Return indices ``[S, k]`` of different samples."""
    if math.comb(count, k) <= MAX_SUBSETS:
        return torch.tensor(list(itertools.combinations(range(count), k)))
    generator = torch.Generator().manual_seed(seed)
    return torch.rand((MAX_SUBSETS, count), generator=generator).argsort(-1)[:, :k]


def bootstrap_interval(values: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return the 95 % interval of the mean over prompts, from percentiles of 1,000 resamples of the prompts.

    Args:
        values: ``[P]`` or ``[P, M]`` for ``M`` metrics, which share the resamples; at least one prompt.
        seed: seed of the resamples.

    Returns:
        Lower and upper bound, float64 ``[]`` or ``[M]``.

    Raises:
        ValueError: there are no prompts.
    """
    count = len(values)
    if not count:
        raise ValueError("an interval needs at least one prompt")
    generator = torch.Generator().manual_seed(seed)
    at_once = max(min(_CHUNK // count, RESAMPLES), 1)
    means: list[Tensor] = []
    for start in range(0, RESAMPLES, at_once):
        drawn = torch.randint(count, (min(at_once, RESAMPLES - start), count), generator=generator)
        times = torch.zeros(drawn.shape, dtype=torch.float64).scatter_add_(
            1, drawn, torch.ones(1, 1, dtype=torch.float64).expand(drawn.shape)
        )
        means.append(times @ values.double() / count)
    tail = (1 - CONFIDENCE) / 2
    low, high = torch.quantile(torch.cat(means), torch.tensor([tail, 1 - tail], dtype=torch.float64), dim=0)
    return low, high


def pick_samples(rows: Sequence[Any], most: int) -> list[Any]:
    """Return at most ``most`` rows, evenly spaced and always the same ones; -1 for all."""
    if most < 0 or len(rows) <= most:
        return list(rows)
    return [rows[index * len(rows) // most] for index in range(most)]


def _check_k(values: Tensor, k: int) -> int:
    count = values.shape[-1]
    if not 1 <= k <= count:
        raise ValueError(f"k is {k}; it has to be from 1 to the {count} samples of a prompt")
    return count
