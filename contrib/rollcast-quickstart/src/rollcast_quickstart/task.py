"""The task of the quick start, to sort eight digits: "52917304=" → "01234579"."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import Qwen2Config, Qwen3MoeConfig

from rollcast.errors import DataError
from rollcast_data.contract import BasePreprocessor, PreprocessReport
from rollcast_data.files import write_jsonl
from rollcast_quickstart.tokenizer import VOCABULARY, build_tokenizer

__all__ = ["DIGITS", "SPLITS", "SortDigits", "build_mixture_config", "build_model_config"]

DIGITS = 8
"""Number of digits in a prompt."""

SPLITS: Mapping[str, int] = {"test": 500, "sft": 2000, "sft_stop": 500, "train": 6000}
"""Number of rows in each file. No prompt is in two files."""

#: Sizes that both models share.
_SIZES: Mapping[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "pad_token_id": VOCABULARY.index("<pad>"),
    "bos_token_id": VOCABULARY.index("<bos>"),
    "eos_token_id": VOCABULARY.index("<eos>"),
}


class SortDigits(BasePreprocessor):
    """Digits to sort, generated from the seed, with a tokenizer and the configs of two tiny models.

    Writes sft.jsonl (2000 rows for the supervised warm-up), sft_stop.jsonl (500 rows that decide
    when the warm-up stops), train.jsonl (6000 prompts), test.jsonl (500 prompts for evaluation)
    and the folders model and mixture, which contain no weights: set model.random_init=true.
    """

    def run(self, source: Path | None, output: Path, seed: int = 0) -> PreprocessReport:
        """Write the files to ``output``; the same seed writes the same files.

        Raises:
            DataError: a source was given, but the task is generated.
        """
        if source is not None:
            raise DataError(f"sort_digits generates its data and reads no source, got {source}")
        # Write the model first, because a trainer that finds its data files assumes that everything is there.
        for name, config in (("mixture", build_mixture_config()), ("model", build_model_config())):
            build_tokenizer().save_pretrained(str(output / name))
            config.save_pretrained(str(output / name))
        drawn = iter(_draw(sum(SPLITS.values()), seed))
        rows: dict[str, int] = {}
        for split, count in SPLITS.items():
            written = [_row(digits, split) for digits in itertools.islice(drawn, count)]
            rows[f"{split}.jsonl"] = write_jsonl(output / f"{split}.jsonl", written)
        note = "model/ and mixture/ have a config and a tokenizer, no weights: set model.random_init=true"
        return PreprocessReport(rows, [note])


def build_model_config() -> Qwen2Config:
    """Return the config of the model, which has 0.5 million parameters."""
    return Qwen2Config(**_SIZES, architectures=["Qwen2ForCausalLM"])


def build_mixture_config() -> Qwen3MoeConfig:
    """Return the config of a mixture of experts, of which each token visits two of four in each layer."""
    mixture: dict[str, Any] = {
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
        "architectures": ["Qwen3MoeForCausalLM"],
    }
    return Qwen3MoeConfig(**_SIZES, **mixture)


def sort(digits: str) -> str:
    """Return the answer to a prompt's digits."""
    return "".join(sorted(digits))


def _row(digits: str, split: str) -> dict[str, str]:
    # The rows that stop the warm-up are generated from, like those of the evaluation, and can be
    # asked for their loss too.
    columns = {"sft": ("response",), "sft_stop": ("response", "ground_truth")}.get(split, ("ground_truth",))
    return {"prompt": f"{digits}=", **dict.fromkeys(columns, sort(digits))}


def _draw(count: int, seed: int) -> list[str]:
    # Seed with a string, which random hashes, so that neighbouring seeds are unrelated.
    generator = random.Random(f"sort_digits:{seed}")  # noqa: S311  # no secret
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn["".join(generator.choices("0123456789", k=DIGITS))] = None
    return list(drawn)
