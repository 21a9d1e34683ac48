"""Ranks on the GPUs of several nodes: NVSHMEM's symmetric heap, a process per GPU.

Every rank allocates pad and data in one piece of the heap. Ranks that can address each other's
memory, those of a node as a rule, use it as they use torch's symmetric memory; to others, rows go
by puts with a word that says that they are there (csrc/cuda/runtime/nvshmem_abi.h).

A process takes part in one NVSHMEM job, of one set of ranks: those of the first op that wants it.
It is set up through torch.distributed, and stays until ``shutdown`` or the end of the process, as
setting it up takes seconds. Memory must be allocated and given back by all ranks together, but ops
are closed by each rank for itself: so what all ranks have let go of is given back when the next op
is built, or by ``shutdown``. A rank that dies keeps nobody waiting when ops are closed.

NVSHMEM's collective calls know no timeouts. They are made on a thread of their own, only once all
ranks have said that they will come; if they take too long all the same, the job is lost.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from flux import _C
from flux.backends.device import CudaDevice, Device
from flux.errors import PeerTimeoutError
from flux.heuristic import ceil_div
from flux.transport.device import SPARE, Memory, first_signal
from flux.transport.exchange import Exchange, resolve_group
from flux.transport.foreign import tensor_at
from flux.transport.nvshmem_library import NvshmemLibrary, load
from flux.transport.symm_mem import ALIGNMENT, WORD, SymmMem, say_if_ready

T = TypeVar("T")

MAIL_WORD = 8  # bytes; NVSHMEM has no words of 32 bits
COLLECTIVE_S = 120.0
"""Longest that a collective call of NVSHMEM may take."""


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
        """What ``body`` returns or raises.

        Raises:
            TimeoutError: it took longer. It goes on all the same, and no other call comes through.
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


class Job:
    """This process's part in NVSHMEM.

    Attributes:
        library: its functions.
        ranks: global ranks, in the order of their numbers in NVSHMEM.
        device: of this rank.
        lost: why it cannot be used any more; empty if it can.
    """

    def __init__(self, library: NvshmemLibrary, ranks: tuple[int, ...], device: int) -> None:
        self.library = library
        self.ranks = ranks
        self.device = device
        self.lost = ""
        self._blocks: dict[int, int] = {}  # address by number; the numbers are those of all ranks
        self._let_go: set[int] = set()
        self._made = 0
        self._thread = _Thread()

    def collectively(self, exchange: Exchange, what: str, body: Callable[[], T]) -> T:
        """Make a call that all ranks make, and hear how it went everywhere. Collective.

        Raises:
            RuntimeError: it failed on some rank; on all ranks.
            PeerTimeoutError: it did not end in time, for some rank and no known reason; on all
                ranks. Or a peer is gone. The job is lost in each case.
        """
        result, problem, late = None, "", False
        try:
            result = self._thread.call(body, COLLECTIVE_S)
        except TimeoutError:
            # Maybe as another rank has failed, which waits to tell.
            problem, late = f"took longer than {COLLECTIVE_S:g} s", True
        except RuntimeError as error:
            problem = str(error)
        try:
            everywhere = exchange.all_gather((problem, late))
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
        """Number and address of ``size`` new bytes, zero. Collective, as ``collectively`` is."""
        self.reclaim(exchange)
        address = self.collectively(
            exchange, f"allocating {size} bytes", lambda: self.library.allocate(size)
        )
        number, self._made = self._made, self._made + 1
        self._blocks[number] = address
        return number, address

    def let_go(self, number: int) -> None:
        """This rank needs a block no more, and nothing of its that touches it is under way."""
        self._let_go.add(number)

    def reclaim(self, exchange: Exchange) -> None:
        """Give back what all ranks have let go of. Collective."""
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
        """Blocks that have not been given back."""
        return len(self._blocks)


_job: Job | None = None


