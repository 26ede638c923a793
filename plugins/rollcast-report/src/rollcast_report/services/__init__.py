"""Trackers that write to an experiment tracking library, each imported at the start of a run that names it."""
