"""The single definition of which kernels can exist, where they run, and which problems they solve.

The sets, the heuristic, the tuner's pruner and the tests all call these functions. Functions return
a reason: None if legal, or one sentence about the problem.
"""

from __future__ import annotations

from dataclasses import dataclass

from flux.core.problem import Problem
from flux.kernels.config import GATED, GROUPED, SCHEDULES, TMA_BYTES, GemmConfig

MAX_WORLD = 32
"""FLUX_MAX_WORLD of csrc/cuda/abi.h: ranks whose memory one kernel can address."""

KIB = 1024
# Shared memory limit of a thread block, by compute capability (CUDA programming guide, "Technical
# Specifications per Compute Capability").
_SHARED_BYTES = {
    (8, 0): 163 * KIB,
    (8, 6): 99 * KIB,
    (8, 7): 163 * KIB,
    (8, 9): 99 * KIB,
    (9, 0): 227 * KIB,
    (10, 0): 227 * KIB,
    (10, 3): 227 * KIB,
    (11, 0): 227 * KIB,
    (12, 0): 99 * KIB,
    (12, 1): 99 * KIB,
}
_SMALLEST_SHARED_BYTES = 99 * KIB

# fp32 accumulators of one thread, twice as many where sums are promoted. 90a: CUTLASS gives 232
# registers to a thread of a consumer warp group; about 40 are needed for other values. 80: of 255.
_SM90_ACCUMULATORS = 192
_SM80_ACCUMULATORS = 128
# Of kernels of experts, whose consumers have 216 registers; producers have 72, and keep the address
# of every 16th row of a tile. With more of either, compiled kernels spilled.
_GROUPED_ACCUMULATORS = 128
_GATHERED_ROWS = 128

_SM90_BARRIER_BYTES = 16  # per stage: one full and one empty barrier
# Barriers of the load order, of the epilogue and of the scheduler, and padding for alignment.
_SM90_SCHEDULER_BYTES = 1 * KIB + 128
_SM90_EPILOGUE_COLUMNS = 32  # CUTLASS's automatic epilogue tile
_SM90_SCATTER_COLUMNS = 64  # of tiles that scatter (sm90/gemm_rs.cuh), if these divide them
_SM90_EPILOGUE_STAGES = 2

_SM80_TILE_K = (32, 64)
_SM80_STAGES = range(2, 6)
_SM80_WARPS = range(2, 9)
_WARP_THREADS = 32
_VECTOR_BYTES = 16  # one copy of a thread to shared memory on 80
_SUMS = ("gemm_rs", "grouped_gemm_rs")


@dataclass(frozen=True)
class GemmProblem:
    """The GEMM of one rank's kernel.

    It has local sizes; ``flux.core.problem.Problem`` has those of the whole op.

    Attributes:
        m: rows, of all ranks.
        n: columns: of this rank for ag_gemm, of all for gemm_rs.
        k: depth: of all ranks for ag_gemm, of this one for gemm_rs.
        world: number of ranks.
        experts: weights, which have about as many of the rows each; a tile has rows of one.
        aligned_bytes: power of two that all addresses and row strides are known to be multiples of:
            16 for contiguous tensors that PyTorch allocates (n and k are checked in any case).
    """

    m: int
    n: int
    k: int
    world: int = 1
    aligned_bytes: int = TMA_BYTES
    experts: int = 1

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "world", "aligned_bytes", "experts"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value < 2**31:
                raise ValueError(f"{name} must be an integer in [1, 2**31), got {value!r}")

    @classmethod
    def of(cls, problem: Problem) -> GemmProblem:
        """Return the largest GEMM that a rank runs for an op."""
        n, k = problem.local
        return cls(problem.m, n, k, problem.world)


def is_legal(config: GemmConfig, problem: GemmProblem) -> bool:
    """Return whether this kernel can exist and solve this problem, on any GPU."""
    return reason_unsupported(config, problem) is None


