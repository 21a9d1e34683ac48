"""Types of the native module (csrc/bindings).

Written by hand. pybind11-stubgen (3.0 was tried) knows no fields of the tuples and dicts that the
module returns, and widens every int and float argument to what pybind11 would convert. The names,
arguments and defaults here are compared with the module's own signatures in
tests/project/test_package.py.
"""

from collections.abc import Callable, Sequence
from typing import TypedDict, TypeVar

from typing_extensions import TypeVarTuple, Unpack

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

class FailureDict(TypedDict):
    kind: str
    peer: int
    chunk: int
    tile: int
    culprit: int
    expected: int
    observed: int
    ran_ahead: bool
    refusal: str

TransferTuple = tuple[int, int, int, int, int, int, int, int, bool]
VisitTuple = tuple[int, int, int, int, tuple[int, int], int, tuple[int, int]]

Mesh = tuple[int, int, int]

class core:
    """The integer maps of csrc/core. Meshes are (nodes, domains, lanes), ranges half-open pairs."""

    @staticmethod
    def chunk_rows(m: int, world: int) -> int: ...
    @staticmethod
    def row_begin(m: int, world: int, rank: int) -> int: ...
    @staticmethod
    def row_end(m: int, world: int, rank: int) -> int: ...
    @staticmethod
    def row_count(m: int, world: int, rank: int) -> int: ...
    @staticmethod
    def local_n(op: int, n: int, world: int, rank: int) -> int: ...
    @staticmethod
    def local_k(op: int, k: int, world: int, rank: int) -> int: ...
    @staticmethod
    def owner_of(m: int, world: int, row: int) -> int: ...
    @staticmethod
    def tiles_per_chunk(m: int, world: int, rows: int) -> int: ...
    @staticmethod
    def signal_index(m: int, world: int, rows: int, chunk: int, tile: int) -> int: ...
    @staticmethod
    def comm_tile_rows(m: int, world: int, rows: int, chunk: int, tile: int) -> tuple[int, int]: ...
    @staticmethod
    def comm_tile_of(m: int, world: int, rows: int, row: int) -> int: ...
    @staticmethod
    def signals_of_rows(m: int, world: int, rows: int, begin: int, end: int) -> tuple[int, int]: ...
    @staticmethod
    def epoch_reached(observed: int, expected: int) -> bool: ...
    @staticmethod
    def recv_hop(
        order: int, mesh: Mesh, direction: int, rank: int, step: int
    ) -> tuple[int, int]: ...
    @staticmethod
    def send_hop(
        order: int, mesh: Mesh, direction: int, rank: int, step: int
    ) -> tuple[int, int]: ...
    @staticmethod
    def step_of_chunk(order: int, mesh: Mesh, direction: int, rank: int, chunk: int) -> int: ...
    @staticmethod
    def swizzle_is_legal(swizzle: int, mesh: Mesh) -> bool: ...
    class TileOrder:
        def __init__(
            self,
            *,
            op: int,
            m: int,
            n: int,
            tile_m: int,
            tile_n: int,
            raster: int,
            swizzle: int,
            order: int,
            direction: int,
            mesh: Mesh,
            rank: int,
        ) -> None: ...
        def tiles_m(self) -> int: ...
        def tiles_n(self) -> int: ...
        def tile_count(self) -> int: ...
        def chunk_at(self, position: int) -> int: ...
        def position_of_tile(self, tile: int) -> int: ...
        def tile_row_at(self, slot: int) -> int: ...
        def tile_at(self, slot: int) -> tuple[int, int]: ...

    class TileMap:
        runs: list[tuple[int, int]]  # (first tile row, row slots up to its end)
        def __init__(self, order: core.TileOrder) -> None: ...
        def tile_at(self, slot: int) -> tuple[int, int]: ...

    class ScatterTiling:
        def __init__(self, m: int, n: int, world: int, tile_m: int, tile_n: int) -> None: ...
        def owners_of_tile(self, tile: int) -> tuple[int, int]: ...
        def tiles_of_owner(self, owner: int) -> tuple[int, int]: ...
        def flag_rows(self) -> int: ...
        def flag_columns(self) -> int: ...
        def flag_count(self) -> int: ...
        def flag_index(self, source: int, owner: int, tile_row: int, tile_column: int) -> int: ...
        def map_rows(self, owner: int) -> int: ...
        def map_row(self, owner: int, row: int) -> int: ...
        def strip_count(self) -> int: ...
        def strips_of_owner(self, owner: int) -> int: ...
        def strip_of_owner(self, owner: int, index: int) -> tuple[int, int, int]: ...
        def own_sum_count(self, owner: int) -> int: ...
        def own_sum(self, owner: int, raster: int, index: int) -> tuple[int, int, int]: ...
        def sum_count(self, owner: int) -> int: ...
        def sum_of_owner(self, owner: int, index: int) -> tuple[int, int, int]: ...
        def copy_count(self) -> int: ...
        def copied_piece(self, index: int) -> tuple[int, int, int]: ...
        def begins_sum(self, row: int) -> bool: ...
        def sum_word(self, row: int, column: int) -> int: ...

    strip_rows: int
    sum_rows: int
    guard_rows: int
    max_runs: int
    max_tiles: int

