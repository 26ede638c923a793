"""The notebooks of the docs run from the first cell to the last, and show what they show in the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
pytestmark = pytest.mark.long


def outputs(notebook: Any) -> list[str]:
    """What the cells of code print, without what libraries write to stderr."""
    found = [each for cell in notebook.cells if cell.cell_type == "code" for each in cell.outputs]
    shown = [each.get("text") or each["data"]["text/plain"] for each in found if each.get("name") != "stderr"]
    return [text.strip() for text in shown if text.strip()]


@pytest.fixture(params=["first-run", "trajectories"])
def notebook(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """A notebook as it is kept, and as it is after a run."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    kept, ran = (nbformat.read(FOLDER / f"{request.param}.ipynb", as_version=4) for _ in range(2))
    nbclient.NotebookClient(ran, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    return kept, ran


@pytest.mark.cases(1)
def test_a_notebook_runs_and_shows_what_is_kept(notebook: tuple[Any, Any]) -> None:
    kept, ran = map(outputs, notebook)
    without_figures = [[re.sub(r"[\d.#%]+|'.*'|[\[\]]", "", text) for text in each] for each in (kept, ran)]
    assert len(kept) == len(ran) >= 3
    assert [text.split("\n")[0].split() for text in without_figures[0]] == [
        text.split("\n")[0].split() for text in without_figures[1]
    ]


def test_the_first_run_learns() -> None:
    (shown,) = (text for text in outputs(nbformat.read(FOLDER / "first-run.ipynb", as_version=4)) if "reward" in text)
    scores = [float(each) for each in re.findall(r"reward ([\d.]+)", shown)]
    assert scores[-1] > 3 * scores[0]
