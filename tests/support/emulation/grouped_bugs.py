"""Bugs of the kernels of experts, as edits of their PTX: see seeded_bugs.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from flux import Knobs
from flux.transport.virtual import VirtualWorld
from moe_cases import MoeCase, MoeInputs
from seeded_bug import Bug
from seeded_bugs import (
    ACQUIRED,
    COPIED,
    CP_ASYNC,
    FENCED,
    JOINED,
    NEVER_COMES,
    NOT_JOINED,
    OF_GPU,
    POLLS,
    RELEASED,
    SUMMED,
    TEAM_JOINED,
)

GATHER, SUM = "grouped_kernelI81flux_ag", "grouped_kernelI81flux_grouped"
STORED = r"st\.global\.v4"
CASES = {
    "ag_grouped_gemm": MoeCase("gather", 256, 256, 64, 4, 2, dtype=torch.bfloat16, knobs=Knobs()),
    "grouped_gemm_rs": MoeCase("scatter", 256, 256, 64, 4, 2, dtype=torch.bfloat16, knobs=Knobs()),
    "dispatch": MoeCase(
        "dispatch", 256, 256, 64, 4, 1, ep=2, dtype=torch.bfloat16, knobs=Knobs(comm_tile_rows=32)
    ),
    "combine": MoeCase("combine", 256, 256, 64, 4, 1, ep=2, dtype=torch.bfloat16, knobs=Knobs()),
}


def call_experts(device: Any, ranks: VirtualWorld, op: str, rows: tuple[int, ...]) -> None:
    """Call an op of experts on all ranks, once for each number of tokens, one behind the other."""
    case, world = replace(CASES[op], room=0), ranks.world  # one thread waits for no maps
    if device.capability >= (9, 0):  # more k tiles than stages; and no kernel of sm_80 seems faster
        case = replace(case, n=2 * case.n, k=12 * case.k)
    with ranks:
        device.set_copy_delay(10_000)
        ops = [case.build(group=ranks.rank(r)) for r in range(world)]
        everything = [MoeInputs(case, m, world, "random", m) for m in rows]
        for _ in range(2):  # the first one reads the PTX: copies may be done before kernels start
            given = [[inputs.arguments(r) for inputs in everything] for r in range(world)]

            def calls(r: int, given: Any = given) -> list[torch.Tensor]:
                return [ops[r](*of[:3], **of[3]) for of in given[r]]

            outs = ranks.run(calls)
            device.finish()
        for r, of_rank in enumerate(outs):
            ops[r].wait()
            for inputs, out in zip(everything, of_rank, strict=True):
                inputs.compare(out, r)
            ops[r].close()


def _gather(pattern: str, change: str, error: str, at: str, **more: Any) -> Bug:
    return Bug("80", "ag_grouped_gemm", GATHER, pattern, change, error, at, **more)


def _push(pattern: str, change: str, error: str, at: str, **more: Any) -> Bug:
    return Bug("80", "dispatch", GATHER, pattern, change, error, at, **more)


def _sum(pattern: str, change: str, error: str, at: str, **more: Any) -> Bug:
    return Bug("80", "grouped_gemm_rs", SUM, pattern, change, error, at, **more)


GATHER90, SUM90 = "flux_ag_grouped_gemm_sm90a", "flux_grouped_gemm_rs_sm90a"
MULTIPLIED = "missing is wgmma.wait_group"
WGMMA = r"wgmma\.mma_async"


def _gather90(pattern: str, change: str, error: str, at: str, **more: Any) -> Bug:
    return Bug("90a", "ag_grouped_gemm", GATHER90, pattern, change, error, at, **more)


def _sum90(pattern: str, change: str, error: str, at: str, **more: Any) -> Bug:
    return Bug("90a", "grouped_gemm_rs", SUM90, pattern, change, error, at, **more)


CLAIMED = r"(st\.shared\.u32[^;]*;(?:(?!bar\.sync)[^;])*?)bar\.sync\s+0;"
REACHED = (  # a word has reached the epoch
    r"(sub\.s32\s+(%r\d+), %r\d+, %r\d+;\s*(?:\.loc[^\n]*\s*)*setp\.gt\.s32\s+%p\d+, \2, )-1;"
)

GROUPED_BUGS = {
    # -- AllGather + grouped GEMM
    "signals of tokens read relaxed": _gather(
        r"ld\.acquire\.sys", "ld.relaxed.sys", ACQUIRED, CP_ASYNC
    ),
    "signals of tokens of the call before": _gather(
        REACHED, r"\g<1>-2;", ACQUIRED, CP_ASYNC, rows=(256, 256)
    ),
    "no barrier behind the waits for tokens": _gather(
        r"bar\.sync\s+0;", "", ACQUIRED, CP_ASYNC, number=2
    ),
    "a claimed item is read without a barrier": _gather(
        CLAIMED, r"\1", "it was loaded from memory that was never written", r"setp\."
    ),
    "rows of the first token's communication tile alone": _gather(
        r"setp\.gt\.s32\s+(%p\d+), (%r\d+), 127;", r"setp.gt.s32 \1, \2, 0;", ACQUIRED, CP_ASYNC
    ),
    # -- the same with rows that it pushes
    "signals of pushes raised relaxed": _push(
        r"st\.release\.sys", "st.relaxed.sys", RELEASED, CP_ASYNC
    ),
    "no barrier before the signal of a push": _push(JOINED, NOT_JOINED, RELEASED, CP_ASYNC),
    "entries of pushes read relaxed": _push(
        r"ld\.acquire\.sys", "ld.relaxed.sys", COPIED, STORED, number=3, rows=(131, 256, 131)
    ),
    # -- grouped GEMM + ReduceScatter
    "products counted without a fence": _sum(r"membar\.gl;", "", OF_GPU, SUMMED),
    "no barrier before products are counted": _sum(
        r"bar\.sync\s+0;", "", OF_GPU, SUMMED, number=-1
    ),
    "counts read relaxed": _sum(r"ld\.acquire\.gpu", "ld.relaxed.gpu", OF_GPU, SUMMED),
    "no barrier behind the count": _sum(
        r"(ld\.acquire\.gpu(?:(?!bar\.sync)[\s\S])*)bar\.sync\s+0;", r"\1", OF_GPU, SUMMED
    ),
    "a count is not set back": _sum(
        r"st\.global\.u32[^;]*;", "", NEVER_COMES, r"ld\.acquire\.gpu", idle=True, rows=(256, 256)
    ),
    "entries of sums read relaxed": _sum(
        r"ld\.acquire\.sys", "ld.relaxed.sys", RELEASED, STORED, rows=(131, 256, 131)
    ),
    "flags of sums raised relaxed": _sum(r"st\.release\.sys", "st.relaxed.sys", RELEASED, SUMMED),
    "no barrier before the flags of sums": _sum(JOINED, NOT_JOINED, RELEASED, SUMMED),
    "the counter of items is not set back": _sum(
        r"atom\.global\.exch\.b64[^;]*;", "", NEVER_COMES, POLLS, idle=True
    ),
    # -- each rank a node, which libflux_nvshmem connects
    "signals of tokens from other nodes read relaxed": _gather(
        r"ld\.acquire\.sys", "ld.relaxed.sys", ACQUIRED, CP_ASYNC, puts=True
    ),
    "flags of sums for a relay raised relaxed": _sum(
        r"st\.release\.sys", "st.relaxed.sys", OF_GPU, SUMMED, puts=True
    ),
    "no barrier before the flags of sums for a relay": _sum(
        JOINED, NOT_JOINED, OF_GPU, SUMMED, puts=True
    ),
    # -- the same with wgmma
    "signals of tokens read relaxed by producers": _gather90(
        r"ld\.acquire\.sys", "ld.relaxed.sys", ACQUIRED, CP_ASYNC
    ),
    "no barrier behind the producers' waits": _gather90(
        TEAM_JOINED, NOT_JOINED, ACQUIRED, CP_ASYNC, number=-1
    ),
    "a stage is multiplied without a proxy fence": _gather90(
        r"fence\.proxy\.async\.shared::cta;", "", FENCED, WGMMA
    ),
    "a stage is multiplied before its copies are done": _gather90(
        r"cp\.async\.mbarrier\.arrive\.noinc\.(\S+) (\S+);",
        r"mbarrier.arrive.\1 _, \2;",
        COPIED,
        WGMMA,
    ),
    "a stage is given back while it is multiplied": _gather90(
        r"wgmma\.wait_group\.sync\.aligned 1;",
        "wgmma.wait_group.sync.aligned 2;",
        MULTIPLIED,
        CP_ASYNC,
    ),
    "products of wgmma counted without a fence": _sum90(r"membar\.gl;", "", OF_GPU, SUMMED),
    "no barrier before products of wgmma are counted": _sum90(
        TEAM_JOINED, NOT_JOINED, OF_GPU, SUMMED, number=0
    ),
}
