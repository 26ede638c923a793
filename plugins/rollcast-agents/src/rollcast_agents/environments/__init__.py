"""Environments: plain classes, and those of other packages."""
