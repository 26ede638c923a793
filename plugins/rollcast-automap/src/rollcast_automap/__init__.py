"""The memory model and the plan of a run."""
