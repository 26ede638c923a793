from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from omegaconf import OmegaConf

import rollcast_hf.conf
from rollcast_hf.schemas import HfRolloutConfig


def test_yaml_holds_the_name_alone() -> None:
    text = (Path(rollcast_hf.conf.__file__).parent / "rollout" / "hf.yaml").read_text()
    assert text.startswith("# @package rollout\n")
    assert OmegaConf.to_object(OmegaConf.create(text)) == {"name": HfRolloutConfig().name}


def test_schema_is_announced() -> None:
    (schema,) = rollcast_hf.conf.SCHEMAS
    assert (schema.path, schema.group, schema.option) == ("rollout", "rollout", "hf")
    assert schema.schema is HfRolloutConfig


def test_config_imports_no_torch() -> None:
    code = "import sys, rollcast_hf.conf, rollcast_hf.schemas; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
