"""Functions with bodies, branches by a number, and shared variables of a module."""

from __future__ import annotations

import pytest
import torch

from ptx_machine import Device, Module, PtxError
from ptx_text import LANES, compiled, kernel, run

OWN = """
    ld.param.u64 %rd1, [p0];
    add.s64 %rd1, %rd1, %rd0;
    ld.global.u32 %r10, [%rd1];
"""  # %r10: the thread's element, at %rd1
STORED = "st.global.u32 [%rd1], %r20;"

FUNCTIONS = """
.visible .func (.param .b32 result) twice(.param .b32 given);
.func (.param .b32 result) collatz(.param .b32 given)
{
    .reg .pred %p<2>;
    .reg .b32 %r<4>;
    ld.param.b32 %r0, [given];
    and.b32 %r1, %r0, 1;
    setp.eq.u32 %p0, %r1, 0;
    @%p0 bra $even;
    mad.lo.u32 %r2, %r0, 3, 1;
    st.param.b32 [result], %r2;
    ret;
$even:
    shr.u32 %r3, %r0, 1;
    st.param.b32 [result+0], %r3;
    ret;
}
.visible .func (.param .b32 result) twice(.param .b32 given)
{
    .reg .b32 %r<4>;
    .param .b32 between;
    ld.param.b32 %r0, [given];
    {
        .param .b32 passed;
        st.param.b32 [passed+0], %r0;
        call.uni (between), collatz, (passed);
    }
    call (result), collatz, (between);
    ret;
}
.func store(.param .b64 where, .param .b32 what)
{
    .local .b32 kept;
    .reg .b32 %r0;
    .reg .b64 %rd0;
    ld.param.b32 %r0, [what];
    st.local.b32 [kept], %r0;
    ld.local.b32 %r0, [kept];
    ld.param.b64 %rd0, [where];
    st.global.b32 [%rd0], %r0;
    ret;
}
"""


def collatz(n: int) -> int:
    return 3 * n + 1 if n % 2 else n // 2


@pytest.mark.parametrize("seed", [0, 5])
def test_functions_are_called(seed: int) -> None:
    """Nested calls, results, arguments, returns of some lanes, and calls of some lanes only."""
    body = f"""
        {OWN}
        .param .b32 given;
        .param .b32 result;
        .param .b64 where;
        st.param.b32 [given], %r10;
        call.uni (result), twice, (given);
        ld.param.b32 %r20, [result];
        setp.gt.u32 %p1, %r20, 20;
        st.param.b32 [given], %r20;
        @%p1 call (result), collatz, (given);
        ld.param.b32 %r20, [result];
        st.param.b32 [given], %r20;
        st.param.b64 [where], %rd1;
        call.uni store, (where, given);
    """
    values = torch.arange(1, 1 + LANES)
    run(kernel(body, 1, outside=FUNCTIONS), [values], seed=seed)
    wanted = []
    for n in range(1, 1 + LANES):
        output = collatz(collatz(n))
        wanted.append(collatz(output) if output > 20 else output)
    assert values.tolist() == wanted


def test_a_kernel_may_be_declared_first() -> None:
    """As NVRTC does in relocatable code."""
    values = torch.arange(LANES)
    text = kernel(f"{OWN} add.u32 %r20, %r10, 1; {STORED}", 1, ".visible .entry k(.param .u64 p0);")
    run(text, [values])
    assert values.tolist() == [*range(1, 1 + LANES)]
    assert list(Module(text).kernels) == ["k"]


@pytest.mark.parametrize(
    "function, why",
    [
        (
            ".func again() { .reg .b32 %r0; call.uni again; ret; }",
            "recursion of again is not supported",
        ),
        (".func again(.param .b32 x) { ret; }", "passes too little"),
        (".func again();", "unknown instruction"),
    ],
)
def test_calls_that_are_not_known_are_errors(function: str, why: str) -> None:
    with pytest.raises(PtxError, match=why):
        run(kernel("call.uni again;", 0, outside=function), [])


BRANCHES = f"""
    {OWN}
    bra $over;
$three:
    mov.u32 %r20, 300;
    bra $done;
$over:
    mov.u32 %r20, 7;
$list: .branchtargets $one, $two, $three, $done;
    setp.lt.u32 %p1, %r10, 9;
    @%p1 brx.idx %r10, $list;
    mov.u32 %r20, 1000;
    bra $done;
$one:
    mov.u32 %r20, 100;
    bra $done;
$two:
    mov.u32 %r20, 200;
$done:
    {STORED}
"""


