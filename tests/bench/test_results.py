"""docs/contribute/results/: tables, sentences and charts match the raw JSON; charts are legible."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import charts
import conclusions
import drawing
import pytest
import tables
from drawing import Bar, BarChart, Group, Line, LineChart, Series

SVG = "{http://www.w3.org/2000/svg}"
MARK = re.compile(r"<!-- results:(\w+) -->")


def test_tables_and_charts_are_those_of_the_raw_json() -> None:
    assert not [path for path, _ in tables.outdated()], "run: python benchmarks/tables.py"


def test_check_names_what_is_out_of_date(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page, chart = tmp_path / "page.md", tmp_path / "some.svg"
    page.write_text("<!-- results:one -->\nold\n<!-- /results:one -->\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    monkeypatch.setattr(tables, "PAGES", (page,))
    monkeypatch.setattr(tables, "TABLES", {"one": lambda: "new"})
    monkeypatch.setattr(charts, "CHARTS", {"some.svg": lambda: LINES})
    for arguments, status, said in (
        (["--check"], 1, "out of date: page.md\nout of date: some.svg\n"),
        ([], 0, ""),
        (["--check"], 0, ""),
    ):
        monkeypatch.setattr(sys, "argv", ["tables.py", *arguments])
        with pytest.raises(SystemExit) as left:
            tables.main()
        assert (left.value.code, capsys.readouterr().out) == (status, said)
        if status:
            assert "old" in page.read_text() and not chart.exists()
    assert "new" in page.read_text() and "<desc>t. s." in chart.read_text()


def test_every_mark_has_a_table_and_every_table_a_page() -> None:
    marks = [name for page in tables.PAGES for name in MARK.findall(page.read_text())]
    assert sorted(marks) == sorted(tables.TABLES)


def test_every_page_begins_with_a_conclusion_and_its_chart() -> None:
    shown: set[str] = set()
    for page in sorted(tables.FOLDER.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        images = re.findall(r"!\[([^\]]+)\]\((\S+\.svg)\)", text)
        shown |= {name for _, name in images}
        if page.name != "index.md":
            title, sentence, chart = re.sub(r"<!--.*-->\n", "", text).split("\n\n")[:3]
            assert title.startswith("# ") and re.fullmatch(r"\*\*[^*]+\*\*\n?", sentence), page
            assert chart.startswith("!["), page
            assert f"({page.name})" in (tables.FOLDER / "index.md").read_text()
    text = (tables.ROOT / "docs" / "use" / "scale.md").read_text(encoding="utf-8")
    shown |= set(re.findall(r"!\[[^\]]+\]\(\S+/results/(\S+\.svg)\)", text))
    assert shown == set(charts.CHARTS)


def test_figures_that_other_pages_repeat_are_those_of_the_raw_json() -> None:
    pages = [tables.ROOT / "README.md", tables.ROOT / "docs/use/ops.md"]
    readme, api = (" ".join(page.read_text(encoding="utf-8").split()) for page in pages)
    _, slow, middle, _ = conclusions.training_ratios()
    took = f"of a GPT-3 layer took {slow:.2f} of Megatron-core's time at 500 Mbit/s and"
    assert f"{took} {middle:.2f} at 1 Gbit/s" in readme
    assert f"{slow:.2f} of Megatron's time at 500 Mbit/s and {middle:.2f} at 1 Gbit/s" in api
    scatter, gather = (conclusions.between_hosts(op, "500mbit") for op in ("gemm_rs", "ag_gemm"))
    assert f"{scatter:.2f} for GemmRS and {gather:.2f} for AGGemm at 500 Mbit/s" in readme


BARS = BarChart(
    "title",
    "below",
    "ms",
    (Series("one", "blue"), Series("two", "grey")),
    (
        Group("a & b", (Bar(0.5, (0.4, 0.6), 0.2), Bar(None)), "first"),
        Group("c", (Bar(3.0, (2.0, 9.0)), Bar(1.0)), "second"),
    ),
    reference=1.0,
    interval="90%",
    mark="least",
)
LINES = LineChart(
    "t", "s", "M", "ms", BARS.series[:1], [("op", [Line(((1, 1), (10, 10), (100, 100)))])]
)


def coordinates(root: ElementTree.Element, path: str) -> list[list[float]]:
    """Return the numbers in each path that has a colour of a series."""
    return [
        [float(number) for number in re.findall(r"-?[\d.]+", one.attrib["d"])]
        for one in root.iter(f"{SVG}path")
        if path in one.get("style", "")
    ]


def test_bars_are_as_long_as_their_values_and_follow_the_colour_scheme() -> None:
    text = drawing.draw(BARS)
    root = ElementTree.fromstring(text)
    first, long = (max(d[::2]) - min(d[::2]) for d in coordinates(root, "fill: var(--blue)")[:2])
    assert long / first == pytest.approx(6, rel=0.01)
    assert drawing.described(text) == BARS.description()
    assert (
        "first a & b: one 0.50 (0.40 to 0.60), least 0.20; two not measured." in BARS.description()
    )
    texts = {one.text for one in root.iter(f"{SVG}text")}
    assert {"3.00", "–", "a & b", "first", "second", "90%", "least", "ms"} <= texts
    assert "prefers-color-scheme: dark" in text
    assert not re.search("#[0-9a-f]{6}", re.sub("<style>.*</style>", "", text))
    assert text == drawing.draw(BARS), "the same chart has the same bytes"


def test_lines_stand_on_logarithmic_axes() -> None:
    root = ElementTree.fromstring(drawing.draw(LINES))
    path = next(d for d in coordinates(root, "stroke: var(--blue)") if len(d) == 6)
    (x0, x1, x2), (y0, y1, y2) = path[::2], path[1::2]
    assert x1 - x0 == pytest.approx(x2 - x1) and y0 - y1 == pytest.approx(y1 - y2) and y0 > y1


@pytest.mark.parametrize(("title", "words"), [("word " * 8, ""), ("w" * 80, "leaves the picture")])
def test_texts_that_leave_the_picture_raise(title: str, words: str) -> None:
    chart = dataclasses.replace(LINES, title=title)
    if not words:
        drawing.draw(chart)
        return
    with pytest.raises(ValueError, match=words):
        drawing.draw(chart)


def test_texts_that_overlap_raise() -> None:
    crowded = (*LINES.panels[0][1][0].points, (10.5, 3))
    chart = dataclasses.replace(LINES, panels=[("op", [Line(crowded)])])
    with pytest.raises(ValueError, match=r"'10' overlaps '10\.5'"):
        drawing.draw(chart)
