"""Contracts of weight syncs, admissions and generators."""
