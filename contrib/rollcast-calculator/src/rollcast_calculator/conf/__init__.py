"""The recipes of the calculator."""
