"""The preprocessor ``my_plugin``: questions and answers, one pair a line, as train.jsonl and test.jsonl."""

import random
from pathlib import Path

from rollcast.errors import DataError
from rollcast_data.contract import BasePreprocessor, PreprocessReport
from rollcast_data.files import write_jsonl


class MyPlugin(BasePreprocessor):
    """Lines of ``question = answer`` from questions.txt, a tenth of which is for evaluation.

    Writes train.jsonl and test.jsonl with the columns prompt, ground_truth and data_source. The seed decides which
    questions are for evaluation.
    """

    def run(self, source: Path | None, output: Path, seed: int = 0) -> PreprocessReport:
        """Read ``source/questions.txt`` and write both files into ``output``.

        Raises:
            DataError: there is no source, or a line has no ``=``; names file and line.
        """
        rows = read_questions(source)
        random.Random(seed).shuffle(rows)
        count = max(1, len(rows) // 10)
        parts = {"test.jsonl": rows[:count], "train.jsonl": rows[count:]}
        return PreprocessReport({name: write_jsonl(output / name, part) for name, part in parts.items()})


def read_questions(source: Path | None) -> list[dict[str, str]]:
    """Return the rows of ``questions.txt``."""
    if source is None or not (source / "questions.txt").is_file():
        raise DataError(
            f"my_plugin needs a folder with questions.txt (--input, or data.preprocess_source), not {source}"
        )
    rows = []
    for number, line in enumerate((source / "questions.txt").read_text("utf-8").splitlines(), start=1):
        question, equals, answer = line.partition("=")
        if not equals:
            raise DataError(f"{source}/questions.txt:{number}: a line is 'question = answer', not {line!r}")
        rows.append({"prompt": f"{question.strip()} =", "ground_truth": answer.strip(), "data_source": "my_plugin"})
    return rows
