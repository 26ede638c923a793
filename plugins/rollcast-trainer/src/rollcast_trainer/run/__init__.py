"""The parts of a run: task runner, run directory, checkpoints, sampling and scoring."""
