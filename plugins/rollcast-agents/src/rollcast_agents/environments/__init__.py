"""Environments: plain classes, and worlds of other packages."""
