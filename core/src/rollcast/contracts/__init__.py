"""Contracts between the core and its plugins, one module each. No module imports torch."""
