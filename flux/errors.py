"""Exceptions that flux raises beside the built-in ``ValueError`` and ``TypeError``."""

from __future__ import annotations


class PeerFailedError(RuntimeError):
    """Another rank could not do its part of building an op, which it says in its own error."""


class PeerTimeoutError(RuntimeError):
    """A peer died, stalled, or left while this rank was waiting for it.

    The op that raises it has released its shared memory and threads and cannot be used again; a new
    op can be built, on a new process group if a rank is gone for good.
    """
