"""Lanes that collectives run on, alongside the program: threads for gloo, streams for CUDA.

A lane runs its tasks one after the other, in the order of ``submit``. All ranks submit the same
tasks in the same order, so the calls of a group meet their equals. A task may wait for tasks of
other lanes that were submitted before it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist

from flux.core.errors import PeerTimeoutError
from flux.runtime.centauri.memory import add_up
from flux.transport.threads import Abandonable


class _ThreadDone:
    def __init__(self, what: str, timeout: timedelta) -> None:
        self.what, self._timeout = what, timeout.total_seconds()
        self._event = threading.Event()
        self._error: BaseException | None = None

    def end(self, error: BaseException | None) -> None:
        self._error = error
        self._event.set()

    def wait(self) -> None:
        """Wait until the task has ended.

        Raises:
            PeerTimeoutError: it failed, or has not ended in time.
            ValueError: it found that ranks disagree, or a dtype that cannot be added up.
        """
        # Twice the timeout of a collective: the lane's own error says more.
        if not self._event.wait(2 * self._timeout):
            raise PeerTimeoutError(f"{self.what}: not done within {2 * self._timeout:g} s")
        if isinstance(self._error, ValueError):  # of the call itself, not of a peer
            raise ValueError(f"{self.what}: {self._error}") from self._error
        if self._error is not None:
            raise PeerTimeoutError(f"{self.what}: {self._error}") from self._error


class ThreadLane:
    """A lane that is a thread, for collectives that block.

    When a task fails, all later ones fail with its error: ranks would no longer agree on the order.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._tasks: SimpleQueue[tuple[Callable[[], None], Sequence[Done], _ThreadDone] | None] = (
            SimpleQueue()
        )
        self._failure: BaseException | None = None
        self._thread = Abandonable(self._run)

    def submit(self, what: str, task: Callable[[], None], after: Sequence[Done] = ()) -> Done:
        """Run a task on the thread when those before it, and ``after``, have ended."""
        done = _ThreadDone(what, self._timeout)
        self._tasks.put((task, after, done))
        return done

    def close(self) -> None:
        """Let the thread end once all submitted tasks are done."""
        self._tasks.put(None)

    def _run(self) -> None:
        while (entry := self._tasks.get()) is not None:
            task, after, done = entry
            if self._failure is None:
                try:
                    for other in after:
                        other.wait()
                    with torch.no_grad():
                        task()
                except BaseException as error:
                    self._failure = error
            done.end(self._failure)
            del task, after, done, entry  # tensors of a task end with it


class StreamLane:
    """A lane that is a CUDA stream. NCCL's watchdog ends collectives that take too long."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def submit(self, what: str, task: Callable[[], None], after: Sequence[Done] = ()) -> Done:
        """Enqueue a task on the stream, after ``after`` and the work of the current stream."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.no_grad():
            for other in after:
                other.wait()
            task()
            event: torch.cuda.Event = self._stream.record_event()
            return event  # on which the current stream waits

    def close(self) -> None:
        """Nothing to end: streams belong to torch's pool."""


class Group:
    """The collectives of a lane on one process group.

    Args:
        group: the ranks; None: this one alone.
        timeout: of each wait.
        back: another group of the same ranks, in which higher ones send to lower ones. gloo's
            thread polls a connection without rest while data arrive there and another thread sends
            on it, since both need its lock. With one direction on each connection they never meet.
            None: all in one group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        timeout: timedelta,
        back: dist.ProcessGroup | None = None,
    ) -> None:
        self.group, self._timeout = group, timeout
        self._back = group if back is None else back
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self._all = range(self.size)
        self._is_nccl = group is not None and dist.get_backend(group) == "nccl"

    def gather(self, slices: Sequence[Sequence[torch.Tensor]]) -> None:
        """Fill slices, in place, with what their ranks have.

        Each rank sends while it receives: gloo's own AllGather of two ranks takes turns, and its
        ring of more crosses each link between hosts with all but one rank's shard.
        """
        own = list(slices[self.rank])
        self._exchange(slices, [own] * self.size)

    def _exchange(
        self, into: Sequence[Sequence[torch.Tensor]], outgoing: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        """Receive from each other rank into its tensors, and send it those that are for it."""
        if self.group is None:
            return
        if self._is_nccl:  # which must see all of them at once
            ops = [
                dist.P2POp(of, part, group=self.group, group_peer=peer)
                for of, given_to in ((dist.irecv, into), (dist.isend, outgoing))
                for peer in self._all
                for part in given_to[peer]
                if peer != self.rank
            ]
            self._wait(dist.batch_isend_irecv(ops))
            return
        works: list[dist.Work | None] = []
        # Receives first: gloo's sender waits for a word that one is posted.
        for peer in self._all:
            way = self.group if peer < self.rank else self._back
            for part in into[peer] if peer != self.rank else ():
                works.append(dist.irecv(part, group=way, group_src=peer))
        for distance in range(1, self.size):
            peer = (self.rank + distance) % self.size
            way = self.group if peer > self.rank else self._back
            works += [dist.isend(part, group=way, group_dst=peer) for part in outgoing[peer]]
        self._wait(works)

    def meet(self) -> None:
        """Wait until every rank of the group has called this as often as this one."""
        words = torch.zeros(self.size, 1, dtype=torch.uint8)
        self.gather([[word] for word in words])

    def differing(self, values: torch.Tensor) -> torch.Tensor:
        """Return which values are not the same on all ranks. Ends when all have called it."""
        if self._is_nccl:
            # The largest value and the least one are the own one exactly where all ranks agree.
            both = torch.cat([values, -values]).cuda()
            self._wait([dist.all_reduce(both, dist.ReduceOp.MAX, self.group, async_op=True)])
            return (both.cpu().view(2, -1) != torch.stack([values, -values])).any(0)
        # One way between each two ranks; gloo's AllReduce takes several, one after the other.
        every = values.repeat(self.size, 1)
        self.gather([[of_rank] for of_rank in every])
        return (every != values).any(0)

    def sum_parts(self, parts: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Return the sum over ranks of the own part, scaled: ReduceScatter.

        ``parts`` is [ranks, ...], contiguous; part i is for rank i.

        gloo's ReduceScatter is an AllReduce, which moves twice as much; so parts are exchanged and
        added here, in the order of the ranks.
        """
        if parts.is_cuda:
            out = torch.empty_like(parts[0])
            if self.group is None:
                return out.copy_(parts[0]).mul_(scale)
            self._wait([dist.reduce_scatter_tensor(out, parts, group=self.group, async_op=True)])
            return out.mul_(scale)
        received = [parts[i] if i == self.rank else torch.empty_like(parts[i]) for i in self._all]
        self._exchange([[into] for into in received], [[parts[peer]] for peer in self._all])
        out = torch.empty_like(parts[0])
        add_up(out, received, scale)
        return out

    def add_up(self, tensor: torch.Tensor) -> None:
        """Add what the ranks have, in place: AllReduce."""
        if self.group is not None:
            self._wait([dist.all_reduce(tensor, group=self.group, async_op=True)])

    def _wait(self, works: Sequence[dist.Work | None]) -> None:
        for work in works:
            if work is None:
                continue
            if self._is_nccl:
                work.wait()  # lets the lane's stream wait
            else:
                work.wait(self._timeout)


Lane = ThreadLane | StreamLane
Done = _ThreadDone | torch.cuda.Event


def make_lane(device: torch.device, timeout: timedelta) -> Lane:
    """Return a lane for tensors of a device."""
    return StreamLane(device) if device.type == "cuda" else ThreadLane(timeout)
