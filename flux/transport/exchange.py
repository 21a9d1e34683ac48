"""Small collective exchanges over a process group, used when an op is built."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol, TypeVar, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

import flux
from flux import _C
from flux.errors import PeerFailedError, PeerTimeoutError

T = TypeVar("T")


def build_identity() -> dict[str, object]:
    """Return what must be the same for processes that write into each other's memory."""
    return {"flux": flux.__version__, "layout": _C.LAYOUT_NUMBER}


def resolve_group(group: dist.ProcessGroup | str | None) -> dist.ProcessGroup:
    """The process group that the user means: a group, its name, or None for the default group.

    Raises:
        ValueError: torch.distributed is not initialised, this rank is no member, or the name is
            unknown.
        TypeError: something else was passed.
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


class _OfGroup(Protocol):
    """What is kept for a group, and can be closed."""

    @property
    def group(self) -> dist.ProcessGroup: ...

    def close(self) -> None: ...


G = TypeVar("G", bound=_OfGroup)


def kept_for(
    group: dist.ProcessGroup | str | None,
    kept: dict[str, G],
    make: Callable[[dist.ProcessGroup], G],
) -> G:
    """What ``kept`` has for a group, by name; ``make`` makes it at the first use, collectively."""
    group = resolve_group(group)
    found = kept.get(group.group_name)
    if found is not None and found.group is not group:  # a destroyed group's name, used again
        found.close()
        found = None
    if found is None:
        found = kept[group.group_name] = make(group)
    return found


class Exchange:
    """The ranks of one group, numbered within the group."""

    def __init__(self, group: dist.ProcessGroup, label: str = "flux") -> None:
        self.group = group
        self.label = label
        self.rank: int = dist.get_rank(group)
        self.world: int = dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not a member of the group")

    def all_gather(self, value: T) -> list[T]:
        """Everybody's value, by rank. Collective.

        Raises:
            PeerFailedError: a rank has called ``tell_failure`` in place of this.
            PeerTimeoutError: a peer died or stalled; when, is up to the group and its timeout.
        """
        told = self._gather((None, value))
        for rank, (failure, _) in enumerate(told):
            if failure is not None:
                raise PeerFailedError(f"{self.label}: rank {rank} failed: {failure}")
        return [cast(T, one) for _, one in told]

    def tell_failure(self, error: Exception, timeout_s: float) -> None:
        """Take part in what the others exchange next by saying that this rank goes no further.

        All ranks exchange the same things in the same order, so whatever an error came between,
        peers hear of it at their next ``all_gather``. If all ranks fail alike, this is a
        collective of its own. Peers that have died already, or wait for something else, are waited
        for no longer than ``timeout_s``.

        Args:
            error: what was raised; nothing is told of one that peers have raised as well.
            timeout_s: in seconds.
        """
        if isinstance(error, (PeerFailedError, PeerTimeoutError)):
            return

        def tell() -> None:
            with suppress(PeerTimeoutError):  # nobody is left to hear of it
                self._gather((f"{type(error).__name__}: {error}", None))

        thread = threading.Thread(target=tell, daemon=True)
        thread.start()
        thread.join(timeout_s)

    def _gather(self, value: tuple[str | None, object]) -> list[tuple[str | None, object]]:
        if self.world == 1:
            return [value]
        values = [value] * self.world
        try:
            dist.all_gather_object(values, value, group=self.group)
        except RuntimeError as error:
            raise PeerTimeoutError(
                f"{self.label}: rank {self.rank} lost a peer while building the op: {error}"
            ) from error
        return values

    def agree(self, label: str, problem: Exception | None, spec: Mapping[str, object]) -> None:
        """Check that all ranks build the same thing. Collective.

        The version of flux is part of it, and the number of the layout of shared memory. A rank
        whose arguments were refused takes part, so that everybody hears of it.

        Raises:
            ValueError, TypeError: on every rank alike, naming the rank that was refused or differs.
        """
        entries = self.all_gather(
            (
                type(problem).__name__,
                str(problem) if problem else "",
                {**build_identity(), **spec},
            )
        )
        if problem is not None:
            raise problem
        for rank, (kind, text, _) in enumerate(entries):
            if text:
                error = TypeError if kind == "TypeError" else ValueError
                raise error(f"{label}: rank {rank} refused its arguments: {text}")
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
                raise ValueError(f"{label}: ranks disagree; rank {rank} has {differing}")
