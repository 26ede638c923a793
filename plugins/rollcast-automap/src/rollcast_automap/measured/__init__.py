"""Runs that were made, against their predictions."""
