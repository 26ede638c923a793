from __future__ import annotations

import json
import os
import string
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def build_tokenizer(chat_template: str | None = None, pad: bool = True, eos: bool = True) -> PreTrainedTokenizerFast:
    tokens = ["<pad>", "<eos>", "?", *string.ascii_letters, *string.digits, *" \n[]=+.,"]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>"} if pad else {}
    special |= {"eos_token": "<eos>"} if eos else {}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", padding_side="left", **special)  # type: ignore[no-untyped-call]
    fast.chat_template = chat_template
    return fast


@pytest.fixture
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    return build_tokenizer


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture
def chat_tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(CHAT_TEMPLATE)


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows as plain JSON lines, without the code under test."""

    def write(rows: Iterable[Any], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def gsm8k_dir() -> Path:
    """The real GSM8K; a test that asks for it is skipped where it is not at hand."""
    beside = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "gsm8k"
    folder = Path(os.environ.get("ROLLCAST_GSM8K_DIR", beside))
    if not (folder / "train.jsonl").is_file():
        pytest.skip(f"no GSM8K in {folder}; set ROLLCAST_GSM8K_DIR")
    return folder