@pytest.mark.parametrize("seed", [0, 3])
def test_a_number_chooses_where_to_branch(seed: int) -> None:
    values = torch.tensor([(5 * lane) % 4 if lane % 7 else 9 for lane in range(LANES)])
    wanted = [{0: 100, 1: 200, 2: 300, 3: 7, 9: 1000}[int(v)] for v in values]
    run(kernel(BRANCHES, 1), [values], seed=seed)
    assert values.tolist() == wanted


def test_a_number_behind_the_list_is_an_error() -> None:
    with pytest.raises(PtxError, match=r"trap.*PTX line \d+: \s*(@%p1 )?brx.idx"):
        run(kernel(BRANCHES, 1), [torch.full((LANES,), 4)])
    with pytest.raises(PtxError, match=r"needs a list of \.branchtargets"):
        run(kernel("brx.idx %r0, $nowhere;", 0), [])


def test_each_kernel_has_shared_variables_of_the_module() -> None:
    outside = ".shared .align 8 .b8 both[256]; .shared .b32 other;"
    body = f"""
        {OWN}
        .shared .b32 own[32];
        cvta.shared.u64 %rd2, both;
        mov.u32 %r1, other;
        mov.u32 %r3, own;
        sub.u32 %r4, %r1, %r3;
        add.s64 %rd3, %rd2, %rd0;
        st.u64 [%rd3], %rd0;
        ld.u32 %r20, [%rd3];
        st.shared.u32 [other], %r4;
        {STORED}
    """
    values = torch.zeros(LANES, dtype=torch.int64)
    run(kernel(body, 1, outside=outside), [values])
    assert values.tolist() == [8 * lane for lane in range(LANES)]


CUDA = r"""
__device__ __noinline__ unsigned gcd(unsigned a, unsigned b) {
  while (b != 0) { const unsigned rest = a % b; a = b; b = rest; }
  return a;
}
struct Pair { unsigned long long low; float high; };
__device__ __noinline__ Pair made(unsigned long long x, float y) {
  __shared__ float sums[64];
  sums[threadIdx.x] = y;
  __syncwarp();
  return {x * x, sums[threadIdx.x ^ 1]};
}
extern "C" __global__ void use(const unsigned* a, unsigned* out, float* others) {
  const unsigned i = threadIdx.x;
  const Pair pair = made(gcd(a[i], 360), i);
  others[i] = pair.high;
  unsigned value = 0;
  switch (i % 9) {
    case 0: value = gcd(i, 12); break;
    case 1: value = 17 * i; break;
    case 2: value = i ^ 5; break;
    case 3: value = __popc(i); break;
    case 4: value = i / 3; break;
    case 5: value = 1u << (i & 7); break;
    case 6: value = ~i; break;
    case 7: value = i * i; break;
    default: value = 3;
  }
  out[i] = value + static_cast<unsigned>(pair.low);
}
// 128-bit sums, which nvcc makes of carries.
extern "C" __global__ void wide(const unsigned long long* x, unsigned long long* out) {
  const unsigned __int128 a = (static_cast<unsigned __int128>(x[0]) << 64) | x[1];
  const unsigned __int128 b = (static_cast<unsigned __int128>(x[2]) << 64) | x[3];
  const unsigned __int128 output[] = {a + b, a - b, a * b};
  for (int i = 0; i < 3; ++i) {
    out[2 * i] = static_cast<unsigned long long>(output[i] >> 64);
    out[2 * i + 1] = static_cast<unsigned long long>(output[i]);
  }
}
"""


def gcd(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a


def test_functions_as_nvcc_compiles_them() -> None:
    module: Module = compiled(CUDA, "-arch=compute_90a")
    a = torch.arange(7, 7 + 64, dtype=torch.int32)
    out, others = torch.zeros(64, dtype=torch.int32), torch.zeros(64)
    Device().launch(module, "use", grid=1, block=64, args=[a, out, others], seed=2)
    assert others.tolist() == [i ^ 1 for i in range(64)]

    def value(i: int) -> int:
        values = [gcd(i, 12), 17 * i, i ^ 5, i.bit_count(), i // 3, 1 << (i & 7), ~i, i * i, 3]
        return values[i % 9]

    wanted = [value(i) + gcd(7 + i, 360) ** 2 for i in range(64)]
    assert out.tolist() == wanted

    numbers = [2**63 + 5, 2**64 - 3, 17, 2**64 - 9]
    x = torch.tensor([n - 2**64 if n >= 2**63 else n for n in numbers])
    output = torch.zeros(6, dtype=torch.int64)
    Device().launch(module, "wide", grid=1, block=1, args=[x, output])
    p, q = (numbers[0] << 64) + numbers[1], (numbers[2] << 64) + numbers[3]
    halves = [n % 2**64 for n in output.tolist()]
    results = [(halves[i] << 64) + halves[i + 1] for i in (0, 2, 4)]
    assert results == [n % 2**128 for n in (p + q, p - q, p * q)]
