"""The conformance suite of preprocessors, a class of pytest tests to inherit; it needs rollcast-data.

Example, in a plugin's tests::

    from rollcast_data.testing import PreprocessorSuite

    class TestSquares(PreprocessorSuite):
        name = "squares"
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rollcast.errors import DataError
from rollcast_data.contract import BasePreprocessor, PreprocessReport, preprocessors
from rollcast_data.files import read_files
from rollcast_testing.checks import require

__all__ = ["PreprocessorSuite"]


class PreprocessorSuite:
    """Conformance tests of one preprocessor; set :attr:`name`.

    For one that reads a source, override :meth:`write_source`.
    """

    #: Name of the preprocessor in ``rollcast.preprocessors``.
    name: ClassVar[str] = ""
    #: Pattern of a file's name → columns that each of its rows has to have.
    columns: ClassVar[Mapping[str, Sequence[str]]] = {"*": ("prompt",)}
    #: True if another seed leads to other files.
    uses_seed: ClassVar[bool] = False

    def write_source(self, folder: Path) -> Path | None:  # for those that override it
        """Write raw data into ``folder`` and return the path for ``--source``; None if the task is generated."""
        return None

    @pytest.fixture
    def preprocessor_class(self) -> type[BasePreprocessor]:
        """Return the class under test; by default the plugin :attr:`name`."""
        if not self.name:
            raise NotImplementedError(
                f"{type(self).__name__} must set `name` or override the fixture `preprocessor_class`"
            )
        return preprocessors.get(self.name, requested_by=f"{type(self).__name__}.name")

    @pytest.fixture
    def source(self, tmp_path: Path) -> Path | None:
        """Return the raw data."""
        (tmp_path / "source").mkdir()
        return self.write_source(tmp_path / "source")

    def run(self, cls: type[BasePreprocessor], source: Path | None, output: Path, seed: int = 0) -> PreprocessReport:
        """Run the preprocessor into ``output``, which exists, as ``rollcast preprocess`` does."""
        output.mkdir(exist_ok=True)
        return cls().run(source, output, seed)

    def test_it_has_a_help_text(self, preprocessor_class: type[BasePreprocessor]) -> None:
        own = vars(preprocessor_class).get("__doc__")
        require(bool(own and inspect.cleandoc(own)), "the class has a docstring, the help text of the command")

    def test_the_report_has_every_file(
        self, preprocessor_class: type[BasePreprocessor], source: Path | None, tmp_path: Path
    ) -> None:
        report = self.run(preprocessor_class, source, tmp_path / "out")
        require(isinstance(report, PreprocessReport), f"returns a PreprocessReport, not a {type(report).__name__}")
        require(bool(report.rows), "the report names at least one file with rows")
        for name, count in report.rows.items():
            file = tmp_path / "out" / name
            require(file.is_file(), f"the report's file {name} exists in the output folder")
            rows_in_file = len(read_files([file]))
            require(rows_in_file == count > 0, f"{name} has the report's {count} rows, not {rows_in_file}")
        require(all(isinstance(note, str) and note for note in report.notes), "notes are texts")

    def test_rows_have_the_columns(
        self, preprocessor_class: type[BasePreprocessor], source: Path | None, tmp_path: Path
    ) -> None:
        report = self.run(preprocessor_class, source, tmp_path / "out")
        for name in report.rows:
            columns = [column for pattern, some in self.columns.items() if fnmatch(name, pattern) for column in some]
            for number, row in enumerate(read_files([tmp_path / "out" / name])):
                missing = [column for column in columns if row.values.get(column) is None]
                require(not missing, f"row {number} of {name} has the columns {missing}")

    def test_rows_survive_json(
        self, preprocessor_class: type[BasePreprocessor], source: Path | None, tmp_path: Path
    ) -> None:
        report = self.run(preprocessor_class, source, tmp_path / "out")
        for name in report.rows:
            for row in read_files([tmp_path / "out" / name])[:20]:
                again: Mapping[str, Any] = json.loads(json.dumps(row.values))
                require(again == row.values, f"a row of {name} is the same after JSON, which samples and reports use")

    def test_the_same_seed_gives_the_same_bytes(
        self, preprocessor_class: type[BasePreprocessor], source: Path | None, tmp_path: Path
    ) -> None:
        outputs = []
        for number, seed in enumerate((0, 0, 1)):
            self.run(preprocessor_class, source, tmp_path / str(number), seed)
            outputs.append(_data_of(tmp_path / str(number)))
        require(outputs[0].keys() == outputs[1].keys(), "the same seed writes the same files")
        changed = [name for name in outputs[0] if outputs[0][name] != outputs[1][name]]
        require(not changed, f"the same seed writes the same bytes; these differ: {', '.join(changed)}")
        if self.uses_seed:
            require(outputs[0] != outputs[2], "with uses_seed, another seed writes other files")
        else:
            require(outputs[0] == outputs[2], "without uses_seed, another seed writes the same files")

    def test_running_again_replaces_the_files(
        self, preprocessor_class: type[BasePreprocessor], source: Path | None, tmp_path: Path
    ) -> None:
        first = self.run(preprocessor_class, source, tmp_path / "out")
        second = self.run(preprocessor_class, source, tmp_path / "out")
        require(dict(first.rows) == dict(second.rows), f"a second run writes the same rows, not {dict(second.rows)}")
        for name, count in second.rows.items():
            rows_in_file = len(read_files([tmp_path / "out" / name]))
            require(rows_in_file == count, f"after a second run {name} has {count} rows, not {rows_in_file}")

    def test_it_writes_only_its_output(
        self,
        preprocessor_class: type[BasePreprocessor],
        source: Path | None,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        monkeypatch.chdir(elsewhere)
        before = _data_of(tmp_path / "source")
        self.run(preprocessor_class, source, tmp_path / "out")
        require(_data_of(tmp_path / "source") == before, "the source is left as it is")
        written = sorted(path.name for path in elsewhere.iterdir())
        require(not written, f"nothing is written into the working directory: {written}")

    def test_a_missing_source_is_named(self, preprocessor_class: type[BasePreprocessor], tmp_path: Path) -> None:
        if self.write_source(tmp_path) is None:
            pytest.skip("the task is generated")
        missing = tmp_path / "no_such_source"
        with pytest.raises(DataError, match="no_such_source"):
            self.run(preprocessor_class, missing, tmp_path / "out")


def _data_of(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder; a model's folder is left out, whose files name library versions."""
    return dict(sorted(_walk(folder)))


def _walk(folder: Path) -> Iterator[tuple[str, bytes]]:
    for file in folder.rglob("*"):
        if file.is_file():
            yield str(file.relative_to(folder)), file.read_bytes()
