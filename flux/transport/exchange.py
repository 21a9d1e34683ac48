"""Small collective exchanges over a process group, for building an op."""

from __future__ import annotations

import os
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

from flux import _C
from flux.core.env import SPIN_US
from flux.core.errors import PeerDiedError, PeerFailedError, PeerTimeoutError
from flux.core.version import __version__
from flux.machine.host import memory_identity
from flux.transport.threads import Abandonable, Patience

T = TypeVar("T")

Failure = tuple[str, str, bool]
"""(The rank that failed, as errors name it; the cause; whether the cause was a wait for others)."""
_Value = tuple[Failure | None, object]
BUILD_IDENTITY: dict[str, object] = {"flux": __version__, "layout": _C.LAYOUT_NUMBER}
"""What must be equal in processes that write into each other's memory."""


def resolve_group(group: dist.ProcessGroup | str | None) -> dist.ProcessGroup:
    """Return the process group of this argument: a group, its name, or None for the default group.

    Raises:
        ValueError: torch.distributed is not initialised, this rank is no member, or the name is
            unknown.
        TypeError: the argument has another type.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("torch.distributed is not initialised: call init_process_group first")
    if group is None:
        group = dist.group.WORLD
    if isinstance(group, str):
        try:
            found: dist.ProcessGroup = cast(Any, distributed_c10d)._resolve_process_group(group)
            return found
        except (RuntimeError, ValueError, LookupError) as error:
            raise ValueError(f"no process group is named {group!r}") from error
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup, its name or None, got {group!r}")
    return group


LEAST_S = 2.0
"""Least limit of an exchange in seconds, however small ``timeout_s`` is. Ranks arrive at a
constructor further apart than at a call, above all if they share cores."""
LOOK_S = 0.2
"""Seconds between two checks whether another rank has died or given up."""
_lost: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""Groups in which this rank has left an unfinished operation."""


def leave_unfinished(group: dist.ProcessGroup) -> None:
    """Note that this rank has left an operation of the group unfinished, so nothing may follow."""
    _lost.add(group)


