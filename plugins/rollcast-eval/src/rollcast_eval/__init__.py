"""Samples of a model for a file of prompts, and their accuracy."""