HomeTuple = tuple[int, int]
ShareTuple = tuple[int, int, int]
ReductionTuple = tuple[int, int, int, int, tuple[ShareTuple, ...], int, int, int]
ParcelTuple = tuple[int, int, int, int, int, int]

class Exclusive:
    """Admits one call at a time, also after an exception between two bytecodes.

    Calls enter or are turned away; they never wait. See csrc/bindings/exclusive.cpp.
    """

    def call(
        self,
        refusal: str,
        function: Callable[[Unpack[Arguments]], T],
        /,
        *arguments: Unpack[Arguments],
    ) -> T:
        """Call a function and return its result; RuntimeError(refusal) while another is inside."""
    def try_call(
        self, function: Callable[[Unpack[Arguments]], object], /, *arguments: Unpack[Arguments]
    ) -> bool:
        """Call a function, unless another is inside; return whether it was called."""
    @property
    def taken(self) -> bool:
        """Whether a function is inside."""

class StepTimes:
    """When operators run in virtual time, in ms; how many have ended."""

    start: list[float]
    end: list[float]
    ended: int

class StepGraph:
    """The operators of a step, by number (csrc/plan/simulation.h)."""

    def __init__(
        self,
        after: Sequence[Sequence[int]],
        deps: Sequence[int],
        stage: Sequence[int],
        communicates: Sequence[bool],
        stages: int,
    ) -> None: ...
    def run_in_order(
        self,
        solo: Sequence[float],
        lanes: Sequence[Sequence[int]],
        kinds: Sequence[int],
        overlap: Callable[[int, int], float],
    ) -> StepTimes: ...
    def run_most_urgent(
        self,
        solo: Sequence[float],
        lane_of: Sequence[int],
        priority: Sequence[float],
        block: Sequence[int],
        left: Sequence[Sequence[int]],
    ) -> tuple[StepTimes, list[list[int]]]: ...

class Routing:
    """Routed rows of a mixture of experts (csrc/schedule/routing.h); tensors are addresses."""

    count: int
    offsets: list[int]  # by (expert, owner), and the end
    checksum: int
    def __init__(
        self,
        *,
        experts: int,
        m: int,
        topk: int,
        total: int,
        first_expert: int,
        local: int,
        world: int,
    ) -> None: ...
    def groups(self, begin: int, end: int) -> list[tuple[int, int, int]]: ...
    def gather_work(self, schedule: Schedule, tile_m: int, columns: int) -> GroupedWork: ...
    def sum_work(self, schedule: Schedule, tile_m: int, tile_n: int, ahead: int) -> GroupedWork: ...
    def fill(self, tokens: int, choices: int, rows: int) -> None: ...

class Hops:
    """Ranks behind each transfer of a schedule (csrc/schedule/selection.h)."""

    def __init__(self, schedule: Schedule, ep: int) -> None: ...

class Selection:
    """Rows that each transfer of a call carries; tensors are addresses."""

    def __init__(self, hops: Hops, experts: int, m: int, topk: int, total: int) -> None: ...
    def gathered(self, chunk: int, dst: int, begin: int, end: int, rows: int) -> int: ...
    def partial(self, source: int, combined: bool, begin: int, end: int, rows: int) -> int: ...

