"""Runtimes of the core."""
