"""Programs with one fault each, and what the machine says of it.

The same text with the right statements runs without an error. ``wrong_programs.md`` lists them:
``python ptx_machine/tests/wrong_programs.py`` writes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ptx_machine import Device, Module
from ptx_text import await_phase, kernel
from wrong_parts import (
    ACQUIRE_MAP,
    ASYNC_16,
    AWAITED,
    BEGIN,
    CHANGED,
    COMMIT,
    COPIED_MAP,
    COPIED_MATRIX,
    DATA,
    DONE,
    EACH_16,
    END_GROUP,
    EXCHANGE,
    EXPECT,
    FENCE,
    FENCE_GPU,
    FILLED,
    HALVES,
    HEAD,
    LAST_BLOCK,
    LOAD,
    LOADED,
    LOCKED,
    MATRICES,
    MULTICAST_STORE,
    MULTIPLIED,
    OF_HALVES,
    OF_WARPS,
    OWN,
    PAIR,
    PIPELINE,
    PRODUCT,
    RAISE,
    READ,
    RELEASE_MAP,
    RELEASE_SLOT,
    RESET,
    SEEN,
    SIGNAL,
    STORE,
    STORED_16,
    SWIZZLED,
    SYNC,
    TAKE,
    TAKE_OWN,
    TO_PEER,
    TWO_BLOCKS,
    TWO_HALVES,
    TWO_ROUNDS,
    TWO_WARPS,
    WAIT_0,
    WAIT_PRODUCT,
    WARPGROUP,
    WORD,
    ZEROS,
    initialised,
    message,
    of_swizzle,
    one,
    poll,
)

PAGE = Path(__file__).with_name("wrong_programs.md")
MULTICAST = 1 << 41  # an address of nothing else in this process


@dataclass(frozen=True)
class Wrong:
    """A program, and a fault of it.

    Attributes:
        kind, bug: what is wrong.
        caught: a part of the message, or of another one that some orders lead to ("A | B").
        text: statements around the fault, for which "@@" stands.
        right, wrong: the statements in its place.
        launch: grid, cluster, block.
        data: of the two tensors p0 and p1: "" (written), "fresh" (nothing has been written there),
            "freed" (of the wrong program, p1 has been freed), "multicast" (p0 stands for two
            tensors, of which p1 is the second), "map" (p1 is a tensor map of p0 in global memory).
        box: of a tensor map of p0, which is parameter m0.
        words: 32-bit words of each tensor.
    """

    kind: str
    bug: str
    caught: str
    text: str
    right: str
    wrong: str
    launch: dict[str, Any] = field(default_factory=dict)
    data: str = ""
    box: dict[str, Any] | None = None
    words: int = 1024

    def run(self, fault: bool, seed: int) -> None:
        """Run the program, with its fault or without."""
        device = Device(idle_patience=0.05)
        tensors = [torch.zeros(self.words, dtype=torch.int32) for _ in range(2)]
        args: list[object] = [*tensors]
        if self.data == "fresh":
            args = [device.register(t, written=False) for t in tensors]
        elif self.data == "freed":
            args = [device.register(t, "a buffer") for t in tensors]
            if fault:
                device.release(tensors[1])
        elif self.data == "multicast":
            device.add_multicast(MULTICAST, tensors)
            args[0] = MULTICAST
        elif self.data == "map":
            placed = torch.zeros(256, dtype=torch.uint8)
            start = -placed.data_ptr() % 64
            made = device.tensor_map(tensors[0].view(-1, 4), box=(8, 4))
            placed[start : start + 128] = torch.frombuffer(bytearray(made), dtype=torch.uint8)
            args[1] = device.register(placed) + start
        if self.box is not None:
            halves = torch.zeros(8, 32, dtype=torch.float16)
            args.append(device.tensor_map(halves, **self.box))
        text = self.text.replace("@@", self.wrong if fault else self.right)
        module = Module(kernel(HEAD + text, 2, maps=len(args) - 2))
        settings: dict[str, Any] = {"grid": 1, "block": 32, **self.launch}
        device.launch(module, "k", args=args, seed=seed, **settings)


PROXIES = "fences of the async proxy"
PROXY_FENCE = "missing is a fence.proxy.async between them"
PHASES = "mbarrier phases"
BYTES_OF_PHASE = "missing is a wait for the phase of the mbarrier that counts its bytes"
COPIES = "cp.async"
BULK = "bulk copies"
PRODUCTS = "wgmma"
MAPS = "tensor maps"
FLAGS = "flags and locks"
BARRIERS = "barriers of a block"
LANES_MEET = "lanes that meet"
CLUSTERS = "clusters"
SWITCH = "multimem"
BOUNDS = "bounds"
FREED = "use after free"
NOTHING = "memory that was never written"

ORDER_OF_GPU = "missing is a release and an acquire (or fences) of scope .gpu"
ORDER_OF_CLUSTER = "missing is barrier.cluster, or a release and an acquire of scope .cluster"
SCOPE_OF_GPU = "missing is the scope .gpu at both"
COPIED = "missing is cp.async.wait_group by the thread that copies"
BULK_READ = "missing is cp.async.bulk.wait_group.read by the thread that copies"
BULK_WRITTEN = "missing is cp.async.bulk.wait_group (without .read) by the thread that copies"
BARRIER = "missing is a barrier of both warps (bar.sync), or a release and an acquire"
OUTSIDE = "outside of global memory"
UNWRITTEN = "memory that was never written is read"
MAP_FENCE = "missing is a fence.proxy.tensormap::generic.release"

PROGRAMS = [
    # -- fences of the async proxy
    Wrong(
        PROXIES,
        "the fence stands before the store that it is for",
        PROXY_FENCE,
        one(f"@@ {STORE} [%rd1], [%r1+128], 16; {DONE}"),
        f"{STORED_16} {FENCE}",
        f"{FENCE} {STORED_16}",
    ),
    Wrong(
        PROXIES,
        "a bulk load of what the thread stored, behind a fence of shared memory alone",
        PROXY_FENCE,
        initialised() + one(f"{DATA} @@ {EXPECT} 64; {LOADED} {AWAITED}"),
        "fence.proxy.async;",
        FENCE,
    ),
    Wrong(
        PROXIES,
        "a bulk load of what another block wrote, behind its flag without a fence",
        PROXY_FENCE,
        initialised() + message(f"{DATA} {RAISE}", f"{SEEN} @@ {EXPECT} 64; {LOADED} {AWAITED}"),
        "fence.proxy.async.global;",
        "",
        TWO_BLOCKS,
    ),
    Wrong(
        PROXIES,
        "wgmma multiplies what threads stored, without a fence",
        PROXY_FENCE,
        f"{FILLED} @@ bar.sync 0; {MULTIPLIED}",
        FENCE,
        "",
        WARPGROUP,
    ),
    Wrong(
        PROXIES,
        "wgmma multiplies what cp.async copied, with the fence before the wait",
        PROXY_FENCE,
        f"{FILLED} {COPIED_MATRIX} @@ bar.sync 0; {MULTIPLIED}",
        f"cp.async.wait_all; {FENCE}",
        f"{FENCE} cp.async.wait_all;",
        WARPGROUP,
    ),
    # -- tensor maps
    Wrong(MAPS, "a changed map is used without fences", MAP_FENCE, CHANGED,
          RELEASE_MAP + ACQUIRE_MAP, "", data="map"),
    Wrong(MAPS, "a changed map is released but not acquired", MAP_FENCE, CHANGED,
          RELEASE_MAP + ACQUIRE_MAP, RELEASE_MAP, data="map"),
    Wrong(MAPS, "a changed map is acquired but was not released", MAP_FENCE, CHANGED,
          RELEASE_MAP + ACQUIRE_MAP, ACQUIRE_MAP, data="map"),
    Wrong(MAPS, "a map that the warp has copied is used without an acquire", MAP_FENCE, COPIED_MAP,
          ACQUIRE_MAP, "", data="map"),
    Wrong(MAPS, "the matrix descriptor has no swizzle, the box has 64 bytes",
          "the swizzle of a matrix descriptor is none, that of the asynchronous write", SWIZZLED,
          of_swizzle(64), of_swizzle(0), WARPGROUP, box={"box": (8, 32), "swizzle": 64}),
    Wrong(MAPS, "the matrix descriptor has a swizzle of 32 bytes, the box 64",
          "the swizzle of a matrix descriptor is 32, that of the asynchronous write", SWIZZLED,
          of_swizzle(64), of_swizzle(32), WARPGROUP, box={"box": (8, 32), "swizzle": 64}),
    # -- mbarrier phases
    Wrong(PHASES, "the phase expects the bytes of one of two copies",
          "it expects fewer bytes than they bring", TWO_HALVES, "128", "64"),
    Wrong(PHASES, "the phase expects 16 bytes too many", "still needs 0 arrivals of 1 and 16 bytes",
          TWO_HALVES, "128", "144"),
    Wrong(PHASES, "an arrival without expect_tx behind the copy",
          "it expects fewer bytes than they bring",
          initialised() + one(f"{LOADED} @@") + AWAITED,
          f"{EXPECT} 64;", "mbarrier.arrive.shared::cta.b64 _, [%r1];"),
    Wrong(PHASES, "the first wait is for parity 1", f"{BYTES_OF_PHASE} | waits for the mbarrier",
          initialised() + one(f"{EXPECT} 64; {LOADED}") + await_phase("%r1", "@@", "W") + TAKE
          + await_phase("%r1", 0, "LAST"), "0", "1"),
    Wrong(PHASES, "the second wait is for the parity of the first", BYTES_OF_PHASE, TWO_ROUNDS,
          "1", "0"),
    Wrong(PHASES, "an mbarrier of two arrivals gets one", "still needs 1 arrival of 2",
          one("mbarrier.init.shared::cta.b64 [%r1], @@;") + "bar.sync 0;"
          + one("mbarrier.arrive.shared::cta.b64 _, [%r1];", "L") + AWAITED, "1", "2"),
    Wrong(PHASES, "a relaxed wait, and a read of what was copied", BYTES_OF_PHASE,
          initialised() + one(f"{EXPECT} 64; {LOADED}")
          + AWAITED.replace("try_wait.parity", "try_wait.parity@@") + TAKE,
          "", ".relaxed.cta"),
    Wrong(PHASES, "a slot is released before it was read", "race: this", PIPELINE,
          TAKE + RELEASE_SLOT, RELEASE_SLOT + TAKE, TWO_WARPS),
    Wrong(PHASES, "a block arrives at a peer's mbarrier whose initialisation nothing orders",
          ORDER_OF_CLUSTER,
          one("mbarrier.init.shared::cta.b64 [%r1], 1; @@")
          + f"{TO_PEER} barrier.cluster.arrive.relaxed; barrier.cluster.wait;"
          + one(f"mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r6]; {AWAITED}", "L")
          + SYNC,
          "fence.mbarrier_init.release.cluster;", "", PAIR),
    Wrong(PHASES, "a relaxed arrival behind a store to the peer", ORDER_OF_CLUSTER,
          f"{initialised()} {TO_PEER} {SYNC}"
          + one("st.shared::cluster.u32 [%r6+128], 7;"
                "mbarrier.arrive.@@.cluster.shared::cluster.b64 _, [%r6];")
          + AWAITED.replace("try_wait.parity", "try_wait.parity.acquire.cluster") + TAKE + SYNC,
          "release", "relaxed", PAIR),
    # -- cp.async
    Wrong(COPIES, "no commit_group before the wait", COPIED,
          f"{EACH_16} {ASYNC_16} @@ {WAIT_0} {TAKE_OWN}", "cp.async.commit_group;", ""),
    Wrong(COPIES, "the wait leaves one group", COPIED,
          f"{EACH_16} {ASYNC_16} cp.async.commit_group; cp.async.wait_group @@; {TAKE_OWN}",
          "0", "1"),
    Wrong(COPIES, "each thread waits, but no barrier is behind it", COPIED,
          f"{EACH_16} {ASYNC_16} cp.async.wait_all; @@ xor.b32 %r4, %r4, 16; {TAKE_OWN}",
          "bar.warp.sync -1;", ""),
    Wrong(COPIES, "a store to where a copy goes", COPIED,
          f"{EACH_16} {ASYNC_16} cp.async.commit_group; @@", f"{WAIT_0} st.shared.u32 [%r4], 1;",
          f"st.shared.u32 [%r4], 1; {WAIT_0}"),
    Wrong(COPIES, "a store to what a copy reads", COPIED,
          f"{EACH_16} {ASYNC_16} cp.async.commit_group; @@", f"{WAIT_0} st.global.u32 [%rd3], 1;",
          f"st.global.u32 [%rd3], 1; {WAIT_0}"),
    Wrong(COPIES, "the source of 16 bytes is aligned to 8", "is not aligned to 16 bytes",
          f"{EACH_16} add.u64 %rd3, %rd3, @@; {ASYNC_16} cp.async.wait_all;", "16", "8"),
    # -- bulk copies
    Wrong(BULK, "two loads overlap by 16 bytes", BYTES_OF_PHASE,
          initialised() + one(f"{EXPECT} 128; {LOADED} {LOAD} [%r1+@@], [%rd1], 64, [%r1];")
          + AWAITED, "192", "176"),
    Wrong(BULK, "the source of a store is reused behind wait_group.read 1", BULK_READ,
          one(f"{STORED_16} {FENCE} {STORE} [%rd1], [%r1+128], 16; {COMMIT}"
              f"cp.async.bulk.wait_group.read @@; {STORED_16} cp.async.bulk.wait_group 0;"),
          "0", "1"),
    Wrong(BULK, "a store is not committed before the wait", BULK_READ,
          one(f"{STORED_16} {FENCE} {STORE} [%rd1], [%r1+128], 16; @@"
              f"cp.async.bulk.wait_group 0; {STORED_16} {DONE}"), COMMIT, ""),
    Wrong(BULK, "a flag is raised when the store has only read its source", BULK_WRITTEN,
          message(f"{STORED_16} {FENCE} {STORE} [%rd1], [%r1+128], 16; {COMMIT}"
                  f"cp.async.bulk.wait_group@@ 0; {RAISE} cp.async.bulk.wait_group 0;",
                  SEEN + READ), "", ".read", TWO_BLOCKS),
    Wrong(BULK, "a thread of another warp stores over the source, and only a barrier lies between",
          BULK_READ,
          one(f"{STORED_16} {FENCE} {STORE} [%rd1], [%r1+128], 16; {COMMIT} @@")
          + f"bar.sync 0; setp.eq.u32 %p2, %r0, 32; @%p2 {STORED_16}"
          + one("cp.async.bulk.wait_group 0;", "LAST"),
          "cp.async.bulk.wait_group.read 0;", "", TWO_WARPS),
    Wrong(BULK, "a load reaches 16 bytes beyond shared memory", "of shared memory, which has 8192",
          initialised() + one(f"{EXPECT} 64; {LOAD} [%r1+@@], [%rd1], 64, [%r1];") + AWAITED,
          "8128", "8144"),
    Wrong(BULK, "a block ends while its peer copies to it",
          "has ended while its shared memory is still",
          f"{initialised()} {TO_PEER} {SYNC}"
          + one(f"{EXPECT} 16;" + STORED_16.replace("128", "256") + FENCE +
                "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
                " [%r6+128], [%r1+256], 16, [%r6];") + "@@",
          AWAITED + SYNC, SYNC, PAIR),
    # -- wgmma
    Wrong(PRODUCTS, "accumulators are read behind wait_group 1",
          "is an accumulator of a product that has not been waited for",
          f"{FILLED} {FENCE} bar.sync 0; {BEGIN} {PRODUCT} {END_GROUP}"
          f"wgmma.wait_group.sync.aligned @@; add.f32 %f1, %d0, %d0; {WAIT_PRODUCT}", "0", "1",
          WARPGROUP),
    Wrong(PRODUCTS, "the next load goes to a tile that a product reads",
          "missing is wgmma.wait_group",
          f"{initialised()} {FILLED} {FENCE} bar.sync 0; {BEGIN} {PRODUCT} {END_GROUP} @@"
          + f"bar.sync 1; {one(f'{EXPECT} 64; {LOAD} [%r1+3072], [%rd1], 64, [%r1];')}"
          + f"{AWAITED} {WAIT_PRODUCT}", WAIT_PRODUCT, "", WARPGROUP),
    Wrong(PRODUCTS, "a tile of which a row was never stored", f"shared {UNWRITTEN}",
          MATRICES.replace("CHUNKS", "@@") + f"{FENCE} bar.sync 0; {MULTIPLIED}", "16", "15",
          WARPGROUP),
    # -- flags and locks
    Wrong(FLAGS, "a thread raises the flag for others without a barrier", ORDER_OF_GPU,
          f"{WORD} setp.ne.u32 %p2, %r2, 0; @%p2 bra READ; st.global.u32 [%rd3], 7; @@"
          f"{one(RAISE, 'RAISED')} bra END; READ: {one(SEEN + 'ld.global.u32 %r11, [%rd1+160];')}"
          "END:", "bar.sync 0;", "", {"grid": 2, "block": 64}),
    Wrong(FLAGS, "a thread sees the flag for others without a barrier", ORDER_OF_GPU,
          f"setp.ne.u32 %p2, %r2, 0; @%p2 bra READ; {one(DATA + RAISE, 'RAISED')} bra END;"
          f"READ: {one(SEEN)} @@ {READ} END:", "bar.sync 0;", "",
          {"grid": 2, "block": 64}),
    Wrong(FLAGS, "data is stored between the fence and a relaxed flag", ORDER_OF_GPU,
          message("@@ st.relaxed.gpu.global.u32 [%rd2], 1;", SEEN + READ), DATA + FENCE_GPU,
          FENCE_GPU + DATA, TWO_BLOCKS),
    Wrong(FLAGS, "the flag is polled by weak loads", "race: this",
          message(DATA + RAISE, poll("@@") + READ), "ld.acquire.gpu.global", "ld.global",
          TWO_BLOCKS),
    Wrong(FLAGS, "blocks count without a fence before it", ORDER_OF_GPU,
          LAST_BLOCK.format(before="@@", behind=FENCE_GPU), FENCE_GPU, "", TWO_BLOCKS),
    Wrong(FLAGS, "the last block reads without a fence behind its count", ORDER_OF_GPU,
          LAST_BLOCK.format(before=FENCE_GPU, behind="@@"), FENCE_GPU, "", TWO_BLOCKS),
    Wrong(FLAGS, "a counter is raised with scope .cta for another block", SCOPE_OF_GPU,
          message(f"{DATA} red.release.@@.global.add.u32 [%rd2], 1;", SEEN + READ), "gpu", "cta",
          TWO_BLOCKS),
    Wrong(FLAGS, "a lock is released by a relaxed store", ORDER_OF_GPU,
          LOCKED.format(lock="atom.acquire", unlock="st.@@"), "release", "relaxed", TWO_BLOCKS),
    Wrong(FLAGS, "a lock is taken by a relaxed atomic", ORDER_OF_GPU,
          LOCKED.format(lock="atom.@@", unlock="st.release"), "acquire", "relaxed", TWO_BLOCKS),
    Wrong(FLAGS, "a flag is reset by a thread that has not seen it", BARRIER, RESET,
          SEEN, "", TWO_WARPS),
    Wrong(FLAGS, "data of a running kernel is loaded by .nc", "missing is a load without .nc",
          message(DATA + RAISE, SEEN + "ld.global@@.u32 %r11, [%rd1];"), "", ".nc", TWO_BLOCKS),
    # -- barriers of a block
    Wrong(BARRIERS, "words are stored again while the other warp reads them", BARRIER, EXCHANGE,
          "bar.sync 0;", "", TWO_WARPS),
    Wrong(BARRIERS, "the barrier counts one of two warps", BARRIER,
          OF_WARPS.replace("@@", "bar.sync 1, @@;"), "64", "32",
          TWO_WARPS),
    Wrong(BARRIERS, "the barrier counts a warp that never comes",
          "where 64 of 96 threads have arrived", "bar.sync 1, @@;", "64", "96", TWO_WARPS),
    Wrong(BARRIERS, "the barrier counts a warp and a half", "not of whole warps",
          "bar.sync 1, @@;", "64", "48", TWO_WARPS),
    Wrong(BARRIERS, "one warp arrives where it has to wait", BARRIER,
          OF_WARPS.replace(
              "@@", "setp.lt.u32 %p2, %r0, 32; @!%p2 bar.sync 1, 64; @%p2 bar.@@ 1, 64;"),
          "sync", "arrive", TWO_WARPS),
    # -- lanes that meet
    Wrong(LANES_MEET, "the halves of a warp meet each for itself", "missing is a bar.warp.sync",
          HALVES + OF_HALVES.replace("@@", "bar.warp.sync @@;"), "-1",
          "%r7"),
    Wrong(LANES_MEET, "a shuffle in a branch, with the mask of the warp",
          "waits for lanes 0000ffff of its warp, which skip it",
          f"{HALVES} mov.u32 %r5, %r0; @@ shfl.sync.bfly.b32 %r5, %r0, 1, 31, -1;"
          "bar.warp.sync -1;", "", "@!%p2"),
    Wrong(LANES_MEET, "a shuffle from a lane that the mask leaves out",
          "reads lane 16, which does not take part",
          f"{HALVES} shfl.sync.bfly.b32 %r5, %r0, @@, 31, %r7;", "8", "16"),
    Wrong(LANES_MEET, "a vote by a lane that is not in its mask",
          "a lane is not in its own mask of members",
          "setp.lt.u32 %p2, %r0, 5; vote.sync.ballot.b32 %r5, %p2, @@;", "0xFFFFFFFF",
          "0xFFFF0000"),
    # -- clusters
    Wrong(CLUSTERS, "a peer's memory is read behind a barrier of the block", ORDER_OF_CLUSTER,
          f"{TO_PEER} {one('st.shared.u32 [%r1+128], 7;')} @@"
          f"ld.shared::cluster.u32 %r11, [%r6+128]; {SYNC}", SYNC, "bar.sync 0;", PAIR),
    Wrong(CLUSTERS, "a relaxed arrival before a peer's memory is read", ORDER_OF_CLUSTER,
          f"{TO_PEER} {one('st.shared.u32 [%r1+128], 7;')} barrier.cluster.arrive@@;"
          f"barrier.cluster.wait; ld.shared::cluster.u32 %r11, [%r6+128]; {SYNC}", "", ".relaxed",
          PAIR),
    Wrong(CLUSTERS, "a peer ends before it is stored to",
          "shared memory of block 1 of the cluster, which has ended",
          f"{TO_PEER} {SYNC} setp.eq.u32 %p2, %r3, 1; @%p2 bra END; mov.u32 %r7, 0; SPIN:"
          "add.u32 %r7, %r7, 1; setp.lt.u32 %p3, %r7, 1000; @%p3 bra SPIN;"
          f"{one('st.shared::cluster.u32 [%r6+128], 7;')} END: @@", SYNC, "", PAIR),
    Wrong(CLUSTERS, "the multicast mask has a rank too many",
          "multicast to rank 2 of a cluster of 2 blocks",
          f"{initialised()} {one(f'{EXPECT} 64;')} {SYNC} mov.u16 %h1, @@;"
          "setp.eq.u32 %p2, %r3, 0; and.pred %p2, %p2, %p1;"
          f"@%p2 {LOAD}.multicast::cluster [%r1+128], [%rd1], 64, [%r1], %h1; {AWAITED} {SYNC}",
          "3", "7", PAIR),
    # -- multimem
    Wrong(SWITCH, "a flag of every member is raised with scope .cta", SCOPE_OF_GPU,
          SIGNAL.replace("@@", "multimem.red.relaxed.@@.global.add.u32 [%rd1], 1;"), "gpu", "cta",
          TWO_BLOCKS, data="multicast"),
    Wrong(SWITCH, "a flag of every member is raised by a weak store", "race: this",
          SIGNAL.replace("@@", "multimem.st.@@.global.u32 [%rd1], 1;"), "relaxed.gpu", "weak",
          TWO_BLOCKS, data="multicast"),
    Wrong(SWITCH, "a member is read behind a bulk store by the multicast address, without a fence",
          "missing is a fence.proxy.alias between them", MULTICAST_STORE, "fence.proxy.alias;", "",
          data="multicast"),
    # -- bounds
    Wrong(BOUNDS, "one thread more than the tensor has elements", OUTSIDE,
          f"{WORD} setp.lt.u32 %p2, %r0, @@; @%p2 st.global.u32 [%rd3], 1;", "31", "32", words=31),
    Wrong(BOUNDS, "the last vector reaches over the end", OUTSIDE,
          "ld.global.v2.u32 {%r10, %r11}, [%rd1+@@];", "112", "120", words=31),
    Wrong(BOUNDS, "an atomic behind the end", OUTSIDE,
          "red.relaxed.gpu.global.add.u32 [%rd1+@@], 1;", "120", "124", words=31),
    Wrong(BOUNDS, "a local array has one element less", "of local memory, which has 16",
          ".local .align 4 .b8 own[16]; mov.u64 %rd3, own; st.local.u32 [%rd3+@@], 1;", "12", "16"),
    Wrong(BOUNDS, "a cp.async reaches over the end of the tensor", OUTSIDE,
          "add.u64 %rd3, %rd1, @@; mov.u32 %r4, %r1;" + one(f"{ASYNC_16} cp.async.wait_all;"),
          "96", "112", words=31),
    # -- use after free
    Wrong(FREED, "an atomic to a freed buffer", "use after free",
          "red.relaxed.gpu.global.add.u32 [%rd2], 1;", "", "", data="freed"),
    Wrong(FREED, "a bulk load of a freed buffer", "use after free",
          initialised() + one(f"{EXPECT} 64; {LOAD} [%r1+128], [%rd2], 64, [%r1];") + AWAITED,
          "", "", data="freed"),
    # -- memory that was never written
    Wrong(NOTHING, "half of an array is filled, all of it is read",
          "loaded from memory that was never written",
          f"{OWN} setp.lt.u32 %p2, %r0, @@; @%p2 st.shared.u32 [%r4+128], %r0; bar.sync 0;"
          f"ld.shared.u32 %r5, [%r4+128]; {WORD} st.global.u32 [%rd3], %r5;", "32", "16"),
    Wrong(NOTHING, "a bulk store of shared memory that nothing filled", f"shared {UNWRITTEN}",
          one(f"{STORED_16} {FENCE} {STORE} [%rd1], [%r1+@@], 16; {DONE}"), "128", "144"),
    Wrong(NOTHING, "a bulk load of global memory that nothing filled", f"global {UNWRITTEN}",
          initialised() + one(f"st.global.v4.u32 [%rd1], {ZEROS}; fence.proxy.async; {EXPECT} 16;"
                              f"{LOAD} [%r1+128], [%rd1+@@], 16, [%r1];") + AWAITED,
          "0", "16", data="fresh"),
    Wrong(NOTHING, "an atomic sum that starts from nothing", f"global {UNWRITTEN}",
          one("@@ red.relaxed.gpu.global.add.u32 [%rd1], 1;"), "st.global.u32 [%rd1], 0;", "",
          data="fresh"),
]  # fmt: skip


def page() -> str:
    """Return the table of all programs."""
    lines = [
        "# Wrong programs",
        "",
        f"{len(PROGRAMS)} programs with one fault each. The machine reports each one; with the",
        "right statements each runs without an error (`test_ptx_wrong_programs.py`).",
        "",
        "| Kind | Fault | Message |",
        "| --- | --- | --- |",
    ]
    lines += [f"| {p.kind} | {p.bug} | {p.caught.replace(' | ', '; ')} |" for p in PROGRAMS]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
