"""Plans with the times that `flux plan calibrate` has measured."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from flux.bench.calibrate_work import points_of
from flux.cli.app import app
from flux.machine.calibration import Calibration, Gemms, MeasuredPoint, read_calibration
from flux.machine.cluster import Cluster, load_cluster
from flux.plan.command_search import SearchOptions, _query
from flux.plan.model import Parallel, TrainingStep, step_of
from flux.plan.policies import policy_of
from flux.plan.sample import StepLayout
from flux.select.cost import attention_ms, memory_ms, sliced_gemm_ms

CPU = Path(__file__).parents[2] / "benchmarks/results/cpu/calibration.json"
H100 = load_cluster("domino-dgx-h100")
SLOWER = {"gelu": (2, 3), "silu_mul": (5, 9), "rotary": (10, 10), "cross_entropy": (7, 11)}
TENSORS = {**SLOWER, "rms_norm": (2, 4), "layer_norm": (2, 4), "add": (3, 3), "adamw": (14, 14)}


def as_modelled(**factors: float) -> dict[str, Any]:
    """A file whose times are those of the data sheet, without launches; of kinds multiplied."""
    device = H100.device
    points = []
    for point in points_of("cuda", "bfloat16", float8=True, small=False):
        backward = point.variant == "backward"
        if point.kind == "gemm":
            ms = sliced_gemm_ms(point.shape, point.dtype, 2, device)
        elif point.kind == "attention":
            ms = attention_ms(point.shape, point.dtype, device, backward=backward)
        elif point.kind in TENSORS:
            nbytes = 2 * np.prod(point.shape, dtype=float) * TENSORS[point.kind][backward]
            ms = memory_ms(device, nbytes, 0.8)
        else:
            continue
        factor = factors.get(point.kind, 1.0) * factors.get(point.variant, 1.0)
        points.append({**point._asdict(), "us": 1e3 * ms * factor})
    place = {"kind": "cuda", "arch": "sm_90", "units": device.units}
    return {"format": 1, "device": place, "points": points}


def written(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(json.dumps(content))
    return path


def step_ms(step: TrainingStep, cluster: Cluster) -> float:
    return StepLayout(cluster, step).timeline(policy_of("serial", {})).iteration_ms


@pytest.fixture(scope="module")
def modelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("calibration") / "h100.json", as_modelled())


def step(name: str, **options: Any) -> TrainingStep:
    return step_of(name, Parallel(tp=2, sequence=True), layers=2, micro_batch=2, **options)


def test_left_out_gemms_and_kernels_of_a_cpu_are_predicted_within_a_tenth() -> None:
    known = read_calibration(CPU)
    points = known.points
    gemms = [point for point in points if point.kind == "gemm" and point.variant == "fwd"]
    powers = [point for point in gemms if all(size.bit_count() == 1 for size in point.shape)]
    between = [point for point in gemms if point not in powers]
    assert len(between) == 60
    grid = Gemms(powers, 0)
    errors = [abs(grid.us(point.shape, "fwd") / point.us - 1) for point in between]
    assert np.median(errors) < 0.05 and np.quantile(errors, 0.9) < 0.15
    others = []
    kinds = [*gemms[:8], *(point for point in points if point.kind not in ("gemm", "copy"))]
    for left in kinds:
        if left.kind in ("attention", "add", "silu_mul", "layer_norm", "adamw"):
            rest = replace(known, points=tuple(point for point in kinds if point != left))
            others.append(abs(predicted_ms(rest, left) / (1e-3 * left.us) - 1))
    assert np.median(others) < 0.1


def test_left_out_gemms_and_attention_of_an_h200_are_predicted() -> None:
    known = read_calibration(CPU.parents[1] / "h200/calibration.json")
    attention = [point for point in known.points if point.kind == "attention"]
    assert known.gemms["bfloat16"].error < 0.06
    errors = [
        abs(
            predicted_ms(replace(known, points=(*known.points[:30], *rest)), left) * 1e3 / left.us
            - 1
        )
        for number, left in enumerate(attention)
        for rest in [attention[:number] + attention[number + 1 :]]
    ]
    assert len(errors) == 42 and np.median(errors) < 0.06


def predicted_ms(known: Calibration, point: MeasuredPoint) -> float:
    if point.kind == "attention":
        return known.attention_ms(point.shape, point.variant == "backward")
    return known.kernel_ms(point.kind, point.size, 0.0, point.variant == "backward")


def test_a_file_that_says_what_the_model_does_gives_the_same_plan(modelled: Path) -> None:
    cluster = load_cluster("domino-dgx-h100", modelled)
    measured = cluster.device.measured
    assert measured is not None and measured.gemms["bfloat16"].tile == (128, 256)
    assert cluster.device.gemm_share == pytest.approx(0.75, rel=0.02)
    assert cluster.device.memory_share == pytest.approx(0.8, rel=0.01)
    for asked in (step("llama2-70b"), step("gpt3-175b"), step("llama2-70b", eager=True)):
        plain, ours = step_ms(asked, H100), step_ms(asked, cluster)
        assert 0.93 < ours / plain < 1.02  # launches of 3 us are in measured times


def test_gemms_that_are_faster_than_a_file_says_raise_its_peak() -> None:
    plain, device = load_cluster("cpu").device, load_cluster("cpu", CPU).device
    assert device.gemm_share == 1.0
    assert device.tflops["float32"] == pytest.approx(0.1123, rel=0.01)  # MFU is at most 1
    assert device.tflops["float64"] / plain.tflops["float64"] == pytest.approx(1.43, rel=0.01)


def test_each_kind_of_operator_takes_its_measured_time(tmp_path: Path) -> None:
    fused = replace(step("llama2-70b"), vocabulary=32000)
    eager, float8 = replace(fused, eager=True), replace(fused, gemm_dtype="float8_e4m3fn")
    steps = (fused, eager, float8)

    def times(**factors: float) -> list[float]:
        file = written(tmp_path / "one.json", as_modelled(**factors))
        cluster = load_cluster("domino-dgx-h100", file)
        return [step_ms(asked, cluster) for asked in steps]

    base = times()
    for kind in (*TENSORS, "gemm", "attention", "wgrad", "dgrad"):
        ratios = [time / first for time, first in zip(times(**{kind: 2.0}), base, strict=True)]
        for asked, ratio in zip(steps, ratios, strict=True):
            takes = kind not in ("layer_norm", "gelu")  # of models with other functions
            takes &= asked is eager or kind not in SLOWER
            assert ratio > 1.004 if takes else ratio == 1.0, kind


def test_sizes_that_were_not_measured(modelled: Path) -> None:
    known = read_calibration(modelled)

    def gemm(*shape: int) -> float:
        return known.gemm_ms(shape, "bfloat16", "fwd")

    assert gemm(1, 8192, 8192) == gemm(16, 8192, 8192)
    cpu = read_calibration(CPU)  # without waves of tiles
    few, least = (cpu.gemm_ms((rows, 512, 512), "float32", "fwd") for rows in (1, 64))
    assert few == least
    assert gemm(1 << 17, 8192, 8192) == pytest.approx(8 * gemm(1 << 14, 8192, 8192), rel=0.05)
    assert known.kernel_ms("add", 1, 0, False) == known.kernel_ms("add", 1 << 18, 0, False)
    large = known.kernel_ms("add", 1 << 28, 0, False)
    assert known.kernel_ms("add", 1 << 30, 0, False) == pytest.approx(4 * large)
    assert known.kernel_ms("", 0, 6 << 28, True) == pytest.approx(large)
    short, long = (known.attention_ms((8, 8, s, s, 128), False) for s in (64, 128))
    assert long == pytest.approx(4 * short)


def test_a_run_that_was_cut_short_leaves_the_rest_to_data_sheets(tmp_path: Path) -> None:
    content, asked = as_modelled(attention=2.0, add=2.0, rms_norm=2.0), step("llama2-70b")
    times, names = [step_ms(asked, H100)], []
    kinds = [point["kind"] for point in content["points"]]
    for count in (kinds.index("rms_norm"), kinds.index("attention"), len(kinds)):
        part = {**content, "points": content["points"][:count]}
        cluster = load_cluster("domino-dgx-h100", written(tmp_path / "part.json", part))
        times.append(step_ms(asked, cluster))
        names.append(cluster.name.removeprefix(H100.name).split(" of ")[0])
    assert names == [", GEMMs", ", GEMMs and others", ", kernels"]
    gemms, others, whole = (later / first for first, later in itertools.pairwise(times))
    assert gemms == pytest.approx(1.0, abs=0.03) and others > 1.01 and whole > 1.01


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(format=2), "format: expected 1"),
        (lambda c: c["device"].update(arch="sm_80"), "is of cuda sm_80, not of sm_90"),
        (lambda c: c["points"][0].update(us=0), "us: expected a number >= 1e-06"),
        (lambda c: c["points"][0].update(shape=[4, 4]), "expected 3 sizes of gemm, got 2"),
        (lambda c: c["points"][0].update(variant="nt"), "variant: expected one of fwd"),
        (lambda c: c.update(points=c["points"][:7]), "fewer than 8 GEMMs"),
        (lambda c: c.update(points=c["points"][100:140]), "fewer than 8 GEMMs"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(change: Any, words: str, tmp_path: Path) -> None:
    content = as_modelled()
    change(content)
    file = written(tmp_path / "wrong.json", content)
    with pytest.raises(ValueError, match=words):
        load_cluster("domino-dgx-h100", file)


def test_a_file_of_another_dtype_says_how_to_measure_this_one() -> None:
    with pytest.raises(ValueError, match="not of bfloat16: measure with flux plan calibrate --d"):
        read_calibration(CPU).gemm_ms((64, 64, 64), "bfloat16", "fwd")


def test_commands_and_clusters_take_a_file(modelled: Path, tmp_path: Path) -> None:
    text = Path("tuning/clusters/domino-dgx-h100.toml").read_text()
    named = tmp_path / "cluster.toml"
    named.write_text(text.replace("[device]", f'[device]\ncalibration = "{modelled}"'))
    plain = ["plan", "simulate", "--policy", "serial", "--layers", "2", "--json", "-"]
    times = []
    for words in (
        ["--cluster", "domino-dgx-h100"],
        ["--cluster", "domino-dgx-h100", "--calibration", str(modelled)],
        ["--cluster", str(named)],
    ):
        result = CliRunner().invoke(app, [*plain, *words])
        assert result.exit_code == 0, result.output
        row = json.loads(result.stdout)
        times.append(row["iteration_ms"])
        assert ("h100.json" in row["cluster"]) == (len(times) > 1)
    assert times[0] != times[1] == times[2]
    result = CliRunner().invoke(app, [*plain, "--calibration", str(CPU)])
    assert result.exit_code == 2 and "is of cpu" in result.stderr
    asked = SearchOptions(gpus=8, cluster="domino-dgx-h100", calibration=str(modelled))
    assert _query(asked).cluster.device.measured is not None
