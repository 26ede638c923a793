"""Recipes of the calculator example."""
