"""Loading weights inside SGLang's schedulers, as a custom weight loader of SGLang's.

SGLang hands a loader the model and named tensors, and takes nothing back, and an error of a loader ends the
scheduler. So the name of the one tensor says what to do, and answers are files.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcast.contracts.weights import WeightReport
from rollcast.errors import RollcastError, WeightSyncError
from rollcast_serving.model_weights import ModelWeights, UpdateCheck
from rollcast_serving.receiving import WeightTally

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LoadStep", "load", "read_answer"]


@dataclass(frozen=True)
class LoadStep:
    """Part of an update, or all of it.

    Attributes:
        answer: path that the answer of each tensor-parallel rank begins with.
        version: of the weights.
        begins: what the model has, if the update begins here.
        buckets: to go through; can be pickled.
        ends: whether the update ends here.
    """

    answer: str
    version: int
    begins: ModelWeights | None = None
    buckets: Iterable[Sequence[tuple[str, Tensor]]] = ()
    ends: bool = False

    def encode(self) -> str:
        """As a text that survives as a tensor's name.

        Raises:
            TypeError, AttributeError, pickle.PicklingError: the buckets cannot be pickled.
        """
        # The path apart, so that there is an answer to what cannot be unpickled too.
        return f"{self.answer}\n{base64.b64encode(pickle.dumps(self)).decode()}"


def read_answer(step: LoadStep, ranks: int) -> WeightReport:
    """What the ranks read in a step; the answers' files are gone afterwards.

    Raises:
        WeightSyncError: a rank failed, or they read different things.
    """
    answers: list[Any] = []
    for rank in range(ranks):
        path = Path(f"{step.answer}.{rank}")
        if not path.exists():
            raise WeightSyncError(f"rank {rank} of SGLang loaded nothing of version {step.version}")
        answers.append(pickle.loads(path.read_bytes()))
        path.unlink()
    for answer in answers:
        if isinstance(answer, RollcastError):
            raise answer
    first: WeightReport = answers[0]
    if any(answer.checksums != first.checksums for answer in answers):
        raise WeightSyncError(f"the ranks of SGLang read different weights of version {step.version}")
    return first


class _Update:
    """The update that is under way in this process."""

    present: _Update | None = None

    def __init__(self, model: Any, weights: ModelWeights) -> None:
        self._model = model
        self._check = UpdateCheck(weights)
        self._name = ""

    def take(self, step: LoadStep) -> WeightReport:
        tally = WeightTally(step.buckets)
        for bucket in tally:
            try:
                self._model.load_weights(self._admit(bucket))
            except RollcastError:
                raise
            except Exception as error:
                raise WeightSyncError(
                    f"SGLang failed to load weight {self._name!r}: {type(error).__name__}: {error}", tensor=self._name
                ) from error
        if step.ends:
            self._check.finish(step.version)
        return tally.report(step.version)

    def _admit(self, bucket: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in bucket:
            self._name = name
            known = self._check.admit(name, tensor)
            if known is not None:
                # Some models keep a tensor until its partner comes, and the bucket's memory is used again.
                yield known, tensor.clone()


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """SGLang's custom weight loader: carry out the :class:`LoadStep` in the first tensor's name."""
    from sglang.srt.runtime_context import get_parallel

    path, _, encoded = named_tensors[0][0].partition("\n")
    answer: WeightReport | RollcastError
    try:
        answer = _carry_out(model, pickle.loads(base64.b64decode(encoded)))
    except RollcastError as error:
        answer = error
    except Exception as error:  # noqa: BLE001  # raised again in the rollout's process
        answer = WeightSyncError(f"SGLang failed to load weights: {type(error).__name__}: {error}")
    Path(f"{path}.{get_parallel().tp_rank}").write_bytes(pickle.dumps(answer))


def _carry_out(model: Any, step: LoadStep) -> WeightReport:
    if step.begins is not None:
        _Update.present = _Update(model, step.begins)
    if _Update.present is None:
        raise WeightSyncError("no update of the weights has begun")
    report = _Update.present.take(step)
    if step.ends:
        _Update.present = None
    return report
