"""What kernels may call on the PTX machine: printf and a failed assertion."""

from __future__ import annotations

import pytest
import torch

from ptx_machine import PtxError
from ptx_text import kernel, run

FUNCTIONS = """
.extern .func (.param .b32 func_retval0) vprintf
(.param .b64 vprintf_param_0, .param .b64 vprintf_param_1)
;
.extern .func __assertfail
(.param .b64 a0, .param .b64 a1, .param .b32 a2, .param .b64 a3, .param .b64 a4)
.noreturn;
"""


def string(name: str, text: str) -> str:
    codes = ", ".join(str(code) for code in (*text.encode(), 0))
    return f".global .align 1 .b8 {name}[{len(text) + 1}] = {{{codes}}};\n"


PRINT = """
    .local .align 8 .b8 depot[40];
    mov.u64 %rd10, depot;
    cvta.local.u64 %rd11, %rd10;
    st.local.u32 [%rd10], %r0;
    mov.f64 %fd1, 0d3FF8000000000000;
    st.local.f64 [%rd10+8], %fd1;
    mov.u64 %rd12, word;
    cvta.global.u64 %rd12, %rd12;
    st.local.u64 [%rd10+16], %rd12;
    st.local.u64 [%rd10+24], -5000000000;
    st.local.u32 [%rd10+32], 255;
    mov.u64 %rd13, format;
    cvta.global.u64 %rd13, %rd13;
    {
    .param .b64 param0;
    st.param.b64 [param0], %rd13;
    .param .b64 param1;
    st.param.b64 [param1+0], %rd11;
    .param .b32 retval0;
    call.uni (retval0),
    vprintf,
    (
    param0,
    param1
    );
    ld.param.b32 %r5, [retval0+0];
    }
    ld.param.u64 %rd1, [p0];
    st.global.u32 [%rd1], %r5;
"""


def test_printf_prints(capfd: pytest.CaptureFixture[str]) -> None:
    outside = FUNCTIONS + string("word", "words")
    outside += string("format", "%d: %.2f, %5s %lld %x 100%%\n")
    count = torch.zeros(1, dtype=torch.int32)
    run(kernel(PRINT, 1, outside=outside), [count], block=2)
    line = "1.50, words -5000000000 ff 100%\n"
    assert capfd.readouterr().out == f"0: {line}1: {line}"
    assert count.item() == 5


def test_a_failed_assertion_is_an_error() -> None:
    texts = {"message": "x < 3", "file": "some.cu", "function": "void f(int)"}
    outside = FUNCTIONS + "".join(string(name, text) for name, text in texts.items())
    body = "setp.lt.u32 %p1, %r0, 3; @%p1 bra END;"
    body += " ".join(f"mov.u64 %rd1{i}, {name};" for i, name in enumerate(texts))
    body += """
    {
    .param .b64 param0; st.param.b64 [param0], %rd10;
    .param .b64 param1; st.param.b64 [param1], %rd11;
    .param .b32 param2; st.param.b32 [param2], 42;
    .param .b64 param3; st.param.b64 [param3], %rd12;
    .param .b64 param4; st.param.b64 [param4], 1;
    call.uni __assertfail, (param0, param1, param2, param3, param4);
    }
    END:
    """
    text = kernel(body, 0, outside=outside)
    run(text, [], block=3)
    why = r"assertion x < 3 failed in void f\(int\), some.cu:42, by thread 3 of block \(0, 0, 0\)"
    with pytest.raises(PtxError, match=why):
        run(text, [], block=8)


def test_other_functions_are_not_known() -> None:
    outside = ".extern .func malloc (.param .b64 a0);"
    with pytest.raises(PtxError, match="unknown instruction"):
        run(kernel("{ .param .b64 a; call.uni malloc, (a); }", 0, outside=outside), [])
