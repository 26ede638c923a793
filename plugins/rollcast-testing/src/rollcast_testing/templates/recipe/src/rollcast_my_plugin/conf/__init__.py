"""The recipe ``my_plugin``."""
