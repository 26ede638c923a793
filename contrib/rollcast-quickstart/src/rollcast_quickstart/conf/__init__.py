"""The quick start's recipes."""
