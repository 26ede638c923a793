"""What a run prepares before its workers start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from trainer_tools import SmallTask

from rollcast.config import compose
from rollcast_data.contract import BasePreprocessor, PreprocessReport, preprocessors
from rollcast_trainer.ppo import PpoTrainer
from rollcast_trainer.run.run import Run
from rollcast_trainer.run.settings import check_run


def test_a_model_that_the_run_itself_writes_gets_the_users_changes(small_task: SmallTask, tmp_path: Path) -> None:
    class WritesModel(BasePreprocessor):
        """Data and a model."""

        def run(self, source: Path | None, output: Path, seed: int = 0) -> PreprocessReport:
            shutil.copytree(small_task.model, output / "model")
            for name in ("train.jsonl", "test.jsonl"):
                shutil.copy(small_task.folder / name, output / name)
            return PreprocessReport({"train.jsonl": 15})

    made = tmp_path / "made"
    changes = [
        f"model.path={made / 'model'}",
        "model.override_config={rms_norm_eps: 0.5}",
        "data.preprocess=writes_model",
        f"data.preprocess_dir={made}",
        f"data.train_files=[{made / 'train.jsonl'}]",
        f"data.val_files=[{made / 'test.jsonl'}]",
    ]
    with preprocessors.temporarily("writes_model", WritesModel):
        config = compose(small_task.ppo(tmp_path / "run", *changes)).config
        with Run(check_run(config, PpoTrainer)) as run:
            changed = json.loads((Path(run.settings.model.path) / "config.json").read_text())
    assert changed["rms_norm_eps"] == 0.5
    assert json.loads((made / "model" / "config.json").read_text())["rms_norm_eps"] != 0.5