class Nvshmem(SymmMem):
    """One op's ranks, each with a GPU of its own. Construction is collective.

    Args:
        exchange: the op's process group.
        device: where this rank lives.
        job: that the ranks have joined.
        nodes: sets of ranks that address each other's memory; consecutive ranks, as many in each.
    """

    def __init__(self, exchange: Exchange, device: Device, job: Job, nodes: int = 1) -> None:
        super().__init__(exchange, device)
        self.job = job
        self.nodes = nodes
        self.relays = nodes > 1
        lanes = self.world // nodes
        self.node = range(self.rank // lanes * lanes, (self.rank // lanes + 1) * lanes)
        self._blocks: list[int] = []
        # Puts may need a multiprocessor while a kernel waits for what they bring.
        self.sm_share = max(1, device.sm_count - SPARE)

    def _find_multicast(self) -> bool:
        """Not asked for: the heap is NVSHMEM's."""
        return False

    def memory(self, words: int, data_bytes: int) -> Memory:
        """Zeroed symmetric memory. Collective.

        What this rank cannot address of others is an empty tensor, at the address 0. An address of
        its own stands for the same place at any rank, where puts are concerned.

        Raises:
            RuntimeError: there is not enough memory; on all ranks.
            ValueError: ranks of a node cannot address each other; on all ranks.
            PeerTimeoutError: a peer did not come.
        """
        pad = ceil_div(words * WORD, ALIGNMENT) * ALIGNMENT
        size = pad + ceil_div(max(data_bytes, 1), ALIGNMENT) * ALIGNMENT
        # Zeroed before the exchange in there: nobody writes to memory that is still being zeroed.
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
        """The ranks of other nodes, and this rank's words for what comes from them. Collective.

        Raises:
            RuntimeError: there is not enough memory; on all ranks.
            PeerTimeoutError: a peer did not come.
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
            data=memory.data[self.rank].data_ptr(),
            mail=self._allocate(_C.mail_words(self.world, boxes) * MAIL_WORD),
            status=memory.pads[self.rank].data_ptr() + status * WORD,
            boxes=boxes,
        )

    def leave(self) -> None:
        """Let go of the memory. Local: see above when it is given back."""
        for number in self._blocks:
            self.job.let_go(number)
        self._blocks.clear()


def open_nvshmem(
    exchange: Exchange,
    device: Device | None = None,
    loader: Callable[[], NvshmemLibrary] = load,
    nodes: int = 1,
) -> Nvshmem:
    """The ranks of a process group, each on its current CUDA device unless another is given, in
    this many nodes. Collective.

    Raises:
        ValueError: a rank has no CUDA device or no library, two ranks share a device, or this
            process or another is in a job of other ranks; on all ranks.
        RuntimeError: NVSHMEM cannot be set up; on all ranks.
        PeerTimeoutError: a peer did not come.
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
    found = exchange.all_gather((problem, device.identity if device else "", _job is not None))
    for rank, (text, _, _) in enumerate(found):
        if text:
            raise ValueError(f"{exchange.label}: rank {rank}: {text}")
    assert device is not None and library is not None
    devices = [identity for _, identity, _ in found]
    if len(set(devices)) < len(devices):
        raise ValueError(f"{exchange.label}: NVSHMEM needs a device per rank, got {devices}")
    joined = [already for _, _, already in found]
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
    """Give all memory back and leave NVSHMEM, when all ops that use it are closed. Collective over
    the ranks of the job.

    Raises:
        ValueError: an op still uses it; on all ranks.
        RuntimeError, PeerTimeoutError: it failed on some rank.
    """
    global _job
    exchange = Exchange(resolve_group(group), "flux.transport.nvshmem.shutdown")
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
            raise ValueError(f"{exchange.label}: rank {rank} has {held} ops that are not closed")

    def finalize() -> bool:
        job.library.finalize()
        return True

    job.collectively(exchange, "leaving NVSHMEM", finalize)
    _job = None


def _global_ranks(exchange: Exchange) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(exchange.group))


def _unfit(job: Job, ranks: tuple[int, ...], device: int) -> str:
    if job.lost:
        return f"NVSHMEM cannot be used any more in this process: {job.lost}"
    if job.ranks != ranks:
        return f"this process is in an NVSHMEM job of the ranks {job.ranks}, not {ranks}"
    if job.device != device:
        return f"this process uses NVSHMEM with device {job.device}, not {device}"
    return ""


def _join(exchange: Exchange, device: Device, library: NvshmemLibrary) -> Job:
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
    job = Job(library, _global_ranks(exchange), device.index)

    def init() -> bool:
        library.init(exchange.rank, exchange.world, identity, device.index)
        return True

    # Kept even if it fails: what NVSHMEM is then, nobody knows.
    _job = job
    job.collectively(exchange, "setting up NVSHMEM", init)
    return job