class Exchange:
    """The ranks of one group, numbered within the group.

    It does not keep the group alive. So ``destroy_process_group`` ends the threads of gloo, also
    where ops are still open. Such a thread keeps the tensors of the last collective until it is
    scheduled again. If it drops them while the interpreter is being finalized, it cannot take the
    GIL and aborts the process.

    Args:
        group: a process group of the user.
        label: first words of each error: the purpose of the exchange.
        timeout_s: seconds that an exchange may take, LEAST_S at least; None: the group's own
            timeout.

    Raises:
        ValueError: this process is not a member of the group.
    """

    def __init__(
        self, group: dist.ProcessGroup, label: str = "flux", timeout_s: float | None = None
    ) -> None:
        self._group = weakref.ref(group)
        self.group_name: str = group.group_name
        self.label = label
        self.timeout_s = timeout_s
        self.rank: int = dist.get_rank(group)
        self.world: int = dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not a member of the group")
        self._name = f"rank {self.rank}"
        self._ended = False  # this rank sent or received a failure, or lost peers
        self._linked = [self]  # exchanges of one op: over all ranks, over a node's ranks

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group.

        Raises:
            RuntimeError: it has been destroyed.
        """
        group = self._group()
        if group is None:
            raise RuntimeError(f"the process group {self.group_name!r} has been destroyed")
        return group

    def inside(self, group: dist.ProcessGroup) -> Exchange:
        """Return an exchange over a subset of the ranks that builds the same op.

        A failure sent or received in one of the two is also sent in the other.
        """
        inner = Exchange(group, self.label, self.timeout_s)
        inner._name = self._name
        inner._linked = self._linked
        self._linked.append(inner)
        return inner

    def all_gather(self, value: T, *, extra_s: float = 0.0) -> list[T]:
        """Return the values of all ranks, by rank. Collective.

        Args:
            value: of this rank; must be picklable.
            extra_s: seconds that ranks may be apart in addition to ``timeout_s``.

        Raises:
            PeerFailedError: a rank has called ``tell_failure`` instead.
            PeerTimeoutError: a peer died, or did not arrive within ``timeout_s``. The group cannot
                be used again: this rank's part of a collective is left in it.
        """
        if self.world == 1:
            return [value]
        backends = dist.get_backend(self.group)  # "gloo", or "cpu:gloo,cuda:nccl"
        if "fake" in backends.replace(":", ",").split(","):
            self._ended = True
            raise ValueError(
                f"{self.label}: the process group has the backend 'fake', whose other ranks do not "
                "exist: an op needs real ones. Layers take fake and meta tensors there"
            )
        if self.group in _lost:
            self._ended = True
            raise PeerTimeoutError(
                f"{self.label}: {self._name} stopped waiting for its peers earlier and left a "
                "collective unfinished in the process group: use a new group"
            )
        try:
            # Unfinished from here on, whatever is raised between two lines: by a signal handler of
            # the user, say. The next exchange would receive what this one was sent.
            _lost.add(self.group)
            call = self._start(None, value)
            self._wait(call, "exchange what an op is built from", extra_s)
            if call.error is not None:
                raise self._lost_while_building(call.error)
            entries = call.result()
            _lost.discard(self.group)
        except BaseException:
            self._give_up()
            raise
        failures = [failure for failure, _ in entries if failure is not None]
        if failures:
            self._ended = True
            raise _peer_failed(self.label, failures)
        return [cast(T, value) for _, value in entries]

    def tell_failure(self, error: Exception, timeout_s: float) -> None:
        """Take part in the peers' next exchange with the message that this rank has failed.

        All ranks exchange the same things in the same order, so peers receive the failure at their
        next ``all_gather``, wherever this rank's error occurred. If all ranks fail alike, this is a
        collective of its own.

        An op on several nodes is built with several exchanges, and a rank cannot know in which of
        them a peer waits. So every rank ends every exchange of the op: a rank that receives a
        failure in one exchange sends it in the others. The wait for peers that have died, or wait
        for something else, is limited to ``timeout_s``.

        Args:
            error: the error of this rank; for a ``PeerFailedError``, the peer and its cause are
                sent.
            timeout_s: in seconds; LEAST_S at least.
        """
        failure = getattr(error, "failure", None) or (
            self._name,
            f"{type(error).__name__}: {error}",
            isinstance(error, PeerTimeoutError),
        )
        calls = []
        for exchange in self._linked:
            if not exchange._ended and exchange.group not in _lost and exchange.world > 1:
                exchange._ended = True
                calls.append((exchange.group, exchange._start(failure, None)))
        patience = Patience(max(timeout_s, LEAST_S))
        for group, call in calls:
            with _losing(group, call):
                while not call.wait(LOOK_S) and patience.left_s > 0:
                    pass

    def within(self, what: str, body: Callable[[], T]) -> T:
        """Return ``body()``, which waits for peers inside torch, on a thread of its own.

        Args:
            what: what the peers are expected to do; part of the error.
            body: keeps running unobserved after the time limit or a Ctrl-C.

        Raises:
            PeerDiedError: the process of another rank on this host has ended.
            PeerTimeoutError: the call took longer than ``timeout_s``, or another rank has given up.
        """
        call = Abandonable(body)
        self._wait(call, what)
        error = call.error
        if isinstance(error, RuntimeError) and not isinstance(error, PeerTimeoutError):
            text = f"{self.label}: {self._name} could not {what}: {error}"
            raise PeerTimeoutError(text) from error
        return call.result()

    def _start(self, failure: Failure | None, value: object) -> Abandonable[list[_Value]]:
        """Begin the collective that gathers this rank's failure, or its value."""
        sent = (failure, value, (uuid.uuid4().hex, memory_identity(), os.getpid()))

        def gather() -> list[_Value]:
            values = [sent] * self.world
            dist.all_gather_object(values, sent, group=self.group)
            if self.group not in _peers:
                _peers[self.group] = _Peers(self.group, self.rank, [value[2] for value in values])
            return [(failure, value) for failure, value, _ in values]

        return Abandonable(gather)

    def _lost_while_building(self, error: BaseException) -> BaseException:
        """Return the error of an exchange whose collective has raised ``error``."""
        if not isinstance(error, RuntimeError) or isinstance(error, PeerTimeoutError):
            return error
        text = f"{self.label}: {self._name} lost a peer while building the op: {error}"
        lost = PeerTimeoutError(text)
        lost.__cause__ = error
        return lost

    def _wait(self, call: Abandonable[Any], what: str, extra_s: float = 0.0) -> None:
        """Wait for a collective in which the peers are expected to do ``what``.

        The limit is ``timeout_s``, LEAST_S at least, and ``extra_s`` more.

        A rank learns of another rank's death in one of three ways. gloo reports it to the ranks
        that exchange data with the dead one. Other ranks on its host see that its process has
        ended. All others wait for ranks that have given up, and read that from the store of the
        group.

        Raises:
            PeerDiedError: the process of another rank on this host has ended.
            PeerTimeoutError: the wait exceeds the limit, or another rank has given up.
        """
        limit_s = inf if self.timeout_s is None else max(self.timeout_s, LEAST_S) + extra_s
        patience = Patience(limit_s)
        while not call.wait(max(0.0, min(LOOK_S, patience.left_s))):
            if patience.left_s <= 0:
                raise PeerTimeoutError(
                    f"{self.label}: {self._name} waited more than {limit_s:g} s (timeout_s, "
                    f"{LEAST_S:g} s at least) for its peers to {what}"
                )
            peers = _peers.get(self.group)
            lost = None if peers is None else peers.lost()
            if lost is not None and not call.wait(LOOK_S):
                self._give_up()  # other ranks may see only that this rank does not arrive
                raise type(lost)(f"{self.label}: {self._name} cannot continue: {lost}")

    def _give_up(self) -> None:
        """Stop using the group, and post that for the ranks that still wait in it."""
        self._ended = True
        _lost.add(self.group)
        if self.group in _peers:
            _peers[self.group].post(f"{self._name} lost a peer, or stopped waiting for it")

    def is_over(self, group: dist.ProcessGroup) -> bool:
        """Return whether this is the group, which has not been destroyed then."""
        return self._group() is group

    def agree(self, problem: Exception | None, spec: Mapping[str, object]) -> None:
        """Check that all ranks build the same thing. Collective.

        The comparison includes the version of flux and the layout number of shared memory. A rank
        whose arguments were rejected takes part too, so that all ranks receive its error.

        Raises:
            ValueError: on every rank alike, naming the rank that was rejected or differs.
            TypeError: the same, if the rank's own error is a TypeError.
        """
        entries = self.all_gather(
            (
                type(problem).__name__,
                str(problem) if problem else "",
                {**BUILD_IDENTITY, **spec},
            )
        )
        if problem is not None:
            raise problem
        for rank, (kind, text, _) in enumerate(entries):
            if text:
                error = TypeError if kind == "TypeError" else ValueError
                raise error(f"{self.label}: rank {rank} refused its arguments: {text}")
        texts = [repr(sorted(entry.items())) for _, _, entry in entries]
        common = texts.index(Counter(texts).most_common(1)[0][0])
        for rank, (_, _, entry) in enumerate(entries):
            if texts[rank] != texts[common]:
                base = entries[common][2]
                differing = ", ".join(
                    f"{key} = {entry.get(key)!r} (rank {common}: {base.get(key)!r})"
                    for key in sorted(set(entry) | set(base))
                    if entry.get(key) != base.get(key)
                )
                raise ValueError(f"{self.label}: ranks disagree; rank {rank} has {differing}")


