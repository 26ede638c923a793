"""Sampling from a model for a file of prompts, and scoring of the samples."""
