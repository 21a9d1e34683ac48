"""Executors of a tile schedule."""
