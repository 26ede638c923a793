"""What a run stands on: task runner, run directory, checkpoints, sampling and scoring."""