class GroupedWork:
    """Maps of a grouped GEMM (csrc/schedule/grouped.h)."""

    sizes: list[int]  # of items, experts, rows, tokens, sources, counts, pushes, pushed, shares
    def fill(self, address: int) -> None: ...
    def dispatch(
        self, schedule: Schedule, experts: int, topk: int, total: int, ep: int
    ) -> None: ...
    def combine(self, schedule: Schedule, experts: int, topk: int, total: int, ep: int) -> None: ...

class Route:
    """Maps of a grouped GEMM that the device makes (csrc/cuda_host/route.h)."""

    words: int
    offsets: dict[str, int]
    totals: int  # offsets of these
    routed: int
    def __init__(
        self,
        *,
        schedule: Schedule,
        kernel: Kernel,
        experts: int,
        expert_bytes: int,
        topk: int,
        total: int,
        ep: int,
        max_rows: int,
        n: int,
        ahead: int,
        parallel: bool,
    ) -> None: ...
    def make(self, kernel: Kernel, room: int, stream: int) -> None: ...
    def use(self, room: int, weights: Sequence[int], tail: int, element_bytes: int) -> None: ...
    def launch(self, kernel: Kernel, status: int, stream: int) -> None: ...

class Schedule:
    visits: tuple[VisitTuple, ...]
    transfers: tuple[TransferTuple, ...]
    results: tuple[TransferTuple, ...]
    receipts: tuple[TransferTuple, ...]
    program: tuple[tuple[int, int], ...]
    signals: int
    needs: tuple[int, int, int, int]  # signals, blocks, rows of a block, gathered or result rows
    publishes_own: bool
    reductions: tuple[ReductionTuple, ...]
    homes: tuple[HomeTuple, ...]
    def parcels_for(self, peer: int) -> tuple[ParcelTuple, ...]: ...

def build_schedule(
    *,
    op: int,
    m: int,
    n: int,
    k: int,
    rank: int,
    mesh: tuple[int, int, int],
    tile_m: int,
    tile_n: int,
    raster: int,
    comm_rows: int,
    direction: int,
    order: int,
    swizzle: int,
    store: int,
    hosts: Sequence[int] = ...,
    spread: bool = ...,
    split: bool = ...,
    copied: bool = ...,
    in_kernel: bool = ...,
    sums_in_kernel: bool = ...,
    rows: Sequence[int] = ...,
) -> Schedule: ...
def room_for(
    *, order: int, direction: int, mesh: Mesh, hosts: Sequence[int] = ...
) -> tuple[int, int]: ...

class Engine:
    epoch: int
    def __init__(
        self,
        *,
        rank: int,
        pads: Sequence[int],
        data: Sequence[int],
        remote: Sequence[bool],
        row_bytes: int,
        slot_bytes: int,
        result_offset: int,
        data_bytes: int,
        dtype: int,
        signals: int,
        processes: Processes | None = None,
        memory: object = None,
    ) -> None: ...
    def begin(
        self,
        schedule: Schedule | None,
        digest: int,
        threaded: bool,
        timeout_s: float,
        x: int = 0,
        x_stride: int = 0,
        partial: int = 0,
        out: int = 0,
        bias: int = 0,
        scale: float = 1.0,
        selection: Selection | None = None,
    ) -> None: ...
    def require_room(self, schedule: Schedule) -> None: ...
    def skip(self) -> None: ...
    def refuse(self, why: str) -> None: ...
    def wait_entries(self, timeout_s: float, spin_s: float) -> bool: ...
    def wait_visit(self, visit: int, timeout_s: float, spin_s: float) -> bool: ...
    def finish(self, timeout_s: float, spin_s: float) -> bool: ...
    def fate(self, peer: int) -> tuple[str, int]: ...
    def visit_done(self, visit: int) -> None: ...
    def end_call(self) -> None: ...
    def settle(self) -> None: ...
    def await_parcel(self, peer: int, signal: int, epoch: int) -> bool: ...
    def await_agreement(self, epoch: int) -> bool: ...
    def announce(self, signal: int, epoch: int) -> None: ...
    def peer_entered(self, peer: int, epoch: int, digest: int) -> None: ...
    def peer_refused(self, peer: int, epoch: int, why: str) -> None: ...
    def look(self) -> None: ...
    def looks(self, peer: int) -> bool: ...
    def peer_left(self, peer: int, failed: bool, culprit: int = -1) -> None: ...
    def failure(self) -> FailureDict: ...
    def close(self, failed: bool = False, culprit: int = -1) -> None: ...
    def set_delay(self, longest_s: float, seed: int) -> None: ...
    def trace(self, caller: Lane | None = None, worker: Lane | None = None) -> None: ...

