"""Exceptions that flux raises in addition to the built-in ``ValueError`` and ``TypeError``."""

from __future__ import annotations


class PeerFailedError(RuntimeError):
    """Another rank failed in its part of building an op, and raised its own error there.

    Attributes:
        failure: (rank as errors name it, cause, whether the cause was a wait for others); None if
            no other rank reported a failure.
    """

    def __init__(self, message: str, failure: tuple[str, str, bool] | None = None) -> None:
        super().__init__(message)
        self.failure = failure


class PeerTimeoutError(RuntimeError):
    """A peer died, stalled, or left while this rank was waiting for it.

    The op that raises it has released its shared memory and threads and cannot be used again. A new
    op can be built; if a rank is gone for good, on a new process group.
    """


class PeerDiedError(PeerTimeoutError):
    """The process of a rank on this host ended while this rank was waiting for it.

    Also raised if this rank waited for a third rank that had given up on the dead one. Raised as
    soon as the end is noticed, long before the timeout. If a rank on another host dies, the error
    is a ``PeerTimeoutError`` about its connection.
    """
