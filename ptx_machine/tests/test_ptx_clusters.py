"""Clusters of the PTX machine: their registers, addresses and barrier; setmaxnreg."""

from __future__ import annotations

import pytest
import torch

from ptx_machine import Device, Module, PtxError
from ptx_text import LANES, kernel, run

SEEDS = range(4)
SYNC = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
NUMBER = """
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ctaid.y;
    mov.u32 %r3, %ctaid.z;
    mov.u32 %r4, %nctaid.x;
    mov.u32 %r5, %nctaid.y;
    mad.lo.u32 %r6, %r3, %r5, %r2;
    mad.lo.u32 %r6, %r6, %r4, %r1;
"""  # %r6: number of the block in the grid


def words(body: str, count: int, outside: str = "", **options: object) -> torch.Tensor:
    """Run ``body``, which stores 32-bit words at %rd1 + 4 * (count of a block * block + thread)."""
    settings: dict[str, object] = {"grid": 2, "cluster": 2, "block": LANES, **options}
    attributes = str(settings.pop("attributes", ""))
    grid = settings["grid"]
    blocks = torch.tensor(grid).prod().item() if isinstance(grid, tuple) else int(str(grid))
    out = torch.zeros(int(blocks), count, dtype=torch.int32)
    text = f"""
        {NUMBER}
        ld.param.u64 %rd1, [p0];
        mul.wide.u32 %rd2, %r6, {4 * count};
        add.s64 %rd1, %rd1, %rd2;
        mul.wide.u32 %rd3, %r0, 4;
        add.s64 %rd3, %rd1, %rd3;
        {body}
    """  # %rd1: the block's row, %rd3: the thread's word of it
    run(kernel(text, 1, outside=outside, attributes=attributes), [out], **settings)
    return out


# -- special registers -----------------------------------------------------------------------------

