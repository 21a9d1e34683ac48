"""Symmetric memory, and the exchanges that set it up."""
