"""Lengths of prompts and responses from the directory of an earlier run."""

from __future__ import annotations

import base64
import binascii
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcast.contracts.mapping import Lengths
from rollcast.errors import DataError, DataProtoError
from rollcast_automap.costs.length_curve import LengthCurve

if TYPE_CHECKING:
    from rollcast_trainer.loop import LoopTrainer

__all__ = ["RunLengths", "measure_prompts", "read_run_lengths"]

_TOKEN_BYTES = 4
#: Prompts that are tokenized, evenly over the data.
_PROMPTS = 1000


@dataclass(frozen=True)
class RunLengths:
    """Lengths of a run's rows.

    Attributes:
        prompt, response: statistics in tokens; None if the run does not say.
        source: files that they are from, for messages.
    """

    prompt: Lengths | None
    response: Lengths | None
    source: str


def read_run_lengths(folder: Path, longest: tuple[int, int]) -> RunLengths:
    """Return the lengths of the rows of all steps that a run directory holds.

    Recorded rollouts and trajectories have every length, so the result has quantiles; without both, ``metrics.jsonl``
    has means. A conversation counts as its first prompt and all that follows.

    Args:
        folder: run directory.
        longest: most tokens of a prompt and of a response; measured lengths are cut there.

    Raises:
        DataError: the folder holds no lengths, or a file is damaged; names it.
    """
    for source, read in (("rollouts", _recorded), ("trajectories", _conversations)):
        files = sorted((folder / source).glob("step_*")) if (folder / source).is_dir() else []
        rows = [row for file in files for row in read(file)]
        if rows:
            prompt, response = (
                LengthCurve.from_samples([min(float(row[part]), float(longest[part])) for row in rows])
                for part in (0, 1)
            )
            return RunLengths(
                prompt.statistics(longest[0]), response.statistics(longest[1]), f"{len(rows)} rows of {folder / source}"
            )
    return _read_metrics(folder / "metrics.jsonl", longest)


def _recorded(file: Path) -> Iterator[tuple[int, int]]:
    """Yield the lengths of prompt and response of each row of a step of ``runtime.record_trajectories``."""
    from rollcast.protocol import DataProto, Jagged

    try:
        batch = DataProto.load(file)
        lengths = [Jagged.of(batch[name], name).lengths.tolist() for name in ("prompts", "responses")]
    except (OSError, DataProtoError) as error:
        raise DataError(f"{file} cannot be read: {error}; remove it, or give another run directory") from error
    yield from zip(*lengths, strict=True)


def _conversations(file: Path) -> Iterator[tuple[int, int]]:
    """Yield the same of each trajectory of a step of agents; those without a sampled token are left out."""
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {error}; remove it, or give another run directory") from error
    for number, line in enumerate(lines, 1):
        try:
            segments = json.loads(line)["segments"] if line.strip() else []
            counts = [(bool(each["sampled"]), _count(each["token_ids"])) for each in segments]
        except (ValueError, KeyError, TypeError, binascii.Error) as error:
            # A run that was killed leaves its last line unfinished.
            if number == len(lines):
                return
            raise DataError(f"{file}, line {number} is no trajectory: {error!r}; remove the line") from error
        first = next((place for place, (sampled, _) in enumerate(counts) if sampled), None)
        if first is not None:
            sizes = [size for _, size in counts]
            yield sum(sizes[:first]), sum(sizes[first:])


def _count(packed: str) -> int:
    return len(base64.b64decode(packed, validate=True)) // _TOKEN_BYTES


def _read_metrics(file: Path, longest: tuple[int, int]) -> RunLengths:
    try:
        lines = [json.loads(line) for line in file.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise DataError(
            f"{file.parent} has no lengths: {file} cannot be read ({error}); give a run directory with metrics.jsonl, "
            "rollouts/ or trajectories/, or a file with one number of tokens a line"
        ) from error
    steps = [line for line in lines if isinstance(line, dict) and line.get("step")]
    response = _mean_response(steps, longest[1])
    if response is None:
        raise DataError(f"{file} has no rollout/response_length_mean in a step; train at least one step with rollouts")
    return RunLengths(_mean_prompt(steps, longest[0]), response, f"{len(steps)} steps of {file}")


def _mean_response(steps: Sequence[Mapping[str, Any]], longest: int) -> Lengths | None:
    """Return the mean length of responses in the metrics of steps; None if they have none."""
    means = [float(row["rollout/response_length_mean"]) for row in steps if "rollout/response_length_mean" in row]
    return Lengths(min(statistics.fmean(means), float(longest)), longest) if means else None


def _mean_prompt(steps: Sequence[Mapping[str, Any]], longest: int) -> Lengths | None:
    """Return the mean length of prompts, from all tokens of a step less the responses; None if they are not known."""
    names = ("perf/total_num_tokens", "rollout/tokens", "rollout/response_length_mean")
    found = [[float(row[name]) for name in names] for row in steps if all(row.get(name) for name in names)]
    # The number of rows is the number of response tokens by their mean.
    means = [(total - tokens) / (tokens / mean) for total, tokens, mean in found]
    if not means:
        return None
    mean = min(max(statistics.fmean(means), 1.0), float(longest))
    # Prompts of one task are about equally long, unlike responses: the quantiles say so.
    return Lengths(mean, longest, ((0.0, mean), (1.0, mean)))


def measure_prompts(trainer: LoopTrainer) -> Lengths:
    """Return the lengths of up to 1,000 prompts of the training data, evenly over it, by the model's tokenizer.

    Raises:
        DataError: a data file cannot be read, or it has no prompt.
    """
    from rollcast.protocol import Jagged

    data = trainer.task.data
    dataset = trainer.task.build_dataset(data.train_files, data.dataset)
    if not len(dataset):
        raise DataError(f"data.train_files={data.train_files} has no prompts to measure; leave --read-data out")
    step = max(len(dataset) // _PROMPTS, 1)
    batch = dataset.collate([dataset[row] for row in range(0, len(dataset), step)])
    lengths = Jagged.of(batch["prompts"], "prompts").lengths.tolist()
    return LengthCurve.from_samples(lengths).statistics(data.max_prompt_length)
