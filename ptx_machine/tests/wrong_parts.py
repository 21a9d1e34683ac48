"""Parts of wrong_programs.py. Where "@@" stands, a program has its fault, or what is right."""

from __future__ import annotations

from ptx_text import await_phase
from wgmma_text import Product, Tile

# Shared memory: mbarriers at 0 and 8, data from 128 on. %p1: thread 0.
HEAD = """
    .shared .align 1024 .b8 memory[8192];
    mov.u32 %r1, memory;
    ld.param.u64 %rd1, [p0];
    ld.param.u64 %rd2, [p1];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %cluster_ctarank;
    mov.u32 %r9, 0;
    setp.eq.u32 %p1, %r0, 0;
"""
ZEROS = "{%r9, %r9, %r9, %r9}"
OWN = "shl.b32 %r4, %r0, 2; add.u32 %r4, %r4, %r1;"  # %r4: the thread's word
OWN_16 = "shl.b32 %r4, %r0, 4; add.u32 %r4, %r4, %r1;"
SYNC = "barrier.cluster.arrive; barrier.cluster.wait;"
LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.global.shared::cta.bulk_group"
COMMIT = "cp.async.bulk.commit_group;"
DONE = f"{COMMIT} cp.async.bulk.wait_group 0;"
FENCE = "fence.proxy.async.shared::cta;"
EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], "
TWO_BLOCKS = {"grid": 2}
TWO_WARPS = {"block": 64}
PAIR = {"grid": 2, "cluster": 2}
WARPGROUP = {"block": 128}
SMALL = {"block": 31}


def one(statements: str, label: str = "OTHERS") -> str:
    """Return statements that thread 0 executes."""
    return f"@!%p1 bra {label}; {statements} {label}: "


def initialised(count: int = 1) -> str:
    both = " ".join(f"mbarrier.init.shared::cta.b64 [%r1+{at}], {count};" for at in (0, 8))
    return one(f"{both} fence.mbarrier_init.release.cluster;", "READY") + "bar.sync 0;"


def poll(statement: str, at: str = "%rd2", label: str = "POLL") -> str:
    """Return a loop until the word there is not zero."""
    return f"{label}: {statement}.u32 %r10, [{at}]; setp.eq.u32 %p3, %r10, 0; @%p3 bra {label};"


def message(write: str, read: str) -> str:
    """Return what thread 0 of block 0 and of block 1 do."""
    return f"""
        @!%p1 bra END;
        setp.ne.u32 %p2, %r2, 0;
        @%p2 bra READ;
        {write}
        bra END;
    READ:
        {read}
    END:
    """


DATA = "st.global.u32 [%rd1], 7;"
RAISE = "st.release.gpu.global.u32 [%rd2], 1;"
SEEN = poll("ld.acquire.gpu.global")
READ = "ld.global.u32 %r11, [%rd1];"

# -- parts of programs -----------------------------------------------------------------------------

LOADED = f"{LOAD} [%r1+128], [%rd1], 64, [%r1];"
AWAITED = await_phase("%r1", 0, "FULL")
TAKE = "ld.shared.u32 %r11, [%r1+128];"
ASYNC_16 = "cp.async.cg.shared.global [%r4], [%rd3], 16;"
EACH_16 = f"{OWN_16} mul.wide.u32 %rd3, %r0, 16; add.u64 %rd3, %rd3, %rd1;"
WAIT_0 = "cp.async.wait_group 0;"
TAKE_OWN = "ld.shared.u32 %r11, [%r4];"
STORED_16 = f"st.shared.v4.u32 [%r1+128], {ZEROS};"

