"""Puts of kernels to other ranks: how the emulated NVSHMEM makes them, and what is checked."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from ptx_machine import PtxError, cuda_device
from ptx_machine.gpu import LIBRARY, Gpu
from ptx_text import kernel, run

PUT = """
.extern .func emulated_nvshmem_put_signal
(.param .b64 to, .param .b64 from, .param .b64 bytes, .param .b64 word, .param .b64 value,
 .param .b32 rank);
"""
HEAP = 4096  # bytes
TO, WORD = 2048, 4088  # offsets


def put(
    fence: str = "membar.sys;",
    barrier: str = "bar.sync 0;",
    source: int = 0,
    to: int = TO,
    word: int = WORD,
    rank: int = 1,
    after: str = "",
) -> str:
    """Return a kernel whose 64 threads write 8 bytes each, which thread 0 puts then."""
    body = f"""
    ld.param.u64 %rd1, [p0];
    add.u64 %rd2, %rd1, %rd0;
    add.u64 %rd3, %rd0, 5;
    st.global.u64 [%rd2], %rd3;
    {fence}
    {barrier}
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra DONE;
    add.u64 %rd4, %rd1, {to};
    add.u64 %rd5, %rd1, {source};
    add.u64 %rd6, %rd1, {word};
    {{
    .param .b64 param0; st.param.b64 [param0], %rd4;
    .param .b64 param1; st.param.b64 [param1], %rd5;
    .param .b64 param2; st.param.b64 [param2], 512;
    .param .b64 param3; st.param.b64 [param3], %rd6;
    .param .b64 param4; st.param.b64 [param4], 7;
    .param .b32 param5; st.param.b32 [param5], {rank};
    call.uni emulated_nvshmem_put_signal, (param0, param1, param2, param3, param4, param5);
    }}
    {after}
    DONE:
    """
    return kernel(body, 1, outside=PUT)


class Heaps:
    """Symmetric memory of two ranks in this process."""

    def __init__(self) -> None:
        cuda_device()  # the emulated NVSHMEM looks for the machine
        self.gpu = Gpu(LIBRARY)
        self.ranks = [torch.zeros(HEAP, dtype=torch.uint8) for _ in range(2)]
        begins = (ctypes.c_size_t * 2)(*(heap.data_ptr() for heap in self.ranks))
        self.gpu.library.emulated_nvshmem_add_heaps(2, begins, ctypes.c_size_t(HEAP))

    def run(self, text: str) -> None:
        """Run a kernel of rank 0, and wait for what it puts."""
        run(text, [self.ranks[0]], block=64)
        self.gpu.library.emulated_nvshmem_await_puts()

    def words(self, rank: int, offset: int, count: int) -> list[int]:
        return self.ranks[rank][offset : offset + 8 * count].view(torch.int64).tolist()


@pytest.fixture
def heaps() -> Iterator[Heaps]:
    made = Heaps()
    yield made
    made.gpu.close()


def test_data_and_word_arrive(heaps: Heaps) -> None:
    heaps.run(put())
    assert heaps.words(1, TO, 64) == [8 * i + 5 for i in range(64)]
    assert heaps.words(1, WORD, 1) == [7]
    assert heaps.words(0, WORD, 1) == [0]
    assert not heaps.gpu.error()


def test_a_put_goes_on_when_the_kernel_has_ended(heaps: Heaps) -> None:
    heaps.gpu.set_copy_delay(300_000)
    run(put(), [heaps.ranks[0]], block=64)
    assert heaps.words(1, WORD, 1) == [0]
    heaps.gpu.library.emulated_nvshmem_await_puts()
    assert heaps.words(1, WORD, 1) == [7]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (put(fence=""), "missing is a fence of scope .sys by the thread that wrote"),
        (put(fence="membar.gl;"), "missing is a fence of scope .sys by the thread that wrote"),
        (put(barrier=""), r"missing is a bar.warp.sync"),
        (put(source=4000), "the source of a put to rank 1, 512 bytes, is not in the symmetric"),
        (put(to=3600), "the destination of a put to rank 1, 512 bytes, is not in the symmetric"),
        (put(rank=2), "the source of a put to rank 2"),
        (put(word=WORD - 4), "the word of a put is not aligned to 8 bytes"),
        (put(after="st.global.u64 [%rd1], 1;"), "an acquire of the word that the put raises"),
    ],
)
def test_wrong_puts_are_errors(heaps: Heaps, text: str, message: str) -> None:
    with pytest.raises(PtxError, match=message):
        heaps.run(text)
    assert heaps.words(1, WORD, 1) in ([0], [7])  # the last one was under way


def test_a_source_that_changes_before_it_is_sent_is_an_error(heaps: Heaps) -> None:
    """Of another kernel, which the machine finds in order; the bytes are not those of the call."""
    heaps.gpu.set_copy_delay(300_000)
    run(put(), [heaps.ranks[0]], block=64)
    heaps.ranks[0].zero_()
    heaps.gpu.library.emulated_nvshmem_await_puts()
    assert "the source of a put was overwritten before it was read" in heaps.gpu.error()
