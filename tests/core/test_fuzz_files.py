"""Damaged files of every kind end in an error of one line, or are set aside: see fuzz_files.py."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import fuzz_files
import fuzz_tuning
from flux.bench import page, results, suite_view
from flux.bench.shapes import load_shapes
from flux.cli.app import app
from flux.core import datafile
from flux.core.knobs import Knobs
from flux.kernels.config import GemmConfig
from flux.machine.cluster import load_cluster
from flux.machine.detection import System
from flux.select.cache import Cache
from flux.select.space import load_space
from flux.select.winners import DamagedEntryError, Entry, Key, checksum
from flux.tune.journal import Journal
from fuzz_files import Kind, fuzz, kinds, outcome, place
from fuzz_tuning import KEY
from harness import STRESS
from mutate import parsed

CASES = 100 * STRESS
KINDS = {kind.name: kind for kind in kinds()}
ON_DISK = [name for name, kind in KINDS.items() if kind.form != "text"]
DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.timeout(3600 if CASES > 1000 else 240)
@pytest.mark.parametrize("name", KINDS)
def test_damaged_files_are_refused_or_set_aside(name: str, tmp_path: Path) -> None:
    counts, failures = fuzz(KINDS[name], tmp_path / "files", CASES)
    assert not failures, "\n".join(failures[:10])
    assert counts.total() == CASES
    if KINDS[name].form != "text":
        assert counts["accepted"] < CASES / 2, counts


# -- special files ---------------------------------------------------------------------------------


def _large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(100 << 20)  # takes no room on disk


NO_FILES: dict[str, Callable[[Path], None]] = {
    "empty": Path.touch,
    "directory": Path.mkdir,
    "pipe": os.mkfifo,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "100 MB": _large,
}


@pytest.mark.timeout(60)  # a pipe that is waited for
@pytest.mark.parametrize("what", NO_FILES)
def test_special_files_are_refused_without_waiting(what: str, tmp_path: Path) -> None:
    for name in ON_DISK:
        path = place(KINDS[name], tmp_path / name, b"")
        path.unlink()
        NO_FILES[what](path)
        how, text = outcome(KINDS[name], path)
        may_be_absent = name in ("journal", "winners in the cache")
        if not (may_be_absent and what in ("empty", "dangling link")):
            assert how != "accepted" and text, name
        if what in ("pipe", "device"):
            # Kernels are loaded from nothing that every user may write, as devices are.
            reasons = ("regular file", "no file", "writable by every user")
            assert any(words in text for words in reasons), (name, text)
        if what == "100 MB" and name not in ("exported winners", "journal", "trace"):
            assert "has more than" in text, (name, text)  # and was not read


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_files_that_may_not_be_read_are_refused(tmp_path: Path) -> None:
    for name in ON_DISK:
        path = place(KINDS[name], tmp_path / "files", KINDS[name].sample)
        path.chmod(0)
        assert outcome(KINDS[name], path)[0] != "accepted", name


# -- equal documents -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ON_DISK)
def test_equal_documents_are_read_as_equal(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    if kind.form == "toml":
        again = b"# a comment\r\n" + kind.sample.replace(b"\n", b"\r\n") + b"\r\n\r\n"
    else:
        document = parsed(kind.sample, kind.form)
        lines = document if kind.form == "lines" else [document]
        again = b"\n".join(json.dumps(line, sort_keys=True).encode() for line in lines) + b"\n"
    assert again != kind.sample
    outcomes = []
    for data in (kind.sample, again):
        path = place(kind, tmp_path / "files", data)
        assert outcome(kind, path) == ("accepted", "")
        outcomes.append(kind.read(path))
    assert outcomes[0] == outcomes[1]


# -- JSON and TOML ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (DEEP, "nested more than 64 levels deep"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested more than 64 levels deep"),
        (b"[" * 65 + b"]" * 65, "nested more than 64 levels deep"),
        (b'{"a": {"b": [0, 1e999]}}', r"^a\.b\[1\]: expected a number that is finite, got inf"),
        (b'{"a": -Infinity}', "a: expected a number that is finite, got -inf"),
        (b'{"a": NaN}', "a: expected a number that is finite, got nan"),
        (b'{"a": 1' + b"0" * 400 + b"}", "a: an integer beyond 64 bits"),
        (b"1" * 5000, "not JSON: Exceeds the limit"),
        (b'{"a": "\\ud800"}', r"a: a lone surrogate in '\\ud800'"),
        (b'{"\\udfff": 1}', r"a lone surrogate in '\\udfff'"),
        (b'{"a": 1, "b": 2, "a": 1}', "not JSON: duplicate key 'a'"),
        (b'"\xff"', "not JSON: 'utf-8' codec"),
        (b"\xef\xbb\xbf{}", "not JSON: Unexpected UTF-8 BOM"),
        (b'{"a\\n\\u001b": NaN}', r"^a\\n\\x1b: expected a number"),
        (b"", "not JSON: Expecting value: line 1 column 1"),
    ],
)
def test_unusual_json_is_refused(text: bytes, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        datafile.parse_json(text)
    assert str(caught.value).isprintable()


def test_json_is_limited_in_depth_and_size() -> None:
    assert datafile.parse_json(b"[" * 64 + b"]" * 64)
    assert datafile.parse_json(f"[{2**64}, {-(2**64)}]".encode()) == [2**64, -(2**64)]


def test_errors_quote_a_part_of_a_file_in_one_line() -> None:
    assert datafile.one_line("a\nb\x1b[1m\ud800" + "x" * 999, 8) == r"a\nb\x1b[1m\ud800..."
    assert datafile.shown(["x" * 1000])[-4:] == "x..."


CLUSTER = KINDS["cluster"].sample.decode()


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("units = 132", f"units = {'[' * 5000}", "nested more than 64 levels deep"),
        ("units = 132", f"units = {'[' * 70}{']' * 70}", "nested more than 64 levels deep"),
        ("units = 132", f"units = 0x{'f' * 5000}", r"device\.units: an integer beyond 64 bits"),
        ("units = 132", f"units = {'1' * 5000}", "not TOML: Exceeds the limit"),
        ("units = 132", "units = 1073741825", r"device\.units: expected an integer <= 1073741824"),
        ("units = 132", f"u{'.a' * 6000} = 1", "a line has more than 10000 characters"),
        ("units = 132", f"units = 132\n'''{'x' * 2_000_000}'''=1", "has more than 1048576 bytes"),
        ("units = 132", 'units = 132\n"a\\n\\u001b" = 1', r"device\.a\\n\\x1b: unknown key"),
        ("units = 132", f'units = "{"x" * 9000}"', r"got 'x+\.\.\.$"),
        ("memory_gb = 80", "memory_gb = 1e16", r"memory_gb: expected a number <= 1e\+06"),
        ('name = "', 'name = "\\u001b[31m', r"name: expected at most 1000 printable characters"),
        ('name = "', f'name = "{"x" * 1001}', r"name: expected at most 1000 printable characters"),
    ],
)
def test_toml_with_invalid_values_is_refused(
    tmp_path: Path, old: str, new: str, complaint: str
) -> None:
    assert old in CLUSTER
    file = tmp_path / "c.toml"
    file.write_text(CLUSTER.replace(old, new))
    with pytest.raises(ValueError, match=f"c.toml: .*{complaint}") as caught:
        load_cluster(file)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000


def test_names_that_no_file_can_have_are_refused() -> None:
    with pytest.raises(ValueError, match="File name too long"):
        load_cluster("x" * 300)
    with pytest.raises(ValueError, match=r"no file a\\nb; clusters shipped"):
        load_cluster("a\nb")


def _refused(read: Callable[[Path], object], file: Path, text: str) -> str:
    file.write_text(text)
    with pytest.raises(ValueError) as caught:
        read(file)
    return str(caught.value).removeprefix(f"{file}: ")


def test_layers_and_workloads_with_too_large_sizes_are_refused(tmp_path: Path) -> None:
    text = KINDS["shapes of a model"].sample.decode()
    assert "hidden = 4096" in text
    large = text.replace("hidden = 4096", "hidden = 4096 # as ever").replace(
        "intermediate = 14336", "intermediate = 1073741823"
    )
    said = _refused(load_shapes, tmp_path / "s.toml", large)
    assert said.startswith("ag_gemm: the layer and its workloads make (m, n, k) = ")


def test_values_of_a_space_are_refused_where_it_is_read(tmp_path: Path) -> None:
    gpu, cpu = KINDS["space of GPUs"].sample.decode(), KINDS["space of the CPU"].sample.decode()
    file = tmp_path / "s.toml"
    for value, said in (("true", "tile must be 3"), ("[1, 2, 4294967296]", "tile must be 3")):
        added = gpu.replace("tile = [", f"tile = [{value}, ", 1)
        assert added != gpu
        assert _refused(load_space, file, added).startswith(f"kernel.tile: {said}")
    for size in ('"m/0"', '"m*1234567"', '"m*٣"', "2000000000"):
        added = cpu.replace("comm_tile_rows = [", f"comm_tile_rows = [{size}, ", 1)
        assert added != cpu
        assert "comm_tile_rows: expected m, chunk or n" in _refused(load_space, file, added)


# -- winners and journals --------------------------------------------------------------------------


def _changed(kind: str, path: str, value: Any) -> Any:
    """The document of a kind with one value replaced; ``path`` as ``winners.0.ms``."""
    document = copy.deepcopy(parsed(KINDS[kind].sample, KINDS[kind].form))
    at, steps = document, [int(step) if step.isdigit() else step for step in path.split(".")]
    for step in steps[:-1]:
        at = at[step]
    if value is Ellipsis:
        del at[steps[-1]]
    else:
        at[steps[-1]] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("winners.0.ms", 10**400, "ms must be a time"),
        ("winners.0.ms", 1e300, "ms must be a time"),
        ("winners.0.m", 2**30 + 1, "m must be an integer in"),
        ("winners.0.rounds", 2**31, "rounds must be"),
        ("winners.0.tuned_at", "x" * 41, "tuned_at must be"),
        ("winners.0.knobs.path", None, "Knobs.path must be one of"),
        ("winners.0.knobs.copy_streams", True, "Knobs.copy_streams must be 0 or 1"),
        ("winners.0.knobs.copy_streams", 1.0, "Knobs.copy_streams must be 0 or 1"),
        ("winners.0.knobs.tile", [32, 2**31], "Knobs.tile must be"),
        ("winners.1.kernel.tile", [128, 2**31, 64], "tile must be 3"),
        ("winners.1.kernel.stages", 2**31, "stages must be"),
        ("winners.0.knobs.a\nb", 1, r"unexpected keyword argument 'a\\nb'"),
        ("key.n", 2**30 + 1, "n must be an integer in"),
        ("key.dtype", "float٣", "dtype must look like"),
        ("key.world", "1x" + "9" * 300, "world must look like"),
        ("key.world", "0x2", "world must look like"),
        ("format", "x\n" * 1000, r"format 'x\\nx.*\.\.\., expected 1"),
    ],
)
def test_winners_out_of_range_are_damage(path: str, value: Any, complaint: str) -> None:
    document = _changed("winners", path, value)
    del document["sha256"]
    with pytest.raises(DamagedEntryError, match=complaint) as caught:
        Entry.from_dict({**document, "sha256": checksum(document)})
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600


def test_contents_that_have_no_checksum_are_damage() -> None:
    with pytest.raises(DamagedEntryError, match="Out of range float values"):
        Entry.from_dict(_changed("winners", "winners.0.ms", float("nan")))


def test_an_export_says_which_entry_is_damaged(tmp_path: Path) -> None:
    kind = KINDS["exported winners"]
    for path, value, said in (
        ("entries.1.winners.0.ms", 2.5, r"^entries\[1\]: the checksum does not match"),
        ("entries", {"a": 1}, "^entries: expected a list$"),
        ("entries", ..., "^entries: expected a list$"),
    ):
        file = place(
            kind, tmp_path / "files", json.dumps(_changed(kind.name, path, value)).encode()
        )
        with pytest.raises(DamagedEntryError, match=said):
            kind.read(file)


def test_a_cache_that_cannot_be_listed_is_reported(tmp_path: Path) -> None:
    (tmp_path / "v1").symlink_to("v1")
    with pytest.warns(RuntimeWarning, match="cannot be read: Too many levels of symbolic links"):
        assert list(Cache(tmp_path).entries()) == []


@pytest.mark.parametrize(
    "event",
    [
        {"event": "round"},
        {"event": "round", "times": {"one": [1.0]}},
        {"event": "round", "times": {"one": [1.0, 0.0]}},
        {"event": "round", "times": {"one": [1e300, 1.0]}},
        {"event": "round", "times": {"one": ["1.0", "1.0"]}},
        {"event": "excluded", "name": "one"},
        {"event": "excluded", "name": ["one"], "reason": ""},
        {"event": "checked", "name": {}},
        {"event": "winner", "winner": None},
        {"event": "winner", "winner": {"m": 64}},
        {"event": "winner", "winner": parsed(KINDS["winners"].sample, "json")["winners"][0]},
        {"event": "another"},
    ],
)
def test_damaged_events_of_a_journal_are_ignored(event: dict[str, Any], tmp_path: Path) -> None:
    search = fuzz_tuning.new_search()
    with Journal(tmp_path, "run", {}) as journal:
        journal.add("checked", shape=search.label, name="two")
        rest = {name: value for name, value in event.items() if name != "event"}
        journal.add(event["event"], shape=search.label, **rest)
    with pytest.warns(RuntimeWarning, match=r"run\.jsonl: event 2 is ignored"):
        found = fuzz_tuning.resume(journal.path)
    assert (found.samples, found.excluded, found.winner) == ({}, {}, None)
    assert found.checked == {"two"}


def test_a_complete_last_line_that_is_not_an_event_is_damage(tmp_path: Path) -> None:
    with Journal(tmp_path, "run", {}) as journal:
        path = journal.path
    whole = path.read_bytes()
    for line in (b'{"event": 1e999}\n', DEEP + b"\n"):
        path.write_bytes(whole + line)
        with pytest.warns(RuntimeWarning, match=f"{len(line)} bytes behind event 1 are dropped"):
            Journal(tmp_path, "run", {}).close()
        assert path.read_bytes() == whole


# -- kernels, results, traces, the kernel's files --------------------------------------------------

SYMBOL = next(iter(parsed(KINDS["kernel manifest"].sample, "json")["kernels"]))


@pytest.mark.parametrize(
    ("kind", "path", "value", "complaint"),
    [
        ("kernel manifest", "seconds", float("inf"), "seconds: expected a number that is finite"),
        ("kernel manifest", "seconds", -1, "seconds: expected a number >= 0, got -1"),
        ("kernel manifest", "seconds", "1", "seconds: expected a number >= 0, got '1'"),
        ("kernel manifest", "abi_version", 1.5, "abi_version: expected an integer >= 0, got 1.5"),
        ("kernel manifest", "bytes", "7", "bytes: expected an integer >= 0, got '7'"),
        ("kernel manifest", "nvcc", 13, "nvcc: expected a string, got 13"),
        ("kernel manifest", "flags", "-O3", "flags: expected a list, got '-O3'"),
        ("kernel manifest", "warnings", [1], r"warnings: expected strings, got \[1\]"),
        ("kernel manifest", "traced", 0, "traced: expected true or false, got 0"),
        ("kernel manifest", "arch", "80", "of another arch"),
        ("kernel manifest", "ptxas", {}, "ptxas: expected one report per kernel"),
        ("kernel manifest", f"ptxas.{SYMBOL}.registers", "9", "registers must be an integer"),
        ("kernel manifest", f"ptxas.{SYMBOL}.a\nb", 1, r"unexpected keyword argument 'a\\nb'"),
        ("runtime manifest", "archs", "80", "archs: expected a list, got '80'"),
        ("runtime manifest", "seconds", [], r"seconds: expected a number >= 0, got \[\]"),
        ("runtime manifest", "package", None, "package: expected a string, got None"),
        ("suite results", "version", "x" * 5000, r"version: expected 1, got 'x+\.\.\.$"),
        ("suite results", "settings.world", ..., r"settings\.world: expected a int, got None"),
        ("suite results", "entries.0.op", "gemm", r"entries\[0\]\.op: expected one of"),
        ("suite results", "entries.2.m", -1, r"entries\[2\]\.m: expected a size"),
        ("suite results", "entries.0.peers.a", [], r"entries\[0\]\.peers\.a: expected a string"),
        ("suite results", "entries.0.error", {}, r"entries\[0\]\.error: expected a string or null"),
        ("suite results", "timeline.events.0.start_us", 1e300, r"events\[0\]\.start_us: expected"),
        ("suite results", "timeline.events.0.rank", True, r"events\[0\]\.rank: expected a int"),
        ("trace", "otherData", [], "otherData: expected an object"),
    ],
)
def test_documents_are_checked_as_they_are_read(
    kind: str, path: str, value: Any, complaint: str, tmp_path: Path
) -> None:
    chosen = KINDS[kind]
    data = json.dumps(_changed(kind, path, value)).encode()
    file = place(chosen, tmp_path / "files", data)
    with pytest.raises(chosen.errors, match=complaint) as caught:
        chosen.read(file)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("overall_ms", -1.0),
        ("overall_ms", 1e16),
        ("gemm_non_split_ms", None),
        ("speedup_vs_unfused", -1.0),
        ("overlap_efficiency_interval", [0, 1e300]),
        ("overlap_efficiency_interval", ...),
        ("wrong", 5),
        ("wrong", [5]),
    ],
)
def test_figures_of_results_are_checked(key: str, value: Any, tmp_path: Path) -> None:
    path = f"entries.0.result.methods.flux.{key}"
    file = tmp_path / "r.json"
    file.write_text(json.dumps(_changed("suite results", path, value)))
    with pytest.raises(ValueError, match=rf"r\.json: entries\[0\]\.result\.methods\.flux\.{key}: "):
        results.load(file)


def test_the_page_shows_a_speed_that_was_rounded_to_nothing() -> None:
    path = "entries.0.result.methods.flux.speedup_vs_unfused"
    document = _changed("suite results", path, 0.0)
    assert "shapes measured" in page.render(results.from_json(document))


def test_tables_show_texts_of_a_file_as_they_are() -> None:
    """Text is neither markup nor a terminal command. One entry is pending."""
    document = _changed("suite results", "device", "GPU \x1b[31m red")
    methods = document["entries"][0]["result"]["methods"]
    methods["[/bold]\x1b"] = methods["flux"]
    console = Console(record=True, width=400, file=open(os.devnull, "w"))  # noqa: SIM115
    suite_view.show(results.from_json(document), console)
    text = console.export_text()
    assert r"GPU \x1b[31m red" in text and r"[/bold]\x1b" in text and "\x1b" not in text
    assert (
        suite_view.summary(results.SuiteEntry("shape", "ag_gemm", 1, 1, 1))
        == "pending: not measured"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [("pid", "0"), ("ts", "1"), ("ts", 1e300), ("dur", -1), ("args", []), ("name", 1), ("cat", [])],
)
def test_events_of_a_trace_are_checked(key: str, value: Any, tmp_path: Path) -> None:
    kind = KINDS["trace"]
    document = parsed(kind.sample, "json")
    event = next(entry for entry in document["traceEvents"] if entry["ph"] == "X")
    event[key] = value
    with pytest.raises(ValueError, match="is not a trace of flux"):
        kind.read(place(kind, tmp_path / "files", json.dumps(document).encode()))


@pytest.mark.parametrize("text", ["1.2.3 Gb/sec", "... Gb/sec", "²", "1.2.3", "9" * 400, "-1"])
def test_bad_numbers_from_the_kernel_count_as_unknown(text: str, tmp_path: Path) -> None:
    cpu = f"cpu MHz : {text.removesuffix(' Gb/sec')}\n"
    for name, content in {"rate": text, "numbers": text, "cpu": cpu}.items():
        (tmp_path / name).mkdir()
        file = tmp_path / name / "text"
        file.write_text(content)
        (_, ghz), *rates = fuzz_files._system(file)
        assert set(rates) <= {0.0}
        assert ghz == System(tmp_path / "nothing").cpu()[1]
        (tmp_path / "kernel").rename(tmp_path / f"kernel {name}")


# -- commands --------------------------------------------------------------------------------------

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut short": lambda data: data[: data.find(b"[", len(data) // 2) + 1],
    "nested": lambda data: b'{"a":' + DEEP + b"}",
    "not text": lambda data: b"\xff" + data,
    "empty": lambda data: b"",
    "digits": lambda data: b"a = " + b"1" * 5000,
}
TUNE = ["tune", "--explain", "--shapes", "cpu-small", "--nproc", "2"]
REFUSING = {
    "exported winners": ["tune", "import", "FILE"],
    "suite results": ["bench", "suite", "--report", "page.html", "--from", "FILE"],
    "cluster": [*TUNE, "--cluster", "FILE"],
    "space of the CPU": [*TUNE, "--space", "FILE"],
    "list of shapes": ["tune", "--explain", "--nproc", "2", "--shapes", "FILE"],
    "shapes of a model": ["bench", "suite", "--nproc", "2", "--shapes", "FILE"],
}
SETTING_ASIDE = {
    "winners in the cache": ["tune", "show"],
    "kernel manifest": ["compile", "--list", "--out", "ROOT"],
}


def _run(
    kind: Kind, arguments: list[str], data: bytes, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str, Path]:
    path = place(kind, folder / "files", data)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FLUX_TUNE_CACHE", str(folder / "files"))
    known = {"FILE": str(path), "ROOT": str(path.parent.parent)}
    result = CliRunner().invoke(app, [known.get(word, word) for word in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stderr, path


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", REFUSING)
def test_commands_refuse_damaged_files_in_one_line(
    name: str, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS[name]
    data = DAMAGE[damage](kind.sample)
    status, said, path = _run(kind, REFUSING[name], data, tmp_path, monkeypatch)
    assert status == 2
    assert said.startswith("error: ") and str(path) in said and said.count("\n") == 1


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", SETTING_ASIDE)
def test_commands_set_damaged_files_aside(
    name: str, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS[name]
    data = DAMAGE[damage](kind.sample)
    with pytest.warns(RuntimeWarning, match="damaged .* set aside as"):
        status, _, _ = _run(kind, SETTING_ASIDE[name], data, tmp_path, monkeypatch)
    assert status == 0
    assert list((tmp_path / "files").rglob("*.damaged-1"))


def test_knobs_and_kernels_are_of_their_types() -> None:
    for wrong in ({"path": None}, {"copy_streams": True}, {"copy_streams": 1.0}):
        with pytest.raises(ValueError, match=f"Knobs.{next(iter(wrong))} must be"):
            Knobs(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tile must be"):
        GemmConfig("gemm", "80", "bf16", (2**31, 64, 64), "multistage")
    with pytest.raises(ValueError, match="k must be"):
        Key(**{**asdict(KEY), "k": 2**31})