# A [64, 16] and B [8, 16] of zeros in shared memory, from 1024 and from 3072 on.
PRODUCT = Product(8, "f16", a=Tile(1024), b=Tile(3072), scale_d="0").statement()
MATRICES = f"""
    .reg .f32 %d<4>;
    mov.b64 %rd40, {Tile(1024).descriptor()};
    mov.b64 %rd41, {Tile(3072).descriptor()};
    {OWN_16}
    st.shared.v4.u32 [%r4+1024], {ZEROS};
    setp.lt.u32 %p2, %r0, CHUNKS;
    @%p2 st.shared.v4.u32 [%r4+3072], {ZEROS};
"""
FILLED = MATRICES.replace("CHUNKS", "16")
COPIED_MATRIX = """
    mul.wide.u32 %rd3, %r0, 16;
    add.u64 %rd3, %rd3, %rd1;
    add.u32 %r4, %r4, 1024;
    cp.async.cg.shared.global [%r4], [%rd3], 16;
"""
BEGIN = "wgmma.fence.sync.aligned;"
END_GROUP = "wgmma.commit_group.sync.aligned;"
WAIT_PRODUCT = "wgmma.wait_group.sync.aligned 0;"
MULTIPLIED = f"{BEGIN} {PRODUCT} {END_GROUP} {WAIT_PRODUCT}"
# B [8, 16] of a box that TMA has laid with a swizzle of 64 bytes; A in registers.
LOAD_BOX = """
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
        [%r1+3072], [%rd10, {0, 0}], [%r1];
"""
SWIZZLED = f"""
    .reg .f32 %d<4>;
    .reg .b32 %a<4>;
    mov.b32 %a0, 0; mov.b32 %a1, 0; mov.b32 %a2, 0; mov.b32 %a3, 0;
    mov.b64 %rd10, m0;
    cvta.param.u64 %rd10, %rd10;
    {initialised()}
    {one(f"{EXPECT} 512; {LOAD_BOX}")}
    {AWAITED}
    mov.b64 %rd41, @@;
    {BEGIN} {Product(8, "f16", a=None, scale_d="0").statement()} {END_GROUP} {WAIT_PRODUCT}
"""


def of_swizzle(span: int) -> str:
    return str(Tile(3072, 16 if span else 128, 8 * span or 256, span).descriptor())


# A map at %rd2 that thread 0 changes and uses.
CHANGE = "tensormap.replace.tile.global_dim.global.b1024.b32 [%rd2], 1, 8;"
RELEASE_MAP = "fence.proxy.tensormap::generic.release.gpu;"
ACQUIRE_MAP = "fence.proxy.tensormap::generic.acquire.gpu [%rd2], 128;"
LOAD_BY_MAP = f"""
    {EXPECT} 128;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
        [%r1+128], [%rd2, {{0, 0}}], [%r1];
    {AWAITED}
"""
CHANGED = initialised() + one(f"{CHANGE} @@ {LOAD_BY_MAP}")
# The warp copies a map of shared memory over it.
COPIED_MAP = f"""
    {initialised()}
    setp.lt.u32 %p2, %r0, 8;
    {OWN_16}
    mul.wide.u32 %rd3, %r0, 16;
    add.u64 %rd3, %rd3, %rd2;
    @%p2 ld.global.v2.u64 {{%rd4, %rd5}}, [%rd3];
    @%p2 st.shared.v2.u64 [%r4+1024], {{%rd4, %rd5}};
    bar.warp.sync -1;
    tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned
        [%rd2], [%r1+1024], 128;
    @@
    {one(LOAD_BY_MAP)}
"""

