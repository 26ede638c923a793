"""The dataset ``my_plugin``: lines of a question, a tab and an answer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rollcast.errors import DataError
from rollcast.protocol import DataProto, Jagged
from rollcast_data.contract import BaseDataset


class MyPlugin(BaseDataset):
    """Questions as prompts, answers as ``ground_truth``."""

    def __init__(self, files: Sequence[str | Path], tokenizer: Any, config: Any) -> None:
        self.rows = [row for file in files for row in read_rows(Path(file))]
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        question, answer = self.rows[index]
        ids = self.tokenizer.encode(question, add_special_tokens=False)
        return {"index": index, "ids": ids, "question": question, "answer": answer}

    def collate(self, rows: list[dict[str, Any]]) -> DataProto:
        lengths = torch.tensor([len(row["ids"]) for row in rows])
        ids = torch.tensor([token for row in rows for token in row["ids"]], dtype=torch.int32)
        return DataProto.from_dict(
            tensors={
                "prompts": Jagged.from_lengths(ids, lengths).column(),
                "index": torch.tensor([row["index"] for row in rows]),
            },
            non_tensors={
                "raw_prompt": [row["question"] for row in rows],
                "ground_truth": [row["answer"] for row in rows],
                "data_source": ["my_plugin"] * len(rows),
                "extra_info": [{} for _ in rows],
            },
        )


def read_rows(path: Path) -> list[tuple[str, str]]:
    """Return the questions and answers of a file.

    Raises:
        DataError: a line has no tab; names file and line.
    """
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        question, tab, answer = line.partition("\t")
        if not tab:
            raise DataError(f"{path}:{number}: a line is a question, a tab and an answer; this one has no tab")
        rows.append((question, answer))
    return rows
