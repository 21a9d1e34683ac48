"""What devices and links reach of their data sheets, and what a call costs besides.

One set serves all clusters. Speeds themselves are in cluster files (flux/machine/cluster.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flux.core.knobs import Op

if TYPE_CHECKING:
    from flux.kernels.config import GemmConfig
    from flux.machine.cluster import Link

# -- devices ---------------------------------------------------------------------------------------

GEMM_SHARE = {"cpu": 0.8, "cuda": 0.75}
"""Share of the peak that a large GEMM reaches."""
ATTENTION_SHARE = {"cuda": 0.5, "cpu": 0.6}
"""Share of the peak that attention reaches. FlashAttention-2 reaches 50 to 73% on an A100, the
lower end with a causal mask (arXiv 2307.08691, section 4.1)."""
BACKWARD_ATTENTION = 2.5
"""Operations of attention's backward over its forward: five products in place of two."""
ELEMENTWISE_SHARE = 0.8
"""Share of the memory bandwidth that elementwise kernels reach."""
MEMORY_COPY_SHARE = 0.75
"""Share of the memory bandwidth that a copy inside the GPU reaches: 2500 of 3350 GB/s on an H100,
reads and writes (github.com/NVIDIA/nccl/issues/1264). Sums of partials are of the same kind."""

# -- links -----------------------------------------------------------------------------------------

LIBRARY_SHARE = {
    "cpu": {Op.ag_gemm: 0.075, Op.gemm_rs: 0.025, Op.gemm_ar: 0.09},
    "cuda": dict.fromkeys(Op, 0.8),
}
"""Share of a link's nominal speed that library collectives reach. gloo sends through sockets: of 10
GB/s in shared memory its all_gather reached 0.75, its reduce_scatter, which is an all_reduce
inside, 0.22 to 0.35, and its all_reduce, which moves twice as much, 0.9 (benchmarks/results/cpu,
comm_ms). NCCL's large messages reach about 80%."""
COPY_SHARE = 0.84
"""Share of a link's nominal speed that copy engines reach. They send 256 bytes with each header:
376 of 450 GB/s on an H100 (github.com/NVIDIA/nccl/issues/1264), and about 27 of 32 GB/s on PCIe 4
(256 bytes of payload in a packet, 128b/130b code, flow control)."""
STORE_SHARE = 0.8
"""The same for stores of multiprocessors, which send 128 bytes with each header: 20 of 25 GB/s on
an NVLink (github.com/NVIDIA/nccl-tests/issues/149)."""
NETWORK_SHARE = 0.9
"""The same for messages between hosts; our assumption."""
DUPLEX_SHARE = 0.77
"""PCIe: share of twice a link's speed that both directions reach together. Between GPUs on PCIe 4,
where one direction reaches 27 GB/s, both reached 41.4 GB/s
(github.com/tinygrad/open-gpu-kernel-modules/issues/6)."""
OVERLAP = {"cuda": {1: 0.85, 2: 0.95}, "cpu": {1: 0.0, 2: 0.7}}
"""Overlap effectiveness (OEF) of computation and a collective on one host, and on two or more: our
assumption, of a cluster whose file has no table ``overlap``. On a GPU, collectives take some
multiprocessors and memory bandwidth. On a CPU, ranks of a host copy with the cores that multiply.
"""

# -- overheads ---------------------------------------------------------------------------------

