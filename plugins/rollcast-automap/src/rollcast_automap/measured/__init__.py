"""Comparison of finished runs with their predictions."""