def reason_unsupported(config: GemmConfig, problem: GemmProblem) -> str | None:
    """Return why ``config`` cannot solve ``problem``; None if it can."""
    reason = reason_illegal(config)
    if reason is not None:
        return reason
    if config.op in _SUMS and problem.world > MAX_WORLD:
        return f"{config.op} addresses at most {MAX_WORLD} ranks, got {problem.world}"
    elements = config.alignment_elements
    needed = elements * config.itemsize
    if problem.aligned_bytes % needed:
        return (
            f"addresses and distances between rows must be multiples of {needed} bytes, "
            f"got {problem.aligned_bytes}"
        )
    rows = [("K", problem.k, elements)]
    if config.weight == "kn":
        rows.append(("N", problem.n, elements))
    # The result's rows; on 80 results are stored in vectors of as many elements as operands are
    # loaded.
    rows.append(("N", problem.n, config.alignment or TMA_BYTES // config.output_itemsize))
    if config.activation in GATED:
        rows.append(("N", problem.n, 2 * TMA_BYTES // config.output_itemsize))
    for extent, value, multiple in rows:
        if value % multiple:
            return f"{extent} must be a multiple of {multiple}, got {value}"
    return None


def reason_not_summing(config: GemmConfig) -> str | None:
    """Return why a kernel cannot sum the own rows of a ReduceScatter; None if it can."""
    if config.arch == "90a" and config.schedule != "stream_k":
        return None
    return (
        "reduce = in_kernel needs a kernel of sm_90a that is not stream-K, got "
        f"{config.schedule} of sm_{config.arch}"
    )


def reason_wrong_gpu(config: GemmConfig, capability: tuple[int, int]) -> str | None:
    """Return why the kernel does not run on GPUs of this compute capability; None if it does."""
    major, minor = capability
    if config.arch == "90a":
        if capability != (9, 0):
            return f"sm_90a code runs on compute capability 9.0 only, not on {major}.{minor}"
        return None
    if capability < (8, 0):
        return f"needs compute capability 8.0 or newer, got {major}.{minor}"
    available = _SHARED_BYTES.get(capability, _SMALLEST_SHARED_BYTES)
    needed = shared_bytes(config)
    if needed > available:
        return (
            f"needs {needed} bytes of shared memory, compute capability {major}.{minor} has "
            f"{available}"
        )
    return None


def runs_on(config: GemmConfig, capability: tuple[int, int]) -> bool:
    """Return whether the kernel runs on GPUs of this compute capability."""
    return reason_wrong_gpu(config, capability) is None


def reason_illegal(config: GemmConfig) -> str | None:
    """Return why there is no such kernel for any problem; None if there can be."""
    if config.schedule not in SCHEDULES[config.arch]:
        offered = ", ".join(SCHEDULES[config.arch])
        return f"sm_{config.arch} has the schedules {offered}, not {config.schedule}"
    by_arch = _reason_illegal_sm90 if config.arch == "90a" else _reason_illegal_sm80
    return _reason_illegal_data(config) or _reason_illegal_grouped(config) or by_arch(config)


def shared_bytes(config: GemmConfig) -> int:
    """Return bytes of shared memory per thread block.

    On 90a with ``stages`` 0, for the minimum of two stages.
    """
    m, n, k = config.tile
    stage = (m + n) * k * config.itemsize
    if config.arch == "80":
        return config.stages * stage  # the epilogue reuses it
    if config.op in GROUPED:
        stage += 4 * m if config.scaling == "row" else 0
        return max(config.stages, 2) * stage + KIB  # results go from registers to memory
    rows = 64 if config.schedule == "pingpong" else 128
    scatters = config.op == "gemm_rs" and n % _SM90_SCATTER_COLUMNS == 0
    columns = _SM90_SCATTER_COLUMNS if scatters else _SM90_EPILOGUE_COLUMNS
    buffers = min(_SM90_EPILOGUE_STAGES, max(m // rows * (n // columns), 1))
    epilogue = buffers * rows * columns * config.output_itemsize
    bias = 0 if config.op == "gemm_rs" else 2 * n * config.output_itemsize
    vectors = bias + (4 * (m + n) if config.scaling == "row" else 0)
    stages = max(config.stages, 2)
    return stages * (stage + _SM90_BARRIER_BYTES) + epilogue + vectors + _SM90_SCHEDULER_BYTES


def _reason_illegal_data(config: GemmConfig) -> str | None:
    """Check the fields about data, for all architectures."""
    if config.dtype == "e4m3":
        if config.arch != "90a":
            return f"e4m3 needs sm_90a, got sm_{config.arch}"
        if config.weight != "nk":
            return (
                f"e4m3 is multiplied with K contiguous only: weight must be nk, got {config.weight}"
            )
        if config.scaling == "none":
            return "e4m3 needs scaling by tensor or row, got none"
    elif config.scaling != "none":
        return f"scaling is for e4m3: must be none for {config.dtype}, got {config.scaling}"
    if config.promoted and config.dtype != "e4m3":
        return f"only sums of e4m3 are promoted: promoted must be false for {config.dtype}"
    if config.activation != "none" and config.op in _SUMS:
        return (
            f"{config.op} sums over ranks first: activation must be none, got {config.activation}"
        )
    if config.activation in GATED and (config.op, config.arch) != ("ag_grouped_gemm", "90a"):
        return (
            f"activation {config.activation} is for ag_grouped_gemm on sm_90a, not {config.op} on "
            f"sm_{config.arch}"
        )
    if config.reduce == "in_flight" and (config.op, config.arch) != ("gemm_rs", "90a"):
        return f"reduce in_flight is for gemm_rs on sm_90a, not {config.op} on sm_{config.arch}"
    if config.tile_scheduler == "dynamic" and (
        config.op == "gemm" or config.schedule == "stream_k"
    ):
        return f"tile_scheduler dynamic is not for {config.op} with schedule {config.schedule}"
    return None


def _reason_illegal_grouped(config: GemmConfig) -> str | None:
    """Check the kernels of experts."""
    if config.op not in GROUPED:
        return None
    if config.schedule == "stream_k" or config.tile_scheduler != "dynamic":
        return (
            f"{config.op} claims whole tiles one by one: needs tile_scheduler dynamic without "
            f"stream_k, got {config.schedule} with {config.tile_scheduler}"
        )
    if config.arch == "90a":
        return _reason_illegal_grouped_sm90(config)
    if config.op == "grouped_gemm_rs" and config.alignment not in (1, 8):
        return f"grouped_gemm_rs loads products as 1 or 8 elements, got {config.alignment}"
    return None


def _reason_illegal_grouped_sm90(config: GemmConfig) -> str | None:
    """Check what follows from operands that cp.async copies (csrc/cuda_moe/sm90.cuh)."""
    if config.cluster != (1, 1):
        return f"{config.op} copies for one block: cluster must be (1, 1), got {config.cluster}"
    if config.tile[1] % 64 or config.tile[2] * config.itemsize != 128:
        return (
            f"{config.op} copies 64 columns or 128 bytes of K at once, got a tile of "
            f"{config.tile} in {config.dtype}"
        )
    if config.op == "ag_grouped_gemm" and config.tile[0] > _GATHERED_ROWS:
        return f"{config.op} gathers at most {_GATHERED_ROWS} rows, got a tile of {config.tile}"
    threads = 128 if config.schedule == "pingpong" else 256
    accumulators = config.tile[0] * config.tile[1] // threads * (2 if config.promoted else 1)
    if accumulators > _GROUPED_ACCUMULATORS:
        return (
            f"{config.op} needs {accumulators} accumulators per thread, at most "
            f"{_GROUPED_ACCUMULATORS} fit"
        )
    return None


def _reason_illegal_sm90(config: GemmConfig) -> str | None:
    m, n, k = config.tile
    if config.warps is not None:
        return f"the schedule implies the warps of sm_90a: warps must be None, got {config.warps}"
    if config.alignment:
        return f"TMA fixes the alignment of sm_90a: it must be 0, got {config.alignment}"
    if config.stages == 1:
        return "a pipeline needs 2 stages or more (0: as many as fit), got 1"
    if any(extent not in (1, 2, 4) for extent in config.cluster):
        return f"cluster extents must be 1, 2 or 4, got {config.cluster}"
    if config.cluster[0] * config.cluster[1] > 8:
        return f"a cluster has at most 8 thread blocks, got {config.cluster}"
    # One instruction of a consumer warp group computes 64 rows.
    groups = 1 if config.schedule == "pingpong" else 2
    if m % (64 * groups):
        return f"{config.schedule} needs rows in multiples of {64 * groups}, got a tile of {m}"
    step = 16 if config.dtype == "e4m3" else 8
    if n % step or n > 256:
        return f"columns of a tile must be a multiple of {step} and at most 256, got {n}"
    if k * config.itemsize not in (64, 128):
        return f"the depth of a tile must be 64 or 128 bytes, got {k * config.itemsize}"
    accumulators = m * n // (128 * groups) * (2 if config.promoted else 1)
    if accumulators > _SM90_ACCUMULATORS:
        return (
            f"{config.schedule} {m}x{n} needs {accumulators} accumulators per thread, at most "
            f"{_SM90_ACCUMULATORS} fit"
        )
    return _too_much_shared(config, (9, 0))


def _reason_illegal_sm80(config: GemmConfig) -> str | None:
    m, n, k = config.tile
    if config.warps is None:
        return "sm_80 needs warps (m, n), got None"
    if config.cluster != (1, 1):
        return f"sm_80 has no clusters: cluster must be (1, 1), got {config.cluster}"
    if config.stages not in _SM80_STAGES:
        return f"sm_80 needs 2 to 5 stages, got {config.stages}"
    if config.alignment not in (1, 2, 4, 8):
        return f"sm_80 needs an alignment of 8, 4, 2 or 1 elements, got {config.alignment}"
    # cp.async moves 4, 8 or 16 bytes; the pipeline of two stages goes through registers instead.
    if config.alignment == 1 and config.stages != 2:
        return f"alignment 1 is below what cp.async moves: needs 2 stages, got {config.stages}"
    if k not in _SM80_TILE_K:
        return f"the depth of a tile must be 32 or 64, got {k}"
    warps_m, warps_n = config.warps
    if warps_m * warps_n not in _SM80_WARPS:
        return f"a thread block has 2 to 8 warps, got {config.warps}"
    if m % (16 * warps_m) or n % (16 * warps_n):
        return f"warps {config.warps} do not divide a tile of {m}x{n} into multiples of 16x16"
    threads = _WARP_THREADS * warps_m * warps_n
    # Every thread must load the same number of vectors of each operand.
    rows = threads * (_VECTOR_BYTES // config.itemsize) // k
    if m % rows or (config.weight == "nk" and n % rows):
        return f"{threads} threads load {rows} rows at once, which does not divide {m}x{n}"
    # A warp loads 4 rows of 64 elements of [K, N].
    if config.weight == "kn" and (n % 64 or k % (4 * warps_m * warps_n)):
        return f"{warps_m * warps_n} warps cannot load a [K, N] tile of {k}x{n} evenly"
    if not _stores_evenly(n, warps_n, config.alignment):
        return f"{warps_n} warps cannot store rows of {n} columns evenly"
    accumulators = m * n // threads
    if accumulators > _SM80_ACCUMULATORS:
        return (
            f"{m}x{n} on {threads} threads needs {accumulators} accumulators per thread, at most "
            f"{_SM80_ACCUMULATORS} fit"
        )
    return _too_much_shared(config, (8, 0))


def _stores_evenly(columns: int, warps: int, elements: int) -> bool:
    """Return whether CUTLASS 2.x can divide 8 rows of the result among the warps side by side.

    This follows OutputTileOptimalThreadMap: a thread stores ``elements`` at once; a warp stores 256
    bytes of one row, or fewer bytes of more rows.
    """
    if warps not in (1, 2, 4):  # 8 would store whole rows of 32 threads, and no tile here has those
        return False
    rows, width = 8 // warps, columns // elements
    preferred = 128 // elements  # of 2 bytes each
    if _WARP_THREADS // preferred > rows:
        access_rows, access_width = rows, _WARP_THREADS // rows
    else:
        access_width = min(width, _WARP_THREADS, preferred)
        access_rows = min(8, _WARP_THREADS // access_width)
    return rows % access_rows == 0 and width % access_width == 0


def _too_much_shared(config: GemmConfig, capability: tuple[int, int]) -> str | None:
    needed, available = shared_bytes(config), _SHARED_BYTES[capability]
    if needed > available:
        return f"needs {needed} bytes of shared memory, a thread block has {available}"
    return None
