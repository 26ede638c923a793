"""Planners that search mappings."""
