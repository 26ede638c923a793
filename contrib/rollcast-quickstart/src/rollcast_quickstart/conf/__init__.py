"""Recipes of the quick start."""