class CollectiveReportDict(TypedDict):
    kind: str
    peer: int
    culprit: int
    expected: int
    observed: int
    text: str

class Collectives:
    bytes_sent: int
    private_bytes: int
    def __init__(
        self,
        *,
        rank: int,
        hosts: Sequence[int],
        pads: Sequence[int],
        data: Sequence[int],
        descriptors: Sequence[int],
        processes: Processes | None,
        memory: object,
        slot_bytes: int,
    ) -> None: ...
    def run(
        self,
        *,
        kind: int,
        number: int,
        digest: int,
        input: int,
        out: int,
        offsets: Sequence[int],
        dtype: int,
        timeout_s: float,
        spin_s: float,
        bias: int = 0,
        columns: int = 0,
        scale: float = 1.0,
        round_bytes: int = 0,
        block_columns: int = 0,
        produce: Callable[[int, int], None] | None = None,
        consume: Callable[[int, int], None] | None = None,
        meanwhile: Callable[[], None] | None = None,
        engine: Engine | None = None,
    ) -> str: ...
    def report(self) -> CollectiveReportDict: ...
    def refuse(self, number: int, why: str) -> None: ...
    def end_call(self) -> None: ...
    def close(self, failed: bool = False, culprit: int = -1) -> None: ...
    def set_delay(self, longest_s: float, seed: int) -> None: ...

def collective_partners(hosts: Sequence[int], rank: int) -> list[int]: ...
def collective_bytes(slot_bytes: int, shares: bool) -> int: ...
def interface_address(name: str) -> str: ...

class Lane:
    """Records of one thread: csrc/cpu/lane.h, and flux.core.recorder.Record for the fields."""

    def __init__(self, capacity: int) -> None: ...
    @staticmethod
    def now() -> int: ...
    def add(
        self,
        work: int,
        began_ns: int,
        begin: int = 0,
        end: int = 0,
        peer: int = -1,
        nbytes: int = 0,
        end_ns: int = 0,
    ) -> None: ...
    def add_after_last(
        self, work: int, began_ns: int, number: int, peer: int, nbytes: int
    ) -> None: ...
    @property
    def records(
        self,
    ) -> list[tuple[int, int, int, int, int, int, int, int, int, int, int, int]]: ...
    @property
    def dropped(self) -> int: ...
    def clear(self) -> None: ...

class SharedMapping:
    address: int
    nbytes: int
    def __init__(self, descriptor: int, bytes: int) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Processes:
    pids: list[int]
    def __init__(self, pids: Sequence[int]) -> None: ...
    def ended(self, rank: int) -> bool: ...
    def close(self) -> None: ...

def pad_bytes(signal_count: int) -> int: ...

LAYOUT_NUMBER: int

def reduce(
    dtype: int,
    sources: Sequence[int],
    out: int,
    bias: int,
    rows: int,
    columns: int,
    scale: float = 1.0,
) -> None: ...

class StreamTrace:
    """Records of streams of a GPU, by events: csrc/cuda_host/stream_trace.h."""

    STAMPS: int
    dropped: int
    def __init__(self, driver: Driver, capacity: int) -> None: ...
    def begin(self, stream: int) -> int: ...
    def end(
        self,
        token: int,
        stream: int,
        work: int,
        call: int = 0,
        peer: int = -1,
        begin: int = 0,
        end: int = 0,
        at: int = -1,
        signal: int = -1,
        nbytes: int = 0,
    ) -> None: ...
    def tie(
        self, stream: int, kernel: Kernel | None = None, times: int = 0
    ) -> tuple[int, int, int, int]:
        """Tie the clocks of Lane.now and of the kernels, on an idle device. All values in ns.

        Returns:
            (offset to add to the kernels' clock to get Lane.now, uncertainty of both clocks, bound
            between events and the kernels' clock, resolution of the kernels' clock).
        """

    @property
    def records(
        self,
    ) -> list[tuple[int, tuple[int, int, int, int, int, int, int, int, int, int, int, int]]]: ...
    def close(self) -> None: ...

