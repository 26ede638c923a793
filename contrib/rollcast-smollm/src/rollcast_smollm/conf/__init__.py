"""Recipes of the task."""
