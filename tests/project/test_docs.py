"""Claims of README.md and docs/ hold: snippets run, links lead somewhere, tables are complete."""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flux.bench import metrics, report
from flux.bench.config import BenchConfig
from flux.bench.op import Measurement, MethodResult
from flux.cli.app import app
from flux.core import env
from flux.core.knobs import Op
from flux.core.problem import Problem
from scripts import ROOT, run_script
from tools import commands_page

README = ROOT / "README.md"
DOCS = ROOT / "docs"
API = DOCS / "use" / "ops.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += [
    ROOT / "benchmarks" / name for name in ("README.md", "results/runs.md", "results/dhelix.md")
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, content) of every fenced block."""
    return FENCE.findall(page.read_text(encoding="utf-8"))


def python_of(page: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """A page's Python blocks: those that make one script, and (block, what it prints) pairs.

    A block with a ``text`` block right behind it stands by itself and prints that text.
    """
    found = blocks(page)
    script, printing = [], []
    for (language, content), (next_language, printed) in zip(
        found, [*found[1:], ("", "")], strict=True
    ):
        if language == "python":
            if next_language == "text":
                printing.append((content, printed))
            else:
                script.append(content)
    return script, printing


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def section(page: Path, title: str) -> str:
    """Text from a heading to the next one of any level."""
    text = prose(page)
    begin = text.index(f"\n{title}\n") + len(title) + 2
    end = re.search(r"^#", text[begin:], re.MULTILINE)
    return text[begin : begin + end.start() if end else None]


def first_cells(table: str) -> list[str]:
    """Names in backquotes in the first column of a table."""
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


# Inductor calls each operator as it is, but for torch 2.9, and looks for no vector instructions: a
# C++ compiler takes seconds for each loop and for each set of instructions.
QUICK_INDUCTOR = """
from torch._inductor import config, cpu_vec_isa

if hasattr(config, "fallback_by_default"):
    config.fallback_by_default = True
cpu_vec_isa.supported_vec_isa_list.clear()
"""


@pytest.mark.timeout(300)  # torch.compile may run a C++ compiler on both ranks
@pytest.mark.parametrize(("page", "least"), [(README, 1), (API, 6)], ids=["README", "api"])
def test_snippets_run_as_one_script_on_two_ranks(page: Path, least: int, tmp_path: Path) -> None:
    script, _ = python_of(page)
    assert len(script) >= least
    path = tmp_path / "snippets.py"
    path.write_text("\n".join([QUICK_INDUCTOR, *script]), encoding="utf-8")
    run_script(path, ranks=2, timeout_s=280)


def test_snippets_print_what_the_page_shows() -> None:
    _, printing = python_of(API)
    assert printing
    for code, expected in printing:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(API), "exec"), {})
        assert printed.getvalue() == expected


PREDICTS = ("flux plan simulate ", "flux plan explain ", "flux plan search ", "flux simulate op ")
"""Commands that print the same everywhere."""


def shown_outputs() -> list[tuple[str, str, str]]:
    """(page, command, output) of every command that predicts.

    The output is the block right behind it; or none, of a command that draws a picture of a page.
    """
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        fences = list(FENCE.finditer(text))
        for block, behind in itertools.zip_longest(fences, fences[1:]):
            command = " ".join(block[2].replace("\\\n", " ").split())
            if block[1] != "sh" or not command.startswith(PREDICTS):
                continue
            adjacent = behind is not None and not text[block.end() : behind.start()].strip()
            if adjacent and behind[1] == "text":
                found.append((page.name, command, behind[2]))
            elif "--html docs/" in command:
                found.append((page.name, command, ""))
    return found


def cells(line: str) -> list[str]:
    return [" ".join(cell.split()) for cell in re.split("[│┃]", line) if cell.strip()]


def is_printed(line: str, printed: list[list[str]]) -> bool:
    """Whether a line of a page is one that was printed; "..." stands for the rest of a cell."""

    def same(shown: str, cell: str) -> bool:
        return cell.startswith(shown[:-3]) if shown.endswith("...") else shown == cell

    shown = cells(line)
    return any(len(shown) == len(row) and all(map(same, shown, row)) for row in printed)


@pytest.mark.parametrize(("page", "command", "shown"), shown_outputs(), ids=lambda text: text[:60])
def test_commands_print_what_the_page_shows(
    page: str, command: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables and pictures on pages are what their commands print and write now."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, shlex.split(command)[1:], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    printed = [cells(line) for line in result.output.splitlines()]
    stale = [line for line in shown.splitlines() if not is_printed(line, printed)]
    assert not stale, f"{page}: {command} prints\n{result.output}"
    for picture in tmp_path.rglob("*.svg"):
        committed = ROOT / picture.relative_to(tmp_path)
        assert committed.read_text(encoding="utf-8") == picture.read_text(encoding="utf-8")


def test_pages_with_predicted_tables_are_found() -> None:
    pages = {page for page, _, _ in shown_outputs()}
    assert {"plan.md", "domino.md", "dhelix.md", "centauri.md"} <= pages


def anchors(page: Path) -> set[str]:
    """Anchors that a page's headings get: lower case, no punctuation, hyphens for spaces."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            if not re.match(r"[a-z]+:", target):
                yield page, target