TWO_HALVES = f"""
    {initialised()}
    {one(f"{EXPECT} @@; {LOADED} {LOAD} [%r1+192], [%rd1+64], 64, [%r1];")}
    {AWAITED}
"""
# Thread 0 loads twice into one slot; thread 32 reads it, and arrives at the mbarrier of free slots.
LOAD_TWICE = (
    f"{EXPECT} 64; {LOADED}"
    + await_phase("%r1+8", 0, "EMPTY")
    + f"{EXPECT} 64; {LOADED}"
    + await_phase("%r1", 1, "AGAIN")
)
PIPELINE = f"""
    {initialised()}
    setp.eq.u32 %p2, %r0, 32;
    @%p2 bra CONSUME;
    {one(LOAD_TWICE)}
    bra END;
CONSUME:
    {AWAITED}
    @@
END:
"""
RELEASE_SLOT = "mbarrier.arrive.shared::cta.b64 _, [%r1+8];"
SECOND = f"{EXPECT} 64; {LOADED}" + await_phase("%r1", "@@", "TWO") + TAKE
TWO_ROUNDS = f"""
    {initialised()}
    {one(f"{EXPECT} 64; {LOADED} {AWAITED} {SECOND}")}
    {await_phase("%r1", 1, "LAST")}
"""
# Each block of a pair stores a word in the other one's shared memory.
TO_PEER = """
    xor.b32 %r5, %r3, 1;
    mapa.shared::cluster.u32 %r6, %r1, %r5;
"""

# Each of two blocks stores its word and counts; the last one reads both.
LAST_BLOCK = """
    mul.wide.u32 %rd3, %r2, 4;
    add.u64 %rd3, %rd3, %rd1;
    @!%p1 bra END;
    st.global.u32 [%rd3], 5;
    {before}
    atom.relaxed.gpu.global.add.u32 %r10, [%rd2], 1;
    {behind}
    setp.ne.u32 %p2, %r10, 1;
    @%p2 bra END;
    ld.global.v2.u32 {{%r11, %r12}}, [%rd1];
END:
"""
FENCE_GPU = "fence.acq_rel.gpu;"
LOCKED = """
    @!%p1 bra END;
LOCK:
    {lock}.gpu.global.cas.b32 %r10, [%rd2], 0, 1;
    setp.ne.u32 %p2, %r10, 0;
    @%p2 bra LOCK;
    ld.global.u32 %r11, [%rd1];
    add.u32 %r11, %r11, 1;
    st.global.u32 [%rd1], %r11;
    {unlock}.gpu.global.u32 [%rd2], 0;
END:
"""
RESET = f"""
    @!%p1 bra WAIT;
    {FENCE_GPU}
    st.relaxed.gpu.global.u32 [%rd2], 1;
WAIT:
    setp.ne.u32 %p2, %r0, 32;
    @%p2 bra END;
    @@
    st.global.u32 [%rd2], 0;
END:
"""
EXCHANGE = f"""
    {OWN}
    st.shared.u32 [%r4+128], %r0;
    bar.sync 0;
    xor.b32 %r5, %r4, 128;
    ld.shared.u32 %r6, [%r5+128];
    @@
    st.shared.u32 [%r4+128], %r6;
"""
# Words of two warps; of two halves of a warp.
EXCHANGE_BY = f"""
    {OWN}
    st.shared.u32 [%r4+128], %r9;
    bar.sync 0;
    st.shared.u32 [%r4+128], %r0;
    @@
    xor.b32 %r5, %r4, BY;
    ld.shared.u32 %r6, [%r5+128];
"""
OF_WARPS, OF_HALVES = EXCHANGE_BY.replace("BY", "128"), EXCHANGE_BY.replace("BY", "64")
HALVES = "setp.lt.u32 %p2, %r0, 16; selp.b32 %r7, 0x0000FFFF, 0xFFFF0000, %p2;"

# %rd3: the thread's word of p0.
WORD = "mul.wide.u32 %rd3, %r0, 4; add.u64 %rd3, %rd3, %rd1;"
SIGNAL = f"""
    @!%p1 bra END;
    setp.ne.u32 %p2, %r2, 0;
    @%p2 bra READ;
    @@
    bra END;
READ:
    {poll("ld.acquire.gpu.global")}
END:
"""
MULTICAST_STORE = one(f"""
    {STORED_16}
    {FENCE}
    {STORE} [%rd1], [%r1+128], 16;
    {DONE}
    @@
    ld.global.u32 %r11, [%rd2];
""")
