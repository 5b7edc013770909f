"""The version of this package, in a file of its own, so that other files may import it."""

__version__ = "0.1.0"
