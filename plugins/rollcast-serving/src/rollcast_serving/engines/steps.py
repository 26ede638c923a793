"""Updating weights through an engine's own update call, which takes strings and returns nothing.

An update is a series of steps. Each travels as a string to every rank's process, which answers with a file: the answers
carry checksums, counts and errors that the engine's call would lose.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import pickle
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcast.contracts.rollout import EngineNode
from rollcast.contracts.weights import WeightReport
from rollcast.errors import RollcastError, WeightSyncError
from rollcast_serving.engines.updates import dump_remote, join_reports, same_report, share_buckets
from rollcast_serving.model_weights import ModelWeights, UpdateCheck
from rollcast_serving.receiving import WeightTally

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LoadStep", "StepLoader", "StepUpdater", "answer_step"]

Buckets = Iterable[Sequence[tuple[str, "Tensor"]]]
#: A rank's report of a step, or its error.
Answer = WeightReport | RollcastError


@dataclasses.dataclass(frozen=True)
class LoadStep:
    """Part of an update, or all of it.

    Attributes:
        answer: path prefix of each rank's answer.
        version: version of the weights.
        begins: names and shapes of the model's weights if this is the first step, else None.
        buckets: picklable buckets to load.
        ends: True if this is the last step.
    """

    answer: str
    version: int
    begins: ModelWeights | None = None
    buckets: Buckets = ()
    ends: bool = False

    def encode(self) -> str:
        """Return the step as a string.

        Raises:
            TypeError, AttributeError, pickle.PicklingError: the buckets cannot be pickled.
        """
        # The path is not pickled, so that a step that cannot be unpickled is answered too.
        return f"{self.answer}\n{base64.b64encode(pickle.dumps(self)).decode()}"


class StepUpdater:
    """The rollout's side of an update in steps.

    Args:
        carry: sends a step's string to every rank, and returns when all have carried it out.
        engine: engine's name, for messages.
        weights: names and shapes of the model's weights.
        ranks: number of processes that load weights.
        folder: folder for the answers.
        node: this process's place in the engine; None for an engine of one node.
    """

    def __init__(
        self,
        carry: Callable[[str], Awaitable[None]],
        engine: str,
        weights: ModelWeights,
        ranks: int,
        folder: Path,
        node: EngineNode | None = None,
    ) -> None:
        self._carry, self._engine = carry, engine
        self._weights, self._ranks, self._folder, self._node = weights, ranks, folder, node or EngineNode()
        self._steps = 0

    async def update(self, buckets: Buckets, version: int) -> WeightReport:
        """Load all weights into an engine that computes nothing meanwhile.

        If the buckets can be pickled, the ranks iterate over them themselves. Others are copied to them one by one,
        through memory of one bucket's size, as are all buckets if the engine spans nodes.

        Raises:
            WeightSyncError: see :meth:`BaseRollout.update_weights`.
            RolloutError: the engine failed.
        """
        whole = dump_remote(buckets, lambda: self._encode_whole(buckets, version), self._node)
        if whole is not None:
            return await self._send(*whole)
        reports: list[WeightReport] = []
        await self._send(LoadStep(self._answer_path(), version, self._weights))
        async with aclosing(share_buckets(buckets, self._node)) as shared:
            async for bucket in shared:
                reports.append(await self._send(LoadStep(self._answer_path(), version, buckets=bucket)))
        await self._send(LoadStep(self._answer_path(), version, ends=True))
        return join_reports(reports, version)

    def _encode_whole(self, buckets: Any, version: int) -> tuple[LoadStep, str]:
        if dataclasses.is_dataclass(buckets) and hasattr(buckets, "readers"):
            # The sender waits for each process that iterates over the buckets.
            buckets = dataclasses.replace(buckets, readers=self._ranks)  # type: ignore[type-var]
        step = LoadStep(self._answer_path(), version, self._weights, buckets, ends=True)
        return step, step.encode()

    async def _send(self, step: LoadStep, text: str = "") -> WeightReport:
        await self._carry(text or step.encode())
        return await asyncio.to_thread(self._read_answers, step)

    def _read_answers(self, step: LoadStep) -> WeightReport:
        paths = sorted(Path(step.answer).parent.glob(f"{Path(step.answer).name}.*"))
        answers = [pickle.loads(path.read_bytes()) for path in paths]
        for path in paths:
            path.unlink()
        if len(answers) != self._ranks:
            raise WeightSyncError(
                f"{len(answers)} of {self._ranks} ranks of {self._engine} loaded weights of version {step.version}"
            )
        return same_report(answers, step.version)

    def _answer_path(self) -> str:
        self._steps += 1
        return str(self._folder / f"answer-{self._steps}")


class StepLoader:
    """A rank's side of an update: loads one step after the other into its model.

    Args:
        load: loads ``(name, tensor)`` pairs into the model.
        engine: engine's name, for messages.
    """

    def __init__(self, load: Callable[[Iterator[tuple[str, Tensor]]], object], engine: str) -> None:
        self._load, self._engine = load, engine
        self._check: UpdateCheck | None = None
        self._name = ""

    def carry_out(self, step: LoadStep) -> WeightReport:
        """Load a step's buckets, checked against the model.

        Raises:
            WeightSyncError: the model has no such tensor, or the engine cannot load it; the message names the tensor.
        """
        if step.begins is not None:
            self._check = UpdateCheck(step.begins)
        if self._check is None:
            raise WeightSyncError("no update of the weights has begun")
        check, tally = self._check, WeightTally(step.buckets)
        for bucket in tally:
            try:
                self._load(self._admit(check, bucket))
            except RollcastError:
                raise
            except Exception as error:
                raise WeightSyncError(
                    f"{self._engine} failed to load weight {self._name!r}: {type(error).__name__}: {error}",
                    tensor=self._name,
                ) from error
        if step.ends:
            check.finish(step.version)
            self._check = None
        return tally.report(step.version)

    def _admit(self, check: UpdateCheck, bucket: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in bucket:
            self._name = name
            known = check.admit(name, tensor)
            if known is not None:
                # A copy: SGLang's FusedMoE keeps a tensor until its partner arrives, but the bucket's memory is reused.
                yield known, tensor.clone()


def answer_step(
    text: str,
    rank: int,
    carry_out: Callable[[LoadStep], WeightReport],
    gather: Callable[[Answer], Sequence[Answer]] | None = None,
) -> None:
    """Carry out a step in a rank's process, and write its report or error to the answer's file.

    Args:
        text: the encoded step.
        rank: number of the rank.
        carry_out: loads the step's buckets.
        gather: returns the answers of all ranks by rank; called on each. The first rank, which shares the rollout's
            files, then writes them all. None if every rank does.
    """
    path, _, encoded = text.partition("\n")
    answer: Answer
    try:
        answer = carry_out(pickle.loads(base64.b64decode(encoded)))
    except RollcastError as error:
        answer = error
    except Exception as error:  # noqa: BLE001  # raised again in the rollout's process
        answer = WeightSyncError(f"the engine failed to load weights: {type(error).__name__}: {error}")
    answers = [(rank, answer)]
    if gather is not None:
        everyone = gather(answer)
        answers = list(enumerate(everyone)) if rank == 0 else []
    for number, state in answers:
        Path(f"{path}.{number}").write_bytes(pickle.dumps(state))
