"""Mappings on a simulated clock, and their chart."""
