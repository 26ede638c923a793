"""The task: "12 rows of 34 cards." → a call of the tool ``calculator`` with 12*34 → "408"."""

from __future__ import annotations

import ast
import itertools
import operator
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from transformers import Qwen2Config

from rollcast.contracts.reward import BaseReward, RewardResult, RewardSample
from rollcast.errors import DataError
from rollcast_calculator.tokenizer import CALL_END, CALL_START, VOCABULARY, build_tokenizer
from rollcast_data.contract import BasePreprocessor, PreprocessReport
from rollcast_data.files import write_jsonl

__all__ = ["SPLITS", "Calculation", "CalculatorReward", "Calculations", "build_model_config", "calculator"]

SPLITS: Mapping[str, int] = {"test": 500, "sft": 1000, "sft_stop": 250, "train": 6000}
"""Number of calculations in each file. No calculation is in two files."""

_OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}
_SENTENCES: Mapping[str, tuple[str, ...]] = {
    "*": ("{a} rows of {b} cards.", "{a} bags with {b} nuts in each.", "{a} times {b}."),
    "+": ("{a} cards and {b} more.", "{a} nuts plus {b} nuts."),
    "-": ("{a} cards minus {b}.", "{a} nuts but {b} eaten."),
}
_NODES: Mapping[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}
_EXPRESSION = re.compile(r"[0-9+*\- ]*")
_LONGEST = 32
"""Characters of an expression that the tool reads."""


def calculator(expression: str) -> str:
    """Calculate the value of an expression of whole numbers.

    Args:
        expression: whole numbers with +, - and *, such as 12*34.
    """
    return str(_value(expression))


def _value(expression: str) -> int:
    """Return the value of an expression.

    Raises:
        ValueError: the expression contains anything but whole numbers, ``+``, ``-`` and ``*``, or is too long.
    """
    if len(expression) > _LONGEST or not _EXPRESSION.fullmatch(expression):
        raise ValueError(f"only whole numbers, +, - and *, in at most {_LONGEST} characters, are calculated")
    try:
        return _fold(ast.parse(expression, mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is no expression") from error


def _fold(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _NODES:
        return _OPERATORS[_NODES[type(node.op)]](_fold(node.left), _fold(node.right))
    raise ValueError("only whole numbers with +, - and * between them are calculated")


class Calculation(NamedTuple):
    """A question, the expression that answers it, and the answer."""

    question: str
    expression: str
    answer: str


class Calculations(BasePreprocessor):
    """Sentences about two numbers, generated from the seed, with a tokenizer and the config of a tiny model.

    Writes sft.jsonl (both replies of 1000 conversations for the supervised warm-up), sft_stop.jsonl (both replies of
    250 conversations that decide when the warm-up stops), train.jsonl (6000 questions), test.jsonl (500 questions for
    evaluation) and the folder model, which contains no weights: set model.random_init=true.
    """

    def run(self, source: Path | None, output: Path, seed: int = 0) -> PreprocessReport:
        """Write the files to ``output``; the same seed writes the same files.

        Raises:
            DataError: a source was given, but the task is generated.
        """
        if source is not None:
            raise DataError(f"calculator generates its data and reads no source, got {source}")
        # Write the model first, because a trainer that finds its data files assumes that everything is there.
        build_tokenizer().save_pretrained(str(output / "model"))
        build_model_config().save_pretrained(str(output / "model"))
        drawn = _draw(seed)
        rows: dict[str, int] = {}
        for split, count in SPLITS.items():
            chosen = itertools.islice(drawn, count)
            written = _replies(chosen) if split.startswith("sft") else map(_question, chosen)
            rows[f"{split}.jsonl"] = write_jsonl(output / f"{split}.jsonl", written)
        return PreprocessReport(rows, ["model/ has a config and a tokenizer, no weights: set model.random_init=true"])


class CalculatorReward(BaseReward):
    """A reward of 1 for the right answer in the last reply, plus ``call`` for a calculator call that computes it.

    Args:
        call: reward of the right call, which provides a signal before the first right answer.
    """

    def __init__(self, call: float = 0.2) -> None:
        self._call = call

    def score(self, sample: RewardSample) -> RewardResult:
        """Score the conversation in ``extra_info["messages"]``."""
        messages = sample.extra_info.get("messages") or ()
        last = messages[-1] if messages else {}
        is_right = (
            sample.finished
            and last.get("role") == "assistant"
            and str(last.get("content", "")).strip() == str(sample.ground_truth)
        )
        called = any(expression == sample.extra_info.get("expression") for expression in _expressions(messages))
        score = float(is_right) + self._call * called
        return RewardResult(score, correct=is_right, extra={"right_call": float(called)})


def _expressions(messages: Iterable[Mapping[str, Any]]) -> Iterator[object]:
    for message in messages:
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            yield arguments.get("expression") if isinstance(arguments, Mapping) else None


def build_model_config() -> Qwen2Config:
    """Return the config of the model, which has 0.5 million parameters."""
    settings: dict[str, Any] = {
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
        "architectures": ["Qwen2ForCausalLM"],
    }
    return Qwen2Config(**settings)


def _question(calculation: Calculation) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": calculation.question}],
        "ground_truth": calculation.answer,
        "extra_info": {"expression": calculation.expression},
    }


def _replies(calculations: Iterable[Calculation]) -> Iterator[dict[str, Any]]:
    """Yield both replies of each conversation, each with its own prompt, so that no tool result is learned."""
    for calculation in calculations:
        question = {"role": "user", "content": calculation.question}
        function = {"name": "calculator", "arguments": {"expression": calculation.expression}}
        call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        result = {"role": "tool", "name": "calculator", "content": calculation.answer}
        yield {"prompt": [question], "response": f"{CALL_START}{calculation.expression}{CALL_END}"}
        yield {"prompt": [question, call, result], "response": calculation.answer}


def _draw(seed: int) -> Iterator[Calculation]:
    # Seed with a string, which random hashes, so that neighbouring seeds are unrelated.
    generator = random.Random(f"calculator:{seed}")  # noqa: S311  # no secret
    drawn: set[str] = set()
    while True:
        sign = generator.choice(sorted(_SENTENCES))
        a, b = generator.randint(10, 99), generator.randint(10, 99)
        if sign == "-":
            a, b = max(a, b), min(a, b)
        question = generator.choice(_SENTENCES[sign]).format(a=a, b=b)
        if question not in drawn:
            drawn.add(question)
            yield Calculation(question, f"{a}{sign}{b}", str(_OPERATORS[sign](a, b)))
