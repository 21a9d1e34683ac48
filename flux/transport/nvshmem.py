"""Connect GPUs of several nodes through NVSHMEM's symmetric heap, with a process per GPU.

Every rank allocates pad and data in one piece of the heap. Ranks that can address each other's
memory, normally those of a node, use it like torch's symmetric memory. To other ranks, rows go by
puts, followed by a word that reports their arrival (csrc/cuda/runtime/nvshmem_abi.h).

A process takes part in one NVSHMEM job with one set of ranks: those of the first op that uses it.
The job is set up through torch.distributed. It stays until ``shutdown`` or the end of the process,
because its setup takes seconds. Memory must be allocated and freed by all ranks together, but each
rank closes ops on its own. So memory that all ranks have released is freed when the next op is
built, or by ``shutdown``. When ops are closed, no rank waits for one that has died.

NVSHMEM's collective calls have no timeouts. They run on a thread of their own, and only once all
ranks have confirmed that they take part. If such a call still takes too long, the job is lost.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from flux import _C
from flux.core.errors import PeerTimeoutError
from flux.core.problem import round_up
from flux.core.tensors import address_of
from flux.transport.base import SPARE, Memory, first_signal
from flux.transport.device import CudaDevice, Device
from flux.transport.exchange import Exchange, resolve_group
from flux.transport.foreign import tensor_at
from flux.transport.nvshmem_library import NvshmemLibrary, load
from flux.transport.symm_mem import ALIGNMENT, WORD, SymmMem, say_if_ready

T = TypeVar("T")

MAIL_WORD = 8  # bytes; NVSHMEM has no words of 32 bits
COLLECTIVE_S = 120.0
"""Limit of a collective call of NVSHMEM, in seconds."""


class _Thread:
    """Makes calls one after another, each within a time limit."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # A daemon: a call that never returns must not keep the process from ending.
        threading.Thread(target=self._run, name="flux-nvshmem", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._calls.get()()

    def call(self, body: Callable[[], T], seconds: float) -> T:
        """Return the result of ``body``, or raise its error.

        Raises:
            TimeoutError: it took longer. It keeps running and blocks all later calls.
        """
        done = threading.Event()
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(body())
            except BaseException as error:
                errors.append(error)
            finally:
                done.set()

        self._calls.put(run)
        if not done.wait(seconds):
            raise TimeoutError
        if errors:
            raise errors[0]
        return results[0]


class NvshmemJob:
    """This process's membership in NVSHMEM.

    Attributes:
        library: NVSHMEM's functions.
        ranks: global ranks, in the order of their numbers in NVSHMEM.
        device: of this rank.
        lost: why the job cannot be used any more; empty if it can.
    """

    def __init__(self, library: NvshmemLibrary, ranks: tuple[int, ...], device: int) -> None:
        self.library = library
        self.ranks = ranks
        self.device = device
        self.lost = ""
        self._blocks: dict[int, int] = {}  # address by number; numbers are the same on all ranks
        self._let_go: set[int] = set()
        self._made = 0
        self._thread = _Thread()

    def collectively(self, exchange: Exchange, what: str, body: Callable[[], T]) -> T:
        """Make a call on all ranks, and exchange the results. Collective.

        The job is lost if this raises.

        Args:
            exchange: the op's ranks.
            what: the call, for errors.
            body: makes the call.

        Raises:
            RuntimeError: the call failed on some rank; on all ranks.
            PeerTimeoutError: a peer is gone; or, on all ranks, the call timed out on some rank and
                no rank reported another error.
        """
        result, problem, late = None, "", False
        try:
            result = self._thread.call(body, COLLECTIVE_S)
        except TimeoutError:
            # Another rank may have failed and wait in the exchange below.
            problem, late = f"took longer than {COLLECTIVE_S:g} s", True
        except RuntimeError as error:
            problem = str(error)
        try:
            everywhere = exchange.all_gather((problem, late), extra_s=COLLECTIVE_S)
        except PeerTimeoutError:
            self.lost = f"{what}: a peer was lost"
            raise
        failed = [rank for rank, (text, slow) in enumerate(everywhere) if text and not slow]
        slow = [rank for rank, (_, slow) in enumerate(everywhere) if slow]
        if failed or slow:
            culprit = (failed or slow)[0]
            self.lost = f"{what} failed on rank {culprit}: {everywhere[culprit][0]}"
            error_type = RuntimeError if failed else PeerTimeoutError
            raise error_type(f"{exchange.label}: {self.lost}")
        assert result is not None
        return result

    def allocate(self, exchange: Exchange, size: int) -> tuple[int, int]:
        """Return number and address of ``size`` new zeroed bytes.

        Collective, as ``collectively`` is.
        """
        self.reclaim(exchange)
        address = self.collectively(
            exchange, f"allocating {size} bytes", lambda: self.library.allocate(size)
        )
        number, self._made = self._made, self._made + 1
        self._blocks[number] = address
        return number, address

    def let_go(self, number: int) -> None:
        """Release a block on this rank. No operation of this rank on it may be in flight."""
        self._let_go.add(number)

    def reclaim(self, exchange: Exchange) -> None:
        """Free the blocks that all ranks have released. Collective."""
        everywhere = set.intersection(*exchange.all_gather(self._let_go))
        for number in sorted(everywhere):
            address = self._blocks.pop(number)
            self._let_go.discard(number)

            def release(address: int = address) -> bool:
                self.library.release(address)
                return True

            self.collectively(exchange, "giving memory back", release)

    @property
    def held_blocks(self) -> int:
        """Number of blocks that have not been freed."""
        return len(self._blocks)


_job: NvshmemJob | None = None


class Nvshmem(SymmMem):
    """The ranks of one op, each with its own GPU. Construction is collective.

    Args:
        exchange: the op's process group.
        device: the GPU of this rank.
        job: the job that the ranks have joined.
        nodes: sets of ranks that address each other's memory; consecutive, equally many in each.
    """

    def __init__(self, exchange: Exchange, device: Device, job: NvshmemJob, nodes: int = 1) -> None:
        super().__init__(exchange, device)
        self.job = job
        self.nodes = nodes
        self.relays = nodes > 1
        lanes = self.world // nodes
        self.node = range(self.rank // lanes * lanes, (self.rank // lanes + 1) * lanes)
        self._blocks: list[int] = []
        # Puts may need a multiprocessor while a kernel waits for their data.
        self.sm_share = max(1, device.sm_count - SPARE)

    def _find_multicast(self) -> bool:
        """Return False: the heap is NVSHMEM's, so multicast is not queried."""
        return False

    def memory(self, words: int, data_bytes: int) -> Memory:
        """Return zeroed symmetric memory. Collective.

        Memory of other ranks that this rank cannot address is an empty tensor at the address 0. In
        puts, an address of this rank stands for the same place on any rank.

        Raises:
            RuntimeError: there is not enough memory; on all ranks.
            ValueError: ranks of a node cannot address each other; on all ranks.
            PeerTimeoutError: a peer did not take part.
        """
        pad = round_up(words * WORD, ALIGNMENT)
        size = pad + round_up(max(data_bytes, 1), ALIGNMENT)
        # Zeroed before the exchange inside: no rank may write to memory that is still being zeroed.
        address = self._allocate(size)
        device = self.device.torch_device
        buffers = [
            tensor_at(
                address if rank == self.rank else self.job.library.peer_pointer(address, rank),
                size,
                device,
            )
            for rank in range(self.world)
        ]
        strange = [rank for rank in self.node if buffers[rank].numel() == 0]
        problem = f"cannot address rank {strange[0]} of its node" if strange else None
        say_if_ready(self.exchange, problem)
        return Memory(
            [buffer[: words * WORD].view(torch.int32) for buffer in buffers],
            [buffer[pad : pad + data_bytes] for buffer in buffers],
        )

    def _allocate(self, size: int) -> int:
        number, address = self.job.allocate(self.exchange, size)
        self._blocks.append(number)
        return address

    def remote(self, memory: Memory, boxes: int, blocks: int) -> _C.Remote | None:
        """Return the connection to ranks of other nodes, with words for arrivals. Collective.

        Args:
            memory: the return value of ``memory``.
            boxes: words for what arrives in a call.
            blocks: blocks that network kernels may use.

        Raises:
            RuntimeError: there is not enough memory; on all ranks.
            PeerTimeoutError: a peer did not take part.
        """
        if self.nodes == 1:
            return None
        status = first_signal(self.world) - 2 * _C.STATUS_WORDS
        return _C.NvshmemRemote(
            driver=self.device.driver,
            put=self.job.library.put_signal,
            raise_=self.job.library.signal,
            relay=self.job.library.relay,
            node_sum=self.job.library.node_sum,
            rank=self.rank,
            world=self.world,
            others=[rank for rank in range(self.world) if rank not in self.node],
            data=address_of(memory.data[self.rank]),
            mail=self._allocate(_C.mail_words(self.world, boxes) * MAIL_WORD),
            status=address_of(memory.pads[self.rank]) + status * WORD,
            boxes=boxes,
        )

    def leave(self) -> None:
        """Release the memory. Local: it is freed later, see the module docstring."""
        for number in self._blocks:
            self.job.let_go(number)
        self._blocks.clear()


def open_nvshmem(
    exchange: Exchange,
    device: Device | None = None,
    loader: Callable[[], NvshmemLibrary] = load,
    nodes: int = 1,
) -> Nvshmem:
    """Return the ranks of a process group, on this many nodes. Collective.

    Args:
        exchange: the op's process group.
        device: of this rank; its current CUDA device by default.
        loader: loads the library.
        nodes: number of nodes.

    Raises:
        ValueError: a rank has no CUDA device or no library, two ranks share a device, or this
            process or another is in a job of other ranks; on all ranks.
        RuntimeError: NVSHMEM cannot be set up; on all ranks.
        PeerTimeoutError: a peer did not take part.
    """
    problem, library = "", None
    try:
        device = device or CudaDevice(queues=None)
        library = _job.library if _job is not None else loader()
        if _job is None:
            library.prepare(device.index)
        else:
            problem = _unfit(_job, _global_ranks(exchange), device.index)
    except RuntimeError as error:
        problem = str(error)
    states = exchange.all_gather((problem, device.identity if device else "", _job is not None))
    for rank, (text, _, _) in enumerate(states):
        if text:
            raise ValueError(f"{exchange.label}: rank {rank}: {text}")
    assert device is not None and library is not None
    devices = [identity for _, identity, _ in states]
    if len(set(devices)) < len(devices):
        raise ValueError(f"{exchange.label}: NVSHMEM needs a device per rank, got {devices}")
    joined = [already for _, _, already in states]
    if not any(joined):
        return Nvshmem(exchange, device, _join(exchange, device, library), nodes)
    if not all(joined):
        raise ValueError(
            f"{exchange.label}: rank {joined.index(True)} is in an NVSHMEM job already, rank "
            f"{joined.index(False)} is not"
        )
    assert _job is not None
    return Nvshmem(exchange, device, _job, nodes)


def shutdown(group: dist.ProcessGroup | str | None = None) -> None:
    """Free all memory and leave NVSHMEM. Collective over the ranks of the job.

    All ops that use it must be closed.

    Args:
        group: the process group of the job's ranks.

    Raises:
        ValueError: an op still uses it; on all ranks.
        RuntimeError: it failed on some rank.
        PeerTimeoutError: it timed out on some rank, or a peer is gone.
    """
    global _job
    exchange = Exchange(resolve_group(group), "flux.transport.nvshmem.shutdown", COLLECTIVE_S)
    problem = "" if _job is None else _unfit(_job, _global_ranks(exchange), _job.device)
    for rank, text in enumerate(exchange.all_gather(problem)):
        if text:
            raise ValueError(f"{exchange.label}: rank {rank}: {text}")
    if not all(exchange.all_gather(_job is not None)):
        return
    job = _job
    assert job is not None
    job.reclaim(exchange)
    for rank, held in enumerate(exchange.all_gather(job.held_blocks)):
        if held:
            raise ValueError(f"{exchange.label}: rank {rank} has {held} open ops: close them first")

    def finalize() -> bool:
        job.library.finalize()
        return True

    job.collectively(exchange, "leaving NVSHMEM", finalize)
    _job = None


def _global_ranks(exchange: Exchange) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(exchange.group))


def _unfit(job: NvshmemJob, ranks: tuple[int, ...], device: int) -> str:
    if job.lost:
        return f"NVSHMEM cannot be used any more in this process: {job.lost}"
    if job.ranks != ranks:
        return f"this process is in an NVSHMEM job of the ranks {job.ranks}, not {ranks}"
    if job.device != device:
        return f"this process uses NVSHMEM with device {job.device}, not {device}"
    return ""


def _join(exchange: Exchange, device: Device, library: NvshmemLibrary) -> NvshmemJob:
    global _job
    identity, problem = b"", ""
    if exchange.rank == 0:
        try:
            identity = library.unique_id()
        except RuntimeError as error:
            problem = str(error)
    identity, problem = exchange.all_gather((identity, problem))[0]
    if problem:
        raise RuntimeError(f"{exchange.label}: rank 0: {problem}")
    job = NvshmemJob(library, _global_ranks(exchange), device.index)

    def init() -> bool:
        library.init(exchange.rank, exchange.world, identity, device.index)
        return True

    # Kept even if init fails, because the state of NVSHMEM is undefined then.
    _job = job
    job.collectively(exchange, "setting up NVSHMEM", init)
    return job