LAUNCH_US = {"cuda": 3.0, "cpu": 10.0}
"""From the end of one piece of work on a stream to the start of the next, such as a kernel behind a
copy, or a stream that awaits another's event; our assumption."""
PUSH_US = 4.0
"""What blocks that push rows (cuda/gather.cuh) take besides bytes: the call's number, a piece, its
rows, a fence and its count are five trips to L2 or to a peer, one behind the other, of some 0.7 us;
our assumption."""
ROUTE = {True: (13.0, 2.6), False: (19.0, 4.0)}
"""By whether the op gathers: us of the block that lists a grouped GEMM's work, and ns for each
choice of all tokens. On an H200, 21 and 31 us for 3,072 choices, 56 and 84 us for 16,384
(benchmarks/results/h200/grouped.json)."""
ROUTE_ONE_BLOCK = 8192
"""Choices up to which it is one block (csrc/cuda_moe/route.h)."""
ROUTE_MANY = (40.0, 0.2)
"""The same of more choices: up to nine launches, and 16 times as many warps; our assumption."""
SUM_US = 3.0
"""The same of blocks that end an AllReduce (cuda/gemm/all_reduce.cuh): two claims, the partials and
the rows of the result are trips to L2, besides signals; our assumption."""
BESIDE_GBS = 3.8
"""GB/s of partials that the idle warps of a multiprocessor load beside its GEMM: three warps with
four loads of 8 bytes under way in each lane, and 0.8 us to memory and back; our assumption."""
SLAB_COST_ROWS = 50.0
"""A GEMM cut into slabs packs its weight again for each slab. The cost equals that of this many
more rows (5% of 1024 rows, 10% of 512, 20% of 256: flux/select/heuristic.py)."""
SLAB_COST_COLUMNS = 12.0
"""The same of a GEMM cut along N, which packs x again: of the columns of the result. 1.0 to 1.4% of
1024 columns for each slab, with 8 and 16 experts as with none, on a Zen 5; of 2048 to 4096 columns
nothing is to be seen."""
EXPERT_COST_ROWS = 25.0
"""The same of each weight of a grouped GEMM: 16 to 36 rows with weights of 1024 x 1024 and 64 to
512 rows of each, on a Zen 4."""
FEW_ROWS = 64
"""Rows up to which a GEMM of a CPU takes as long as reading its weight, which slabs read again."""
SIGNAL_US = {"cpu": 3.0, "cuda": 1.6}
"""Time to raise a signal of a communication tile, and for a poll to see it. GPUs: a stream writes
one in that time on an H100 (benchmarks/results/h100/streams.json)."""
ENGINE_US = 60.0
"""Time to hand copies to another thread, on a CPU: two wake-ups."""
NETWORK_CALL_US = 800.0
"""What a call of path = fused takes between hosts on a CPU besides bytes: headers, and threads of
gloo that wake for each message. GemmAR at M = 1 took 0.8 to 1.1 ms longer than its GEMM
(benchmarks/results/hosts/one_shot.json)."""
ONE_SHOT_US = 100.0
"""The same of path = one_shot."""
SOCKETS_BYTES = 2 << 20
"""Bytes that travel between two hosts while no thread sends or receives: what the buffers of both
sockets hold. Linux starts below and grows them up to 4 and 6 MiB. Path one_shot of AGGroupedGemm at
M = 2048 (4 MiB for each rank, a multiply of 30 ms beside them) hid 2.6 MB, at M = 4096 4.5 MB."""
NETWORK_CPU_MS_PER_MB = 1.3
"""Time of a core to send a megabyte to another host and to receive one. The multiply beside it has
to do without it: 25 to 90 ms for 17 to 67 MB (docs/contribute/results/hosts.md)."""
LIBRARY_LATENCY_US = {"cpu": 2000.0, "cuda": 15.0}
"""Time until the first byte of a library's collective moves. On the CPU from benchmarks/results/cpu
at M = 1."""
LOW_LATENCY = (1 / 3, 2.0)
"""NCCL's protocol for small messages between GPUs of a host: latency of a hop over that of a copy,
and time of its bytes, half of which are flags. With them an AllReduce of 1 MiB between 8 H100 takes
39 us, of 8 KiB over PCIe 54 us; measured were 20 to 25 us (github.com/marin-community/marin/issues/
6736) and 57 us (github.com/vllm-project/vllm/issues/50576)."""
UNHIDDEN = 0.125
"""Exposed share of the shorter of multiplying and reading memory: ramps at both ends do not
overlap."""
CYCLES_PER_MS = 1.8e6
"""Of the cycles that flux/select/cycles.py counts."""
L2_TO_MEMORY = 3.0
"""Speed of L2 over that of memory: 40 bytes per cycle and multiprocessor on an H100
(flux/select/cycles.py) are 2.9 times its 3350 GB/s."""
GPC_SMS = 18  # multiprocessors among which a cluster must fit (CUTLASS, tile_scheduler_params.h)


def blocks_per_wave(config: GemmConfig, sm_count: int) -> int:
    """Return the thread blocks that run at once: clusters do not cross the borders of GPCs."""
    size = config.cluster[0] * config.cluster[1]
    if size == 1:
        return sm_count
    whole, rest = divmod(sm_count, GPC_SMS)
    fitting = whole * (GPC_SMS - GPC_SMS % size) + (rest - rest % size)
    return max(fitting, size)


def duplex_share(link: Link) -> float:
    """Return the share of a link's speed that a rank which sends and receives at once has."""
    return DUPLEX_SHARE if link.kind == "pcie" else 1.0