REGISTERS = [
    *(f"%clusterid.{axis}" for axis in "xyz"),
    *(f"%nclusterid.{axis}" for axis in "xyz"),
    *(f"%cluster_ctaid.{axis}" for axis in "xyz"),
    *(f"%cluster_nctaid.{axis}" for axis in "xyz"),
    "%cluster_ctarank",
    "%cluster_nctarank",
    "%nwarpid",
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("multiprocessors", [2, 8])
def test_registers_of_clusters(seed: int, multiprocessors: int) -> None:
    """A cluster runs even where it has more blocks than there are multiprocessors."""
    grid, cluster = (4, 6, 2), (2, 3, 1)
    body = "".join(
        f"mov.u32 %r20, {name}; st.global.u32 [%rd1+{4 * i}], %r20;"
        for i, name in enumerate(REGISTERS)
    )
    settings = {"grid": grid, "cluster": cluster, "block": 96, "seed": seed}
    settings["multiprocessors"] = multiprocessors
    result = words(body, len(REGISTERS), **settings)
    for number, row in enumerate(result.tolist()):
        x, y, z = number % 4, number // 4 % 6, number // 24
        position = (x % 2, y % 3, z)
        assert row[0:3] == [x // 2, y // 3, z]
        assert row[3:6] == [2, 2, 2]
        assert row[6:9] == [position[0], position[1], 0]
        assert row[9:12] == [2, 3, 1]
        assert row[12:] == [position[0] + 2 * position[1], 6, 64]


def test_a_cluster_may_be_explicit() -> None:
    body = """
        mov.pred %p1, %is_explicit_cluster;
        selp.u32 %r20, 1, 0, %p1;
        st.global.u32 [%rd1], %r20;
        mov.u32 %r21, %cluster_nctarank;
        st.global.u32 [%rd1+4], %r21;
    """
    assert words(body, 2, cluster=None).tolist() == [[0, 1]] * 2
    assert words(body, 2, cluster=1).tolist() == [[1, 1]] * 2
    assert words(body, 2, cluster=2).tolist() == [[1, 2]] * 2
    required = ".explicitcluster\n.reqnctapercluster 2, 1, 1"
    assert words(body, 2, cluster=None, attributes=required).tolist() == [[1, 2]] * 2


@pytest.mark.parametrize(
    "attributes, cluster, error",
    [
        ("", 3, "a grid of 4 x 1 x 1 blocks is not divisible by 3 x 1 x 1"),
        ("", 32, "one of 32 x 1 x 1 blocks"),
        (".reqnctapercluster 2", 4, "asks for 2 x 1 x 1 blocks, the launch for 4 x 1 x 1"),
        (".explicitcluster", None, "the launch does not say how large"),
        (".maxclusterrank 2", 4, "more than its .maxclusterrank of 2"),
    ],
    ids=["divisible", "size", "required", "explicit", "rank"],
)
def test_launches_with_other_clusters_fail(
    attributes: str, cluster: int | None, error: str
) -> None:
    with pytest.raises(PtxError, match=error):
        words("", 1, grid=4, cluster=cluster, attributes=attributes)


# -- shared memory of the cluster ------------------------------------------------------------------

OF_CLUSTER = """
    .shared .align 16 .b8 memory[256];
    mov.u32 %r10, memory;
    shl.b32 %r11, %r0, 2;
    add.u32 %r12, %r10, %r11;
    mov.u32 %r13, %cluster_ctarank;
    mad.lo.u32 %r14, %r13, 1000, %r0;
    st.shared.u32 [%r12], %r14;
    mov.u32 %r15, %cluster_nctarank;
    add.u32 %r16, %r13, 1;
    rem.u32 %r16, %r16, %r15;
"""  # %r12: the thread's word, which is 1000 * rank + thread; %r16: rank of the next block


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("generic", [False, True], ids=["shared::cluster", "generic"])
def test_blocks_read_the_memory_of_their_cluster(generic: bool, seed: int) -> None:
    load = "mapa.shared::cluster.u32 %r17, %r12, %r16; ld.shared::cluster.u32 %r18, [%r17];"
    if generic:
        load = """
            cvt.u64.u32 %rd10, %r12;
            cvta.shared.u64 %rd11, %rd10;
            mapa.u64 %rd12, %rd11, %r16;
            ld.u32 %r18, [%rd12];
        """
    body = f"{OF_CLUSTER} {SYNC} {load} st.global.u32 [%rd3], %r18; {SYNC}"
    result = words(body, LANES, grid=8, cluster=4, seed=seed)
    for block, row in enumerate(result.tolist()):
        assert row == [1000 * ((block + 1) % 4) + thread for thread in range(LANES)]


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_change_the_memory_of_their_cluster(seed: int) -> None:
    """All threads of a cluster add to one word of its block 1."""
    body = f"""
        {OF_CLUSTER}
        {SYNC}
        mapa.shared::cluster.u32 %r17, memory, 1;
        red.shared::cluster.add.u32 [%r17+8], 1;
        atom.shared::cluster.add.u32 %r18, [%r17+12], 2;
        {SYNC}
        ld.shared.u32 %r19, [memory+8];
        st.global.u32 [%rd1], %r19;
        ld.shared::cluster.u32 %r19, [memory+12];
        st.global.u32 [%rd1+4], %r19;
    """
    result = words(body, 2, grid=4, cluster=4, seed=seed).tolist()
    added = [[4 * LANES, 8 * LANES] if rank == 1 else [0, 0] for rank in range(4)]
    expected = [
        [1000 * rank + 2 + more[0], 1000 * rank + 3 + more[1]] for rank, more in enumerate(added)
    ]
    assert result == expected


def test_ranks_and_spaces_of_addresses() -> None:
    body = f"""
        {OF_CLUSTER}
        mapa.shared::cluster.u32 %r17, %r12, %r16;
        getctarank.shared::cluster.u32 %r18, %r17;
        st.global.u32 [%rd1], %r18;
        mapa.shared::cluster.u32 %r17, %r12, %r13;
        ld.shared.u32 %r18, [%r17];
        sub.u32 %r18, %r18, %r0;
        st.global.u32 [%rd1+4], %r18;
        cvt.u64.u32 %rd10, %r12;
        cvta.shared.u64 %rd11, %rd10;
        mapa.u64 %rd12, %rd11, %r16;
        getctarank.u64 %r18, %rd12;
        st.global.u32 [%rd1+8], %r18;
        mov.u32 %r20, 0;
        isspacep.shared::cta %p1, %rd11;
        selp.u32 %r21, 1, 0, %p1;
        or.b32 %r20, %r20, %r21;
        isspacep.shared::cta %p1, %rd12;
        selp.u32 %r21, 2, 0, %p1;
        or.b32 %r20, %r20, %r21;
        isspacep.shared::cluster %p1, %rd12;
        selp.u32 %r21, 4, 0, %p1;
        or.b32 %r20, %r20, %r21;
        isspacep.global %p1, %rd1;
        selp.u32 %r21, 8, 0, %p1;
        or.b32 %r20, %r20, %r21;
        isspacep.shared::cluster %p1, %rd1;
        selp.u32 %r21, 16, 0, %p1;
        or.b32 %r20, %r20, %r21;
        st.global.u32 [%rd1+12], %r20;
        {SYNC}
    """
    assert words(body, 4, cluster=2).tolist() == [[1, 0, 1, 13], [0, 1000, 0, 13]]


@pytest.mark.parametrize(
    "body, error",
    [
        ("mapa.shared::cluster.u32 %r17, %r12, 2;", "rank 2 in a cluster of 2 blocks"),
        (
            "mapa.shared::cluster.u32 %r17, %r12, %r16; ld.shared::cta.u32 %r18, [%r17];",
            "shared::cta is the thread's own block",
        ),
        (
            "mov.u32 %r17, 0x03000000; ld.shared::cluster.u32 %r18, [%r17];",
            "not one of shared memory of the 2 blocks of the cluster",
        ),
        (
            "mapa.shared::cluster.u32 %r17, %r12, %r16; ld.shared::cluster.u32 %r18, [%r17+256];",
            "of shared memory, which has 256",
        ),
        ("mapa.u64 %rd12, %rd1, %r16;", "not one of shared memory"),
    ],
    ids=["rank", "cta", "window", "bounds", "global"],
)
def test_addresses_outside_of_the_cluster_fail(body: str, error: str) -> None:
    with pytest.raises(PtxError, match=error):
        words(f"{OF_CLUSTER} {SYNC} {body} {SYNC}", 1)


def test_the_memory_of_a_block_ends_with_it() -> None:
    """Block 1 ends; block 0 looks at its memory some time later."""
    body = f"""
        {OF_CLUSTER}
        {SYNC}
        setp.eq.u32 %p1, %r13, 1;
        @%p1 bra END;
        mov.u32 %r20, 0;
    SPIN:
        add.u32 %r20, %r20, 1;
        setp.lt.u32 %p2, %r20, 1000;
        @%p2 bra SPIN;
        mapa.shared::cluster.u32 %r17, %r12, 1;
        ld.shared::cluster.u32 %r18, [%r17];
    END:
    """
    with pytest.raises(PtxError, match="memory of block 1 of the cluster, which has ended"):
        words(body, 1)


# -- barrier.cluster -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_threads_arrive_one_by_one(seed: int) -> None:
    """The barrier counts threads that have parted, and does not wait for those that have exited."""
    body = f"""
        {OF_CLUSTER}
        {SYNC}
        setp.ge.u32 %p1, %r0, 40;
        @%p1 exit;
        and.b32 %r20, %r0, 1;
        setp.eq.u32 %p2, %r20, 1;
        @%p2 bra ODD;
        mapa.shared::cluster.u32 %r17, memory, 0;
        atom.shared::cluster.add.u32 %r18, [%r17+248], 1;
        barrier.cluster.arrive.release;
        barrier.cluster.wait.acquire;
        bra ALL;
    ODD:
        barrier.cluster.arrive.relaxed;
        mov.u32 %r21, 7;
        barrier.cluster.wait;
    ALL:
        mapa.shared::cluster.u32 %r17, memory, 0;
        ld.shared::cluster.u32 %r18, [%r17+248];
        st.global.u32 [%rd3], %r18;
        barrier.cluster.arrive;
        barrier.cluster.wait;
    """
    result = words(body, 64, grid=4, cluster=4, block=64, seed=seed)
    assert set(result[:, :40].flatten().tolist()) == {62 + 4 * 20}
    assert not result[:, 40:].any()


@pytest.mark.parametrize(
    "body, error",
    [
        ("barrier.cluster.arrive; barrier.cluster.arrive;", "twice, without a wait"),
        ("barrier.cluster.wait;", "without an arrival"),
        ("barrier.cluster.arrive; barrier.cluster.wait; barrier.cluster.wait;", "without an arr"),
        (
            "setp.lt.u32 %p1, %r0, 16; @%p1 bra L; barrier.cluster.arrive.aligned;"
            "barrier.cluster.wait.aligned; L: barrier.cluster.arrive; bar.warp.sync -1;",
            "deadlock|diverged",
        ),
    ],
    ids=["twice", "no arrival", "waited", "aligned"],
)
def test_misuse_of_the_barrier_fails(body: str, error: str) -> None:
    with pytest.raises(PtxError, match=error):
        words(body, 1)


def test_a_block_that_does_not_come_is_a_deadlock() -> None:
    body = """
        setp.eq.u32 %p1, %r6, 0;
        @%p1 bra FIRST;
        bar.sync 1, 64;
    FIRST:
        barrier.cluster.arrive;
        barrier.cluster.wait;
    """
    with pytest.raises(PtxError, match=r"deadlock(.|\n)*barrier.cluster.wait"):
        words(body, 1)


# -- setmaxnreg ------------------------------------------------------------------------------------

SPECIALISED = """
    shr.u32 %r20, %r0, 7;
    setp.eq.u32 %p1, %r20, 0;
    @%p1 bra PRODUCER;
    setmaxnreg.inc.sync.aligned.u32 {more};
    bra END;
PRODUCER:
    setmaxnreg.dec.sync.aligned.u32 {less};
END:
    st.global.u32 [%rd3], 1;
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_registers_go_from_producers_to_consumers(seed: int) -> None:
    """384 threads start with 168 registers: 40 + 2 * 232 are as many."""
    body = SPECIALISED.format(more=232, less=40)
    assert words(body, 384, grid=1, cluster=1, block=384, seed=seed).all()
    with pytest.raises(PtxError, match=r"deadlock(.|\n)*setmaxnreg.inc"):
        words(SPECIALISED.format(more=240, less=40), 384, grid=1, cluster=1, block=384, seed=seed)


@pytest.mark.parametrize(
    "statement, attributes, error",
    [
        ("dec.sync.aligned.u32 176", "", "has 168 registers and releases to more"),
        ("inc.sync.aligned.u32 160", "", "has 168 registers and requests fewer"),
        ("inc.sync.aligned.u32 152", ".maxnreg 160", "has 160 registers and requests fewer"),
        ("dec.sync.aligned.u32 16", "", "24 to 256"),
        ("dec.sync.aligned.u32 36", "", "multiple of 8"),
        ("dec.aligned.u32 40", "", "unknown instruction"),
    ],
)
def test_misuse_of_registers_fails(statement: str, attributes: str, error: str) -> None:
    text = kernel(f"setmaxnreg.{statement};", 0, attributes=attributes)
    with pytest.raises(PtxError, match=error):
        Device().launch(Module(text), "k", grid=1, block=384, args=[])


@pytest.mark.parametrize(
    "statement",
    [
        "barrier.cluster.arrive.acquire;",
        "barrier.cluster.wait.release;",
        "barrier.cluster.sync;",
        "mapa.shared::cta.u32 %r1, %r2, 0;",
    ],
)
def test_other_modifiers_are_not_known(statement: str) -> None:
    with pytest.raises(PtxError, match="unknown instruction"):
        words(statement, 1)
