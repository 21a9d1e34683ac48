"""Each wrong program is reported with its fault; its right twin runs without an error."""

from __future__ import annotations

import pytest

from ptx_machine import PtxError
from wrong_programs import PAGE, PROGRAMS, Wrong, page


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.bug)
def test_a_fault_is_reported(program: Wrong) -> None:
    for seed in (0, 1):
        program.run(fault=False, seed=seed)
        with pytest.raises(PtxError) as raised:
            program.run(fault=True, seed=seed)
        assert any(part in str(raised.value) for part in program.caught.split(" | "))


def test_the_page_lists_all_programs() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python ptx_machine/tests/wrong_programs.py"
