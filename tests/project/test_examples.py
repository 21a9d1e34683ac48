"""Examples run and clean up: under torchrun, in forked ranks, or with ranks of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import more, nothing_left_in_shared_memory
from scripts import ROOT, run_script

EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))
# Every example ends with this line, printed after all of its own checks.
LAST_WORDS = {
    "01_one_op.py": "largest error of all ranks",
    "02_changing_m.py": "M = 333: rows per rank",
    "03_two_layer_mlp.py": "agree with one process's PyTorch",
    "04_layers.py": "agree on all 6 losses",
    "05_inference.py": "decode the same tokens",
    "06_mixture_of_experts.py": "of 3 ranks: loss",
}


def test_the_list_of_examples_is_complete() -> None:
    assert [path.name for path in EXAMPLES] == sorted(LAST_WORDS)


@pytest.mark.parametrize(
    ("example", "ranks", "real"),
    [
        (EXAMPLES[0], 0, False),
        *((path, 3, False) for path in EXAMPLES[1:]),
        *more((EXAMPLES[0], 2, True)),
    ],
    ids=[*(path.stem for path in EXAMPLES), *more("torchrun")],
)
def test_example_runs_and_leaves_no_shared_memory(example: Path, ranks: int, real: bool) -> None:
    with nothing_left_in_shared_memory():
        output = run_script(example, ranks, real=real)
    lines = output.strip().splitlines()
    assert LAST_WORDS[example.name] in lines[-1], output