ABI_VERSION: int
TRACE_RECORD_BYTES: int
TRACE_UNITS: int
TRACE_IN_KERNEL: int
NVSHMEM_ABI: tuple[int, int, int]
"""FLUX_NVSHMEM_ABI_VERSION, and bytes of its two structs of arguments."""
MAX_KERNEL_WORLD: int
STATUS_WORDS: int

class KernelOrder:
    world: int
    rank: int
    order: int
    direction: int
    swizzle: int
    nodes: int
    domains: int
    lanes: int
    raster: int
    comm_tile_rows: int
    column_ranges: int

class KernelSync:
    epoch: int
    timeout_ns: int
    status: int
    report: int
    trace: int

class GemmArgs:
    """FluxGemmArgs of csrc/cuda/abi.h. Pointers are addresses."""

    m: int
    n: int
    k: int
    alpha: float
    a: int
    b: int
    d: int
    bias: int
    scale_a: int
    scale_b: int
    lda: int
    ldb: int
    ldd: int
    order: KernelOrder
    sync: KernelSync
    signals: int
    slot_ld: int
    guard_rows: int
    entries: int
    workspace: int
    workspace_bytes: int
    sm_count: int
    waiting: int
    device: int
    def __init__(self) -> None: ...
    def set_slots(self, slots: Sequence[int]) -> None: ...
    def set_flags(self, flags: Sequence[int]) -> None: ...
    def set_sequence(self, sequence: Sequence[int]) -> None: ...
    def tile_map(self, op: int, tile_m: int, tile_n: int) -> core.TileMap: ...
    def comm_tiling(self) -> tuple[int, int, int]: ...

class ReduceArgs:
    """FluxReduceArgs of csrc/cuda/abi.h. Pointers are addresses."""

    rows: int
    n: int
    first_row: int
    m: int
    tile_m: int
    tile_n: int
    world: int
    rank: int
    slot_ld: int
    slot_count: int
    flags: int
    out_count: int
    out_ld: int
    bias: int
    scale: float
    sm_count: int
    sync: KernelSync
    first_source: int
    source_count: int
    most_blocks: int
    early: int
    def __init__(self) -> None: ...
    def set_slots(self, slots: Sequence[int]) -> None: ...
    def set_outs(self, outs: Sequence[int]) -> None: ...

class Kernel:
    name: str
    tile: tuple[int, int]
    reduces: bool
    traces: bool
    def __init__(self, library: str, symbol: str, file: str = "") -> None: ...
    def prepare(self, device: int) -> None: ...
    def workspace_bytes(self, args: GemmArgs) -> int: ...
    def launch(self, args: GemmArgs, stream: int) -> None: ...
    def reduce(self, args: ReduceArgs, stream: int) -> None: ...

class Driver:
    """The CUDA driver, looked up at run time. Streams and addresses are integers."""

    def __init__(self, library: str = ...) -> None: ...
    def create_stream(self) -> int: ...
    def destroy_stream(self, stream: int) -> None: ...
    def synchronize(self, stream: int) -> None: ...
    def ready(self, stream: int) -> bool: ...
    def order_after(self, later: int, earlier: int) -> None: ...
    def copy(self, stream: int, to: int, from_: int, bytes: int) -> None: ...
    def signal(self, stream: int, word: int, value: int) -> None: ...
    def await_signal(self, stream: int, word: int, value: int) -> None: ...
    def peer_atomics(self, device: int, peer: int) -> bool: ...
    def fill(self, stream: int, words: int, value: int, count: int) -> None: ...
    def capture(self, stream: int) -> int: ...

_GatherPart = tuple[int, int, Sequence[int], Sequence[int]]

def act_as_peer(
    *,
    driver: Driver,
    schedule: Schedule,
    real: int,
    stream: int,
    epoch: int,
    parts: Sequence[_GatherPart],
    entries: Sequence[int],
    signals: Sequence[int],
    offers: Sequence[int],
    trace: StreamTrace | None = None,
) -> None: ...

Rows = tuple[int, int, int, int]
"""Address, elements between rows, columns, address of the scale or 0."""
Operand = tuple[int, int, int, int, int, int, int]
"""Weight, elements between its rows, columns, output, elements between its rows, bias or 0, scale
or 0: see csrc/cuda_host/cuda_op.h."""

class PeerLostError(RuntimeError):
    """A peer of another node missed the timeout."""

class Remote:
    """Peers of other nodes: csrc/cuda_host/remote.h."""

    def close(self) -> None: ...

