"""Fixtures of the trainer's tests: a tiny model, and the small task around it."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(
    0, str(Path(__file__).parents[2] / "rollcast-trainer" / "tests")
)  # the tools, here and in started processes
sys.path.insert(0, str(Path(__file__).parent))

from trainer_fixtures import model_folder, ray_is_up, small_task

__all__ = ["model_folder", "ray_is_up", "small_task"]

torch.set_num_threads(1)
