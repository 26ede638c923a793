"""Contracts of weight syncs and admissions."""
