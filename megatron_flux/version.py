"""The package version, the single place that states it."""

__version__ = "0.1.0"
