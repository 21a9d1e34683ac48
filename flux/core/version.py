"""The version of the package; also works in a source tree that is not installed."""

__version__ = "0.1.0"
