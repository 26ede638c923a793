"""Profilers of a run's steps, and the measured costs of its passes."""
