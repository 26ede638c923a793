"""Version of the installed core."""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("rollcast")
