"""Renderers: the model's chat template, and the public package ``renderers``."""
