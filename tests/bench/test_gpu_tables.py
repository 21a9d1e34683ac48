"""benchmarks/gpu_tables.py on made-up figures, which stay in a temporary folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gpu_tables
import pytest
import tables

COMMON = {"device": "a made-up GPU", "versions": {"torch": "9.9"}}
TILE = "128x256x64_2x1_cooperative"


def kernels(op: str, m: int, dtype: str = "bf16", complaints: list[str] | None = None) -> Any:
    base = "torch.mm" if dtype == "bf16" else "torch._scaled_mm"
    plain, fused = f"flux_gemm_sm90a_{dtype}_nk_{TILE}", f"flux_{op}_sm90a_{dtype}_nk_{TILE}"
    slow = f"flux_{op}_sm90a_{dtype}_nk_64x64x64_1x1_pingpong"
    times = {base: 1.0, plain: 1.25, fused: 1.5, slow: 9.0, "reduce": 0.125, "copy": 0.25}
    ratio = {"median": 1.25, "interval": [1.2, 1.3]}
    return {
        "op": op, "m": m, "n": 640, "k": 320, "dtype": dtype, "baseline": base, "inner": 1,
        "median_ms": times,
        "vs_torch": {plain: ratio, fused: {"median": 1.5, "interval": None}, slow: ratio},
        "vs_plain": {fused: {"median": 1.2, "interval": [1.1, 1.3]}},
        "tflops": {base: 777.4}, "gb_per_s": {}, "errors": {}, "complaints": complaints or [],
    }  # fmt: skip


def method(overall: float | None, **figures: Any) -> dict[str, Any]:
    empty = dict.fromkeys(
        ("gemm_non_split_ms", "comm_ms", "overlap_efficiency", "overlap_efficiency_interval",
         "bounded_efficiency", "max_abs_err")
    )  # fmt: skip
    return {"overall_ms": overall, **empty, **figures}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    def write(name: str, content: Any) -> None:
        (tmp_path / name).write_text(json.dumps(content))

    shapes = [kernels("ag_gemm", 8192), kernels("gemm_rs", 4096, complaints=["k: wrong by 7"]),
              kernels("ag_gemm", 64)]  # fmt: skip
    write("kernels.json", {**COMMON, "shapes": shapes})
    write("kernels_e4m3.json", {**COMMON, "shapes": [kernels("ag_gemm", 8192, "e4m3")]})
    flux = method(
        3.5, gemm_non_split_ms=3.25, comm_ms=11.0, overlap_efficiency=0.75,
        overlap_efficiency_interval=[0.7, 0.8], bounded_efficiency=0.875,
    )  # fmt: skip
    methods = {
        "unfused": method(14.5), "flux": flux, "flux push 256 rows": method(3.375),
        "flux push 1 rows": method(7.0), "flux pull 9 rows": method(None),
    }  # fmt: skip
    shape = {"op": "ag_gemm", "world": 4, "m": 8192, "methods": methods, "complaints": ["late"]}
    write("loopback.json", {"shapes": [shape]})
    results = {
        "flux": method(1.0, max_abs_err=0.015625),
        "medium": {**method(1.0), "wrong": ["all of it"]},
    }
    virtual = {"op": "gemm_rs", "world": 8, "m": 2048, "n": 8, "k": 4, "methods": results}
    write("virtual_gemm_rs.json", virtual)
    return tmp_path


def test_every_mark_of_the_page_has_its_table(folder: Path) -> None:
    made = gpu_tables.tables(folder)
    page = (gpu_tables.FOLDER / "README.md").read_text()
    assert {name for name in made if f"<!-- results:{name} -->" in page} == set(made)
    assert set(made) <= set(tables.TABLES)
    text = tables.filled(page, made)
    assert "Not measured yet" not in text and "Nothing has been measured" not in text
    assert "a made-up GPU; torch 9.9" in text
    assert tables.filled(text, made) == text


def test_kernel_tables_show_times_and_wrong_results(folder: Path) -> None:
    made = {name: make() for name, make in gpu_tables.tables(folder).items()}
    row = f"| 8192 x 640 x 320 | 1.000 | 777 | {TILE} | 1.250 (1.200 to 1.300) |"
    assert row in made["h200_plain"] and "| 64 x" not in made["h200_plain"]
    assert "| 64 x" in made["h200_small_plain"] and "8192" not in made["h200_small_plain"]
    gather = f"| 8192 x 640 x 320 | {TILE} | 1.500 | 1.500 | 1.200 (1.100 to 1.300) |"
    assert gather in made["h200_ag_gemm"] and "4096" not in made["h200_ag_gemm"]
    assert made["h200_gemm_rs"].count("| 0.125 |") == 1
    assert "* **gemm_rs M = 4096**: k: wrong by 7" in made["h200_gemm_rs"]
    assert "torch._scaled_mm ms" in made["h200_fp8_plain"] and TILE in made["h200_fp8_fused"]


def test_loopback_and_virtual_tables_show_times_and_wrong_results(folder: Path) -> None:
    made = {name: make() for name, make in gpu_tables.tables(folder).items()}
    row = "| ag_gemm, 4, 8192 | 3.250 | 11.0 | 14.5 | 3.500 | 75% (70% to 80%) | 88% |"
    assert f"{row} flux push 256 rows: 3.375 ms |" in made["h200_loopback"]
    assert "* **ag_gemm, 4, 8192**: late" in made["h200_loopback"]
    assert "| gemm_rs, W = 8, 2048 x 8 x 4 | flux | 0.016 | right |" in made["h200_virtual"]
    assert "| medium | - | wrong: all of it |" in made["h200_virtual"]


def test_without_files_every_table_says_which_command_writes_it(tmp_path: Path) -> None:
    for name, make in gpu_tables.tables(tmp_path).items():
        said = make()
        assert "measured yet" in said
        assert name == "h200_status" or gpu_tables.COMMAND in said


def test_the_page_in_the_repository_is_up_to_date() -> None:
    page = (gpu_tables.FOLDER / "README.md").read_text()
    assert tables.filled(page, gpu_tables.tables()) == page