class DirectRemote(Remote):
    def __init__(
        self,
        *,
        driver: Driver,
        rank: int,
        others: Sequence[int],
        data: Sequence[int],
        mail: Sequence[int],
        status: Sequence[int],
        boxes: int,
    ) -> None: ...

class NvshmemRemote(Remote):
    def __init__(
        self,
        *,
        driver: Driver,
        put: int,
        raise_: int,
        relay: int,
        node_sum: int,
        rank: int,
        world: int,
        others: Sequence[int],
        data: int,
        mail: int,
        status: int,
        boxes: int,
    ) -> None: ...

class NcclRemote(Remote):
    def __init__(
        self,
        *,
        driver: Driver,
        library: str,
        id: bytes,
        rank: int,
        world: int,
        data: int,
        blocks: int,
        timeout_ns: int,
    ) -> None: ...

def nccl_unique_id(library: str) -> bytes: ...
def mail_words(world: int, boxes: int) -> int: ...

class CudaOp:
    """One rank's calls of a fused op on a GPU: csrc/cuda_host/cuda_op.h."""

    epoch: int
    copy_stream: int
    network_stream: int
    failed: bool
    def __init__(
        self,
        *,
        driver: Driver,
        kernels: Sequence[Kernel],
        rank: int,
        pads: Sequence[int],
        data: Sequence[int],
        multicast: int,
        sums_by_switch: bool,
        row_bytes: int,
        slots: int,
        slot_bytes: int,
        guard_bytes: int,
        rest_offset: int,
        sums_offset: int,
        scales_travel: bool,
        all_reduce: bool,
        scale: float,
        signals: int,
        offers: int,
        report: int,
        timeout_ns: int,
        sm_count: int,
        device: int,
        poison: bool,
        nodes: int = 1,
        remote: Remote | None = None,
        beside: int = 0,
        strips: int = 0,
        boxes: int = 0,
        dtype: int = 0,
        shared: bool = False,
        graph_overlap: bool = False,
        lane: int = 0,
        margin: int = 0,
        lends_margin: bool = False,
        pushed_bytes: int = 0,
        sum_flags: int = 0,
        sum_words: int = 0,
        second_offset: int = 0,
        copied_offset: int = 0,
        scaled_rows: bool = False,
        x_bytes: int = 2,
        staged_offset: int = 0,
    ) -> None: ...
    def touch_peers(self) -> None: ...
    @staticmethod
    def pad_words(
        world: int, signals: int, offers: int, sum_words: int = 0, two_buffers: bool = False
    ) -> int: ...
    def require_room(self, schedule: Schedule) -> None: ...
    def close(self) -> None: ...
    def look(self) -> None: ...
    @property
    def key(self) -> int: ...
    def waiting(self) -> tuple[int, int] | None: ...
    def let_go(self) -> None: ...
    def trace(self, kernels: int, streams: StreamTrace | None) -> None: ...
    def workspace_bytes(self, schedule: Schedule, operands: Sequence[Operand], k: int) -> int: ...
    def set_route(self, route: Route, bias: int, probs: int) -> None: ...
    def set_columns(self, columns: Sequence[Sequence[tuple[int, int]]]) -> None: ...
    def project(self, schedule: Schedule, stream: int, x: Rows, operand: Operand) -> None: ...
    def begin_heads(self, schedule: Schedule, stream: int) -> None: ...
    def gather_heads(self, schedule: Schedule, stream: int, operand: Operand) -> None: ...
    def set_workspace(self, stream: int, address: int, bytes: int) -> None: ...
    def ag_gemm(
        self,
        schedule: Schedule,
        stream: int,
        x: Rows,
        operands: Sequence[Operand],
        gathered: int,
        sources: Sequence[int],
    ) -> None: ...
    def scatter(self, schedule: Schedule, stream: int, x: Rows, operand: Operand) -> None: ...
    def reduce(self, schedule: Schedule, stream: int, operand: Operand, out: int) -> None: ...
    def gemm_rs(
        self, schedule: Schedule, stream: int, x: Rows, operand: Operand, out: int
    ) -> None: ...

def load_nvtx(library: str) -> None: ...

class CallSpan:
    """An NVTX range around a call that Python makes in several steps: csrc/cuda_host/nvtx.h."""

    def __init__(self, op: str, m: int) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *exception: object) -> None: ...