def spin_seconds(exchange: Exchange, local: Sequence[bool]) -> float:
    """Return how long to spin: briefly when ranks of this host share cores. Collective."""
    cores: set[int] = set()
    for here, of_rank in zip(local, exchange.all_gather(os.sched_getaffinity(0)), strict=True):
        cores |= of_rank if here else set()
    micros = SPIN_US.get()
    if micros < 0:
        micros = 200.0 if sum(local) <= len(cores) else 5.0
    return micros * 1e-6


class _Peers:
    """The state of a group's other ranks, from sources outside the collectives.

    Sources are the processes of ranks on this host, and a message in the store of the group. A rank
    writes that message if it leaves a collective unfinished. A store that does not answer, for
    example because its process is stopped, delays no rank.

    Args:
        group: a process group.
        rank: this rank.
        identities: by rank: (a unique id, its memory_identity(), its process id).
    """

    def __init__(
        self, group: dist.ProcessGroup, rank: int, identities: Sequence[tuple[str, str, int]]
    ) -> None:
        here = identities[rank][1]
        # The id of rank 0 makes the key unique: another group on the same store may have the same
        # name.
        self._key = f"flux/lost/{identities[0][0]}"
        # A connection of its own: a request that waits, for example to connect, blocks all others
        # on its connection.
        store = cast(Any, distributed_c10d)._world.pg_map[group][1]
        self._store: dist.Store = store.clone()
        self._question: Abandonable[str] | None = None
        self._processes = _C.Processes(
            [
                process if identity == here and peer != rank else 0
                for peer, (_, identity, process) in enumerate(identities)
            ]
        )

    def lost(self) -> PeerTimeoutError | None:
        """Return why the group cannot go on; None if no reason is known."""
        for peer, process in enumerate(self._processes.pids):
            if self._processes.ended(peer):
                return PeerDiedError(f"rank {peer} died (process {process} ended)")
        word = self._read()
        return PeerTimeoutError(word) if word else None

    def post(self, text: str) -> None:
        """Write the message for the other ranks."""
        Abandonable(lambda: self._store.set(self._key, text)).wait(LOOK_S)

    def _read(self) -> str:
        """Return the message of another rank; "" if there is none, or no answer yet."""
        if self._question is None:
            self._question = Abandonable(self._ask)
        if not self._question.wait(LOOK_S):
            return ""
        answered, self._question = self._question, None
        try:
            return answered.result()
        except RuntimeError:  # the store's process is gone; the collective breaks too, or times out
            return ""

    def _ask(self) -> str:
        return self._store.get(self._key).decode() if self._store.check([self._key]) else ""


_peers: weakref.WeakKeyDictionary[dist.ProcessGroup, _Peers] = weakref.WeakKeyDictionary()
"""By group, for groups that have exchanged a value."""


@contextmanager
def _losing(group: dist.ProcessGroup, call: Abandonable[Any]) -> Iterator[None]:
    """Mark the group as lost if ``call`` is not done at the end of the context."""
    try:
        yield
    finally:
        if not call.done:
            _lost.add(group)


def _peer_failed(label: str, failures: list[Failure]) -> PeerFailedError:
    """Return the error for the received failures; a cause is preferred over a wait for others."""
    failure = min(failures, key=lambda failure: failure[2])
    rank, why, _ = failure
    return PeerFailedError(f"{label}: {rank} failed: {why}", failure)
