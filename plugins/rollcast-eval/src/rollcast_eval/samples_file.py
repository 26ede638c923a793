"""A file of samples that grows by whole prompts; an interrupted command continues it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollcast.contracts.files import replace_file
from rollcast.errors import ConfigError, DataError

__all__ = ["SamplesFile"]


class SamplesFile:
    """A file of JSON lines with ``samples`` lines per prompt, and the settings with which they were generated.

    Args:
        path: path of the file; the settings are in ``PATH.settings.json``.
        settings: settings that the samples depend on.
        samples: number of lines per prompt.
        overwrite: drop the samples that the file holds.

    Raises:
        ConfigError: the file holds samples that were made with other settings.
        DataError: the file holds other data than samples, or cannot be written.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], samples: int, overwrite: bool = False) -> None:
        self.path = path
        self._samples = samples
        self._settings = json.loads(json.dumps(settings))
        self._beside = path.with_name(f"{path.name}.settings.json")
        self.rows: dict[int, list[dict[str, Any]]] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A command that failed before its first samples leaves an empty file, which has nothing to lose.
            if path.exists() and path.stat().st_size > 0:
                self._check_settings(overwrite)
                if not overwrite:
                    self._read()
            replace_file(self._beside, json.dumps(self._settings, indent=2) + "\n")
            replace_file(path, "".join(_line(row) for index in sorted(self.rows) for row in self.rows[index]))
        except OSError as error:
            raise DataError(f"samples cannot be written to {path}: {error}") from error

    def _check_settings(self, overwrite: bool) -> None:
        if not self._beside.exists():
            raise ConfigError(f"{self.path} exists and is no file of samples; choose another")
        if overwrite:
            return
        before = json.loads(self._beside.read_text())
        keys = sorted({key for key in {**before, **self._settings} if before.get(key) != self._settings.get(key)})
        if keys:
            shown = "; ".join(f"{key} was {before.get(key)!r}, is {self._settings.get(key)!r}" for key in keys[:4])
            raise ConfigError(
                f"{self.path} holds samples with other settings ({shown}); continue with its settings, choose another "
                "file, or replace its samples with --overwrite"
            )

    def _read(self) -> None:
        """Read the samples of complete prompts; an interrupted command may have left the last one incomplete."""
        lines = self.path.read_text().splitlines()
        for number, text in enumerate(lines, 1):
            try:
                row = json.loads(text)
                self.rows.setdefault(int(row["index"]), []).append(row)
            except (ValueError, KeyError, TypeError) as error:
                if number < len(lines):
                    raise DataError(f"{self.path}, line {number} is no sample: {error!r}") from error
        self.rows = {index: rows for index, rows in self.rows.items() if len(rows) == self._samples}

    def missing(self, prompts: int) -> list[int]:
        """Return the indices below ``prompts`` of prompts that have no samples yet."""
        return [index for index in range(prompts) if index not in self.rows]

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append the samples of whole prompts, each with its prompt's ``index``.

        Raises:
            DataError: the samples cannot be written.
        """
        try:
            with self.path.open("a") as file:
                file.writelines(_line(row) for row in rows)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise DataError(f"samples cannot be written to {self.path}: {error}") from error
        for row in rows:
            self.rows.setdefault(int(row["index"]), []).append(dict(row))

    def in_order(self) -> list[dict[str, Any]]:
        """Return all rows, grouped by prompt and in the order of the prompts."""
        return [row for index in sorted(self.rows) for row in self.rows[index]]


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, default=str) + "\n"
