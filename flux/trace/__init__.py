"""What an op did when, on which rank."""

from .events import Event, Kind

__all__ = ["Event", "Kind"]
