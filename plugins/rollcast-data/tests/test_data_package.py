from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import rollcast_data
from rollcast_data.schemas import DataConfig

CONF = Path(rollcast_data.__file__).parent / "conf" / "data"


@pytest.mark.parametrize("name", ["conversations", "prompts", "supervised"])
def test_each_option_names_every_key_with_its_default(name: str) -> None:
    text = (CONF / f"{name}.yaml").read_text()
    assert text.startswith("# @package data\n")
    assert OmegaConf.to_container(OmegaConf.create(text)) == {"dataset": name}


def test_the_light_modules_import_nothing_heavy() -> None:
    code = (
        "import sys, rollcast_data, rollcast_data.schemas;"
        "sys.exit(', '.join({'torch', 'transformers', 'pyarrow', 'ray'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_schema_is_announced() -> None:
    from rollcast_data.conf import SCHEMAS

    assert [(each.path, each.group, each.schema) for each in SCHEMAS] == [("data", "data", DataConfig)]
