"""Bugs of flux's own kernels, as edits of their PTX, and what the PTX machine says of each.

``python tests/support/emulation/seeded_bugs.py`` writes the list of them, tests/ptx/seeded_bugs.md.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from seeded_bug import Bug

PAGE = Path(__file__).parents[2] / "ptx" / "seeded_bugs.md"

SM80, SM90, REDUCE = "sm806kernel", "device_kernel", "reduce_kernelIN7cutlass10bfloat16_tELi8"
DYNAMIC = "dynamic_config"
MEET = "meet_kernel"
RELAY = "relay_kernelIN7cutlass10bfloat16_tELi8"
NODE_SUM = "node_sum_kernelIN7cutlass10bfloat16_tELi8"

# -- what messages say is missing ------------------------------------------------------------------
ACQUIRED = "missing is an acquire of the signal that announces it"
RELEASED = r"missing is a release and an acquire \(or fences\) of scope .sys"
OF_GPU = r"missing is a release and an acquire \(or fences\) of scope .gpu"
PUSHED = r"missing is a release and an acquire \(or fences\) of scope .(gpu|sys)"
SCOPE = "missing is the scope .sys at both"
FENCED = "missing is a fence.proxy.async between them"
BARRIER = "missing is a barrier of both warps"
COPIED = "missing is cp.async.wait_group by the thread that copies"
BULK_READ = "missing is cp.async.bulk.wait_group.read by the thread that copies"
BULK = r"missing is cp.async.bulk.wait_group \(without .read\) by the thread that copies"
COUNTED = "missing is a wait for the phase of the mbarrier that counts its bytes"
MULTIPLIED = "missing is wgmma.wait_group"
NIC_FENCED = r"missing is a fence of scope .sys by the thread that wrote"
PUT_SEEN = "missing is an acquire of the (signal that announces it|word that the put raises)"
DEADLOCK = "deadlock: every thread waits"
NEVER_COMES = "deadlock: every thread waits, or polls what nothing changes"

# -- statements ------------------------------------------------------------------------------------
CP_ASYNC = r"cp\.async\.cg\.shared\.global"
LDMATRIX = r"ldmatrix\.sync"
SUMMED = r"ld\.global\.cg"  # the reduction reads a partial
STORED = r"@p st\.global\.v4"  # the GEMM of sm_80 writes one
FLAG = r"(ld\.acquire|st\.release)"
TMA_LOAD = r"cp\.async\.bulk\.tensor\.3d\.shared::cluster\.global"
TMA_STORE = r"cp\.async\.bulk\.tensor\.[23]d\.global\.shared::cta"
TMA_ADD = r"cp\.reduce\.async\.bulk\.tensor\.2d\.global\.shared::cta\.add"
STMATRIX = r"stmatrix\.sync"
PRODUCT = r"wgmma\.mma_async"
TRY_WAIT = r"mbarrier\.try_wait"
PUT = "call.uni"
WAITS = r"[^\n]*\n +waits for "
SPINS = r"(vote\.sync|nanosleep|ld|mov|setp|@|bra|sub|add)"
POLLS = r"ld\.acquire\.sys" + WAITS + "a change of 4 bytes at"

# -- patterns --------------------------------------------------------------------------------------
JOINED = r"bar\.red\.and\.pred\s+(\S+), 0, (\S+);"  # __syncthreads_and
TEAM_JOINED = r"barrier\.cta\.red\.and\.pred\s+(\S+), \S+, \d+, (\S+);"  # all_of_team
NOT_JOINED = r"and.pred \1, \2, \2;"
REACHED = r"setp\.gt\.s32\s+(\S+), (\S+), -1;"  # a word has reached the epoch
REACHED_BEFORE = r"setp.gt.s32 \1, \2, -2;"
FIRST_SIGNAL = r"(?=\s*@\S+ bra \S+;\s*(?:\.loc[^\n]*\s*)*cvt\.s64\.s32)"  # a loop begins
# How many flags a strip has, compared with the number of a thread.
FLAGS_OF_STRIP = (
    r"(mul\.lo\.s32\s+(%r\d+), %r\d+, %r\d+;)"
    r"(?=\s*(?:\.loc[^\n]*\s*)*setp\.ge\.s32\s+%p\d+, %r\d+, \2;)"
)
NUMBERED = (  # the number of a call of path in_kernel is read
    r"(ld\.volatile\.global\.u32 (\S+), [^;]*;\s*(?:\.loc[^\n]*\s*)*add\.s32 \S+, \2, )1;"
)
ALL_BEGUN = (  # blocks of the launch, compared with all
    r"(setp\.eq\.s32\s+(\S+), )\S+, (\S+);"
    r"(?=(?:\s*\.loc[^\n]*|\s*mov[^\n]*)*\s*vote\.sync\.any)"
)
ALIAS_FENCE = r"fence\.proxy\.alias;"
ALIASES = "missing is a fence.proxy.alias between them"
LAST_STORE = (
    r"(?s)(\{\s*\.reg \.pred p;\s*setp\.ne\.b32 p, \S+, 0;\s*@p st\.global\.v4[^}]*\};\s*\})"
)
BEHIND = r"((?:(?!@p st\.global\.v4).)*?st\.release\.sys[^;]*;)"
AHEAD = 16 * (1,)  # the rank without a row has nothing to add up, and gets ahead of the other


def _ag80(pattern: str, change: str, error: str, at: str, **more: Any) -> Bug:
    return Bug("80", "ag_gemm", SM80, pattern, change, error, at, **more)


def _rs80(pattern: str, change: str, error: str, at: str, **more: Any) -> Bug:
    return Bug("80", "gemm_rs", SM80, pattern, change, error, at, **more)


def _sum80(pattern: str, change: str, error: str, at: str, **more: Any) -> Bug:
    return Bug("80", "gemm_rs", REDUCE, pattern, change, error, at, **more)


def _ag90(pattern: str, change: str, error: str, at: str, **more: Any) -> Bug:
    return Bug("90a", "ag_gemm", SM90, pattern, change, error, at, **more)


def _rs90(pattern: str, change: str, error: str, at: str, **more: Any) -> Bug:
    return Bug("90a", "gemm_rs", SM90, pattern, change, error, at, **more)


def _meet(arch: str, pattern: str, change: str, error: str, at: str, **more: Any) -> Bug:
    return Bug(arch, "gemm_rs", MEET, pattern, change, error, at, captured=True, **more)


def _pushed(pattern: str, change: str, error: str, at: str, **more: Any) -> Bug:
    return _ag80(pattern, change, error, at, path="in_kernel", **more)


def _claimed(arch: str, pattern: str, change: str, error: str, at: str, **more: Any) -> Bug:
    op = more.pop("op", "ag_gemm")
    return Bug(arch, op, DYNAMIC, pattern, change, error, at, tile_scheduler="dynamic", **more)


def _summed(pattern: str, change: str, error: str, at: str, **more: Any) -> Bug:
    return Bug("80", "gemm_ar", SM80, pattern, change, error, at, path="in_kernel", **more)


def _switched(at: str, **more: Any) -> Bug:
    more |= {"path": "in_kernel", "switch": True}
    return Bug("90a", "gemm_ar", SM90, ALIAS_FENCE, "", ALIASES, at, **more)


def _node(kernel: str, pattern: str, change: str, error: str, at: str, **more: Any) -> Bug:
    return Bug("80", "gemm_rs", kernel, pattern, change, error, at, puts=True, **more)


BUGS = {
    # -- sm_80: AllGather + GEMM
    "acquire made relaxed": _ag80(r"ld\.acquire\.sys", "ld.relaxed.sys", ACQUIRED, CP_ASYNC),
    "acquire of the GPU's scope": _ag80(r"ld\.acquire\.sys", "ld.acquire.gpu", ACQUIRED, CP_ASYNC),
    "one group of copies less is awaited": _ag80(
        r"cp\.async\.wait_group 2", "cp.async.wait_group 3", COPIED, LDMATRIX
    ),
    "copies without a group": _ag80(r"cp\.async\.commit_group;", "", COPIED, LDMATRIX),
    "no barrier behind the copies": _ag80(
        r"(cp\.async\.wait_group 2;[^@]*?)bar\.sync 0;", r"\1", COPIED, LDMATRIX
    ),
    "no barrier in the epilogue": _ag80(r"bar\.sync 0;", "", BARRIER, r"st\.shared", number=-2),
    # What the other half still reads is overwritten by whoever comes first.
    "a barrier of half the warps": _ag80(
        r"bar\.sync 0;", "bar.sync 0, 64;", BARRIER, r"(st\.shared|cp\.async)", number=-2
    ),
    # -- sm_80: GEMM + ReduceScatter
    "entries read relaxed": _rs80(
        r"ld\.acquire\.sys", "ld.relaxed.sys", RELEASED, STORED, rows=(131, 256, 131)
    ),
    "entries of the call before": _rs80(
        REACHED, REACHED_BEFORE, RELEASED, rf"({SUMMED}|{STORED})", rows=AHEAD
    ),
    "flags read relaxed": _sum80(r"ld\.acquire\.sys", "ld.relaxed.sys", RELEASED, SUMMED),
    "flags read at the GPU's scope": _sum80(r"ld\.acquire\.sys", "ld.acquire.gpu", SCOPE, FLAG),
    "flags of the call before": _sum80(
        REACHED, REACHED_BEFORE, RELEASED, rf"({SUMMED}|{STORED})", rows=4 * (256,)
    ),
    "flags raised relaxed": _rs80(r"st\.release\.sys", "st.relaxed.sys", RELEASED, SUMMED),
    "flags raised at the GPU's scope": _rs80(r"st\.release\.sys", "st.release.gpu", SCOPE, FLAG),
    "a flag before its store": _rs80(LAST_STORE + BEHIND, r"\2 \1", RELEASED, SUMMED),
    "no barrier behind the wait for flags": _sum80(TEAM_JOINED, NOT_JOINED, RELEASED, SUMMED),
    "no barrier before the flags": _rs80(JOINED, NOT_JOINED, RELEASED, SUMMED),
    "flags never raised": _rs80(r"st\.release\.sys[^;]*;", "", NEVER_COMES, POLLS, idle=True),
    # -- captured calls
    "the number without a barrier": _meet("80", r"bar\.sync\s+0;", "", BARRIER, r"ld\.shared"),
    "entries raised relaxed": _meet(
        "90a", r"st\.release\.sys", "st.relaxed.sys", RELEASED, r"st\.release", rows=(131,)
    ),
    # -- sm_90a: AllGather + GEMM
    "no proxy fence behind the acquire": _ag90(
        r"fence\.proxy\.async\.global;", "", FENCED, TMA_LOAD
    ),
    "TMA without the acquire": _ag90(r"ld\.acquire\.sys", "ld.relaxed.sys", ACQUIRED, TMA_LOAD),
    "the last signal is left out": _ag90(
        r"setp\.gt\.s32\s+(\S+), (\S+), (%r\d+);" + FIRST_SIGNAL,
        r"setp.ge.s32 \1, \2, \3;",
        ACQUIRED,
        TMA_LOAD,
    ),
    "no proxy fence before a store": _ag90(
        r"fence\.proxy\.async\.shared::cta;", "", FENCED, TMA_STORE
    ),
    "no barrier before a store": _ag90(
        r"(fence\.proxy\.async\.shared::cta;[^@]*?)bar\.sync \S+ \S+;",
        r"\1",
        r"missing is a (barrier of both warps|bar\.warp\.sync)",
        TMA_STORE,
    ),
    "a barrier of too many threads": _ag90(
        r"bar\.sync (\S+), (\S+);",
        r"bar.sync \1, 384;",
        DEADLOCK,
        "bar.sync" + WAITS + "barrier 1, where 256 of 384 threads have arrived",
    ),
    "the memory of a store is used again": _ag90(
        r"wait_group\.read 1;", "wait_group.read 3;", BULK_READ, STMATRIX
    ),
    "stores without a group": _ag90(r"cp\.async\.bulk\.commit_group;", "", BULK_READ, STMATRIX),
    "mbarrier waits made relaxed": _ag90(
        r"try_wait\.parity\.shared", "try_wait.parity.relaxed.cta.shared", COUNTED, PRODUCT
    ),
    "a phase of other parity": _ag90(
        r"(\{\s*\.reg \.pred\s+P1;\s*)(mbarrier\.try_wait\.parity\S+ P1, \S+) (%r\d+);",
        r"\1.reg .b32 other; xor.b32 other, \3, 1; \2 other;",
        "shared memory that was never written is read, 16 bytes at offset",
        PRODUCT,
    ),
    "a slot of other parity": _ag90(
        r"(LAB_WAIT:\s*)(mbarrier\.try_wait\.parity\S+ P1, \S+) (%r\d+), (\S+);",
        r".reg .b32 other; xor.b32 other, \3, 1; \1\2 other, \4;",
        DEADLOCK,
        TRY_WAIT
        + WAITS
        + r"the mbarrier at offset 32 \(parity 0\), whose phase of parity 0 still needs 4 arrivals",
        number=0,
    ),
    "fewer bytes are expected": _ag90(
        r"(mbarrier\.arrive\.expect_tx\S+ _, \S+) (%r\d+);",
        r".reg .b32 fewer; sub.s32 fewer, \2, 1024; \1 fewer;",
        DEADLOCK,
        TRY_WAIT
        + WAITS
        + "the mbarrier at offset 0 .* still needs 0 arrivals of 1 and -1024 bytes",
    ),
    "an arrival less is expected": _ag90(
        r"mov\.u32\s+(%r\d+), 4;", r"mov.u32 \1, 3;", MULTIPLIED, TMA_LOAD, number=0
    ),
    "slots given back relaxed": _ag90(
        r"mbarrier\.arrive\.shared::cluster",
        "mbarrier.arrive.relaxed.cluster.shared::cluster",
        COUNTED,
        TMA_LOAD,
    ),
    "slots kept": _ag90(
        r"mbarrier\.arrive\.shared::cluster\.b64 _, \[remAddr32\];",
        "",
        DEADLOCK,
        TRY_WAIT + WAITS + "the mbarrier at offset 32 .* still needs 4 arrivals of 4 and 0 bytes",
    ),
    "slots given back twice": _ag90(
        r"mbarrier\.arrive\.shared::cluster\.b64 _, \[remAddr32\];",
        r"\g<0> \g<0>",
        COUNTED,
        TMA_LOAD,
    ),
    "multicast beyond the cluster": _ag90(
        r"mov\.u16\s+(%rs\d+), 3;",
        r"mov.u16 \1, 7;",
        "multicast to rank 2 of a cluster of 2 blocks",
        TMA_LOAD + ".*multicast::cluster",
        number=0,
    ),
    "mbarriers without a fence": _ag90(
        r"fence\.mbarrier_init\.release\.cluster;",
        "",
        r"missing is (barrier\.cluster|a barrier of both warps)",
        TRY_WAIT,
    ),
    "mbarriers by every lane": _ag90(
        r"(elect\.sync \S+, (\S+);\s*@%px mov\.s32\s+(\S+), 1;)",
        r"\1 mov.s32 \3, 1;",
        "an mbarrier is initialised twice, without mbarrier.inval",
        r"mbarrier\.init",
    ),
    "no wait for the cluster": _ag90(r"barrier\.cluster\.wait\.aligned;", "", BARRIER, TRY_WAIT),
    "no arrival at the cluster's barrier": _ag90(
        r"barrier\.cluster\.arrive\.relaxed\.aligned;",
        "",
        "waits at the cluster's barrier without an arrival",
        r"barrier\.cluster\.wait",
    ),
    "too many registers": _ag90(
        r"setmaxnreg\.inc\.sync\.aligned\.u32 232",
        "setmaxnreg.inc.sync.aligned.u32 240",
        DEADLOCK,
        r"setmaxnreg\.inc" + WAITS + r"\d+ more registers, of which its block has \d+ free",
    ),
    "registers kept by the producer": _ag90(
        r"setmaxnreg\.dec\.sync\.aligned\.u32 40;",
        "",
        DEADLOCK,
        r"setmaxnreg\.inc" + WAITS + "2048 more registers, of which its block has 0 free",
    ),
    "a product without a fence": _ag90(
        r"wgmma\.fence\.sync\.aligned;",
        "",
        "there is no wgmma.fence before the first product",
        PRODUCT,
    ),
    "products without a group": _ag90(
        r"wgmma\.commit_group\.sync\.aligned;", "", MULTIPLIED, TMA_LOAD
    ),
    "a product is not awaited": _ag90(
        r"wgmma\.wait_group\.sync\.aligned 1",
        "wgmma.wait_group.sync.aligned 2",
        MULTIPLIED,
        TMA_LOAD,
    ),
    "the last products are not awaited": _ag90(
        r"wgmma\.wait_group\.sync\.aligned 0;",
        "",
        r"register %f\d+ is an accumulator of a product that has not been waited for",
        r"(mul|mov|fma)\.",
    ),
    # -- sm_90a: GEMM + ReduceScatter
    "entries of bulk stores relaxed": _rs90(
        r"ld\.acquire\.sys", "ld.relaxed.sys", RELEASED, TMA_STORE, rows=(131, 131)
    ),
    "a lane passes by a matrix": _rs90(
        r"stmatrix\.sync[^;]*;",
        r"{ .reg .pred others; .reg .b32 lane; mov.u32 lane, %laneid; setp.ne.u32 others, lane, 0; "
        r"@others bra passed; \g<0> passed: }",
        DEADLOCK,
        r".*@others bra passed; stmatrix\.sync"
        + WAITS
        + "lanes fffffffe of its warp, which are elsewhere",
        number=0,
    ),
    "bulk stores awaited with .read": _rs90(
        r"bulk\.wait_group 0", "bulk.wait_group.read 0", BULK, SUMMED
    ),
    "no warp barrier before the flags": _rs90(
        r"bar\.warp\.sync -1;", "", BULK, SUMMED, rows=(131,)
    ),
    "flags of bulk stores relaxed": _rs90(r"st\.release\.sys", "st.relaxed.sys", BULK, SUMMED),
    "a box before the slot": _rs90(
        r"(cp\.async\.bulk\.tensor\.2d\.global\.shared::cta\S* \[%rd\d+, \{%r\d+, )(%r\d+)\}",
        ".reg .b32 before; sub.s32 before, \\2, 200;\n\\1before}",
        "a store begins at the negative coordinate -[0-9]+ of dimension 1",
        TMA_STORE,
        rows=(131,),
    ),
    # -- sm_90a: the same, added up by the switch
    "no alias fence before the sums": Bug(
        "90a",
        "gemm_rs",
        REDUCE,
        ALIAS_FENCE,
        "",
        ALIASES,
        r"multimem\.ld_reduce",
        reduce="in_flight",
        switch=True,
    ),
    # -- sm_90a: what kernels send, and sums that end them, by the switch
    "no alias fence behind pushed rows": _ag90(
        ALIAS_FENCE, "", ALIASES, TMA_LOAD, path="in_kernel", switch=True
    ),
    "no alias fence before the kernel's sums": _switched(
        r"multimem\.ld_reduce", number=0, reduce="in_flight"
    ),
    "no alias fence behind the kernel's sums": _switched(r"ld\.global\.cg", number=1),
    # -- sm_90a: the same, added up in flight
    "no proxy fence behind the zeros": _rs90(
        r"fence\.proxy\.async\.global;",
        "",
        FENCED,
        TMA_ADD,
        number=2,
        rows=(131, 256, 131),
        reduce="in_flight",
    ),
    "sums are stored, not added": _rs90(
        r"cp\.reduce(\.async\.bulk\.tensor\.2d\.global\.shared::cta)\.add",
        r"cp\1",
        BULK,
        TMA_STORE,
        rows=(131, 256, 131),
        reduce="in_flight",
    ),
    # -- kernels that push the rows of an AllGather
    "pushed pieces counted relaxed": _pushed(
        r"atom\.acq_rel\.gpu", "atom.relaxed.gpu", PUSHED, CP_ASYNC
    ),
    "words raised ahead of the last pushed rows": _pushed(
        r"(?s)(atom\.acq_rel\.gpu\.global\.add\.u32 (\S+), .*?add\.s32 \S+, \2, )1;",
        r"\g<1>2;",
        PUSHED,
        CP_ASYNC,
        number=0,
    ),
    "all calls push rows to one buffer": _pushed(
        NUMBERED,
        r"\g<1>2;",
        f"({COPIED}|{PUSHED})",  # whichever of the two comes later
        r"(st\.global|cp\.async)",
        rows=(131, 256, 131),
    ),
    "words of pushed rows raised relaxed": _pushed(
        r"st\.release\.sys", "st.relaxed.sys", PUSHED, CP_ASYNC
    ),
    "words of pushed rows read relaxed": _pushed(
        r"ld\.acquire\.sys", "ld.relaxed.sys", PUSHED, CP_ASYNC
    ),
    # -- kernels whose blocks claim their tiles
    "a claimed tile is read without a barrier": _claimed(
        "80",
        r"(st\.shared\.u32[^;]*;(?:(?!bar\.sync)[^;])*?)bar\.sync\s+0;",
        r"\1",
        BARRIER,
        r"st\.shared",
    ),
    "tiles passed to the cluster relaxed": _claimed(
        "90a",
        r"mbarrier\.arrive\.release\.cluster\.shared::cluster",
        "mbarrier.arrive.relaxed.cluster.shared::cluster",
        r"missing is barrier\.cluster, or a release and an acquire of scope \.cluster",
        r"ld\.shared",
    ),
    "the counter of tiles is not set back": _claimed(
        "80", r"atom\.global\.exch\.b64[^;]*;", "", NEVER_COMES, POLLS, op="gemm_rs", idle=True
    ),
    # -- kernels that end an AllReduce
    "flags of summed partials raised relaxed": _summed(
        r"st\.release\.sys", "st.relaxed.sys", RELEASED, SUMMED, number=0
    ),
    "words of sums raised relaxed": _summed(
        r"st\.release\.sys", "st.relaxed.sys", RELEASED, SUMMED, number=1
    ),
    "flags and words of sums read relaxed": _summed(
        r"ld\.acquire\.sys", "ld.relaxed.sys", PUSHED, SUMMED
    ),
    "lanes that sum do not meet the one that waited": _summed(
        r"bar\.warp\.sync\s+-1;", "", PUSHED, SUMMED
    ),
    "sums await the flags of the call before": _summed(
        NUMBERED, r"\g<1>0;", PUSHED, f"({SUMMED}|{STORED})", number=1, rows=(256, 131, 256)
    ),
    "blocks that sum wait for some that have no room": _summed(
        ALL_BEGUN,
        r"\g<1>\3, \3;",
        "deadlock: blocks wait for room",
        SPINS,
        rows=(128,),
        crowded=True,
    ),
    # -- libflux_nvshmem: the sums of nodes
    "a relay without a fence before its put": _node(
        RELAY, r"membar\.sys;", "", NIC_FENCED, PUT, number=-1
    ),
    "a relay without a barrier before its put": _node(
        RELAY, r"bar\.sync\s+0;", "", r"missing is a (barrier of both warps|bar\.warp\.sync)", PUT
    ),
    "a relay that reads flags relaxed": _node(
        RELAY, r"ld\.acquire\.sys\.global\.u32", "ld.relaxed.sys.global.u32", OF_GPU, SUMMED
    ),
    "a relay that awaits a flag less": _node(
        RELAY, FLAGS_OF_STRIP, r"\1 sub.s32 \2, \2, 1;", OF_GPU, rf"({SUMMED}|{STORED})"
    ),
    "words of nodes read relaxed": _node(
        NODE_SUM, r"ld\.acquire\.sys\.global\.u64", "ld.relaxed.sys.global.u64", PUT_SEEN, SUMMED
    ),
}


def page() -> str:
    """Return the table of all bugs."""
    from grouped_bugs import GROUPED_BUGS  # which takes the parts above

    bugs = {**BUGS, **GROUPED_BUGS}
    lines = [
        "# Bugs of Flux's kernels",
        "",
        f"{len(bugs)} edits of PTX, each reported at the wrong statement (`test_seeded_bugs.py`).",
        "",
        "| Kernels | Bug | Message, as a regular expression |",
        "| --- | --- | --- |",
    ]
    for name, bug in bugs.items():
        message = bug.error.replace("|", "\\|")
        lines.append(f"| {bug.op}, sm_{bug.arch} | {name} | `{message}` |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))
    PAGE.write_text(page(), encoding="utf-8")
