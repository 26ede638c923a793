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

from rollcast.errors import DataError, DataProtoError
from rollcast_automap.contract import Lengths
from rollcast_automap.costs.length_curve import LengthCurve
from rollcast_trainer.api import RunSettings, build_dataset

if TYPE_CHECKING:
    from rollcast_trainer.api import RunSettings

__all__ = ["RunLengths", "measure_prompts", "read_run_lengths"]

_TOKEN_BYTES = 4
#: Most prompts to tokenize; they are spread evenly over the data.
_PROMPTS = 1000


@dataclass(frozen=True)
class RunLengths:
    """Lengths of a run's rows.

    Attributes:
        prompt, response: statistics in tokens; None if the run did not record them.
        source: files that were read, for messages.
    """

    prompt: Lengths | None
    response: Lengths | None
    source: str


def read_run_lengths(folder: Path, longest: tuple[int, int]) -> RunLengths:
    """Return the lengths of the rows of all steps in a run directory.

    Recorded rollouts and trajectories contain every length, so the result has quantiles. Without them, only the means
    of ``metrics.jsonl`` are known. In a conversation, the tokens before the first sampled one are the prompt, and all
    others are the response.

    Args:
        folder: run directory.
        longest: largest length of a prompt and of a response, in tokens; longer ones are cut.

    Raises:
        DataError: the folder holds no lengths, or a file is damaged; names the file.
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
    """Yield the prompt and response length of each trajectory in an agents' file that has a sampled token."""
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {error}; remove it, or give another run directory") from error
    for number, line in enumerate(lines, 1):
        try:
            segments = json.loads(line)["segments"] if line.strip() else []
            counts = [(bool(segment["sampled"]), _count(segment["token_ids"])) for segment in segments]
        except (ValueError, KeyError, TypeError, binascii.Error) as error:
            # A killed run leaves an unfinished last line, which is skipped.
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
    """Return the mean prompt length, from the tokens of a step minus the response tokens; None if not known."""
    names = ("perf/total_num_tokens", "rollout/tokens", "rollout/response_length_mean")
    rows = [[float(row[name]) for name in names] for row in steps if all(row.get(name) for name in names)]
    # Rows of a step = response tokens / mean response length.
    means = [(total - tokens) / (tokens / mean) for total, tokens, mean in rows]
    if not means:
        return None
    mean = min(max(statistics.fmean(means), 1.0), float(longest))
    # Quantiles at one length, because prompts of a task vary little; without quantiles, readers assume exponential.
    return Lengths(mean, longest, ((0.0, mean), (1.0, mean)))


def measure_prompts(settings: RunSettings) -> Lengths:
    """Tokenize about 1,000 training prompts, spread evenly over the data, and return the statistics of their lengths.

    Raises:
        DataError: a data file cannot be read, or the data have no prompt.
    """
    from rollcast.protocol import Jagged

    data = settings.data
    dataset = build_dataset(settings, "train_files", data.dataset)
    if not len(dataset):
        raise DataError(f"data.train_files={data.train_files} has no prompts to measure; leave --read-data out")
    step = max(len(dataset) // _PROMPTS, 1)
    batch = dataset.collate([dataset[row] for row in range(0, len(dataset), step)])
    lengths = Jagged.of(batch["prompts"], "prompts").lengths.tolist()
    return LengthCurve.from_samples(lengths).statistics(data.max_prompt_length)