def test_relative_links_lead_somewhere() -> None:
    broken = []
    for page, target in links():
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(f"{page.name}: {target}")
    assert not broken


def test_files_named_in_the_text_exist() -> None:
    missing = [
        f"{page.name}: {name}"
        for page in PAGES
        for name in re.findall(
            r"`((?:csrc|flux|tests|docs|examples|benchmarks|tools)/[\w./-]*)`", prose(page)
        )
        if not (ROOT / name).exists()
    ]
    assert not missing


def test_exactly_the_environment_variables_are_listed() -> None:
    listed = first_cells(section(ROOT / "docs/use/environment.md", "## Variables"))
    assert listed == [variable.name for variable in env.VARIABLES]


def test_commands_are_listed_as_their_help_says() -> None:
    page = commands_page.PAGE.read_text(encoding="utf-8")
    assert page == commands_page.with_reference(page), "python tools/commands_page.py writes it"


def test_the_site_has_every_page() -> None:
    """mkdocs.yml names each page once; MkDocs itself is not needed here."""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    named = re.findall(r"([\w/-]+\.md)$", nav, re.MULTILINE)
    assert sorted(named) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


def percent(value: float | None) -> str:
    assert value is not None
    return f"{value:.0%}"


def test_worked_examples_of_the_metrics_are_right() -> None:
    rows = re.findall(
        r"^\|((?: \d+ \|){4}.*)\|$",
        section(ROOT / "docs/use/metrics.md", "## Worked example"),
        re.MULTILINE,
    )
    assert len(rows) == 3
    for row in rows:
        gemm, comm, unfused, overall, ect, overlap, bounded, speedup = (
            cell.strip() for cell in row.split("|")
        )
        got = metrics.evaluate(float(overall), float(gemm), float(comm), float(unfused))
        assert (f"{got.ect_ms:g}", percent(got.overlap_efficiency)) == (ect, overlap)
        assert (percent(got.bounded_efficiency), f"{got.speedup_vs_unfused:.2f}x") == (
            bounded,
            speedup,
        )


def test_json_keys_of_the_benchmark_are_all_described() -> None:
    config = BenchConfig(Problem(Op.ag_gemm, 4, 4, 4, "float32", 2))
    figures = metrics.evaluate(2.0, 1.0, 1.0, 2.0)
    method = MethodResult("flux", figures, 0.0, [2.0], {}, ["wrong somewhere"])
    content = report.document(config, Measurement([method], {}, {}, 0.0), [])
    text = section(ROOT / "docs/use/metrics.md", "## JSON")
    assert sorted(first_cells(text)) == sorted(content)
    described = set(re.findall(r"`(\w+)`", text[text.index("Each method has") :]))
    assert described - {"null"} == set(content["methods"]["flux"])


def test_pages_are_short_and_the_index_lists_every_page() -> None:
    words = [
        len(page.read_text(encoding="utf-8").split()) for page in (README, *DOCS.rglob("*.md"))
    ]
    assert words[0] <= 900 and sum(words[1:]) <= 40000
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    doors = [
        page for door in ("use", "kernels", "contribute") for page in DOCS.glob(f"{door}/*.md")
    ]
    pages = {page.relative_to(DOCS).as_posix() for page in doors}
    linked = set(re.findall(r"\]\((\w[\w/-]*\.md)\)", index))
    assert linked == pages | {"contribute/results/index.md"}


def test_the_benchmarks_page_lists_every_script() -> None:
    page = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    files = {file.name: file.read_text(encoding="utf-8") for file in ROOT.glob("benchmarks/*.py")}
    scripts = {name for name, text in files.items() if '__name__ == "__main__"' in text}
    assert scripts - {"soak_rank.py"} <= set(re.findall(r"`(\w+\.py)`", page))


def test_a_name_means_one_thing() -> None:
    """Two packages may give their classes one name only if the glossary explains it."""
    packages: dict[str, set[str]] = {}
    for path in sorted((ROOT / "flux").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                packages.setdefault(node.name, set()).add(path.relative_to(ROOT).parts[1])
    glossary = (DOCS / "contribute" / "glossary.md").read_text(encoding="utf-8")
    shared = {name for name, homes in packages.items() if len(homes) > 1}
    assert not {name for name in shared if f"`{name}`" not in glossary}
