"""The task ``my_plugin``: sums of two numbers."""

import random
from pathlib import Path

from rollcast_data.contract import BasePreprocessor, PreprocessReport
from rollcast_data.files import write_jsonl

ROWS = {"train.jsonl": 2000, "test.jsonl": 200}


class MyPlugin(BasePreprocessor):
    """Sums of two numbers below 100. The same seed makes the same files."""

    def run(self, source: Path | None, output: Path, seed: int = 0) -> PreprocessReport:
        pairs = [(left, right) for left in range(100) for right in range(100)]
        random.Random(seed).shuffle(pairs)  # no sum is in both files
        rows = iter({"prompt": f"{left}+{right}=", "ground_truth": str(left + right)} for left, right in pairs)
        written = {file: write_jsonl(output / file, [next(rows) for _ in range(count)]) for file, count in ROWS.items()}
        return PreprocessReport(written)
