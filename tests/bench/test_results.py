"""docs/contribute/results/: tables, sentences and charts match the raw JSON; charts are legible."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import charts
import conclusions
import drawing
import pytest
import tables
from drawing import Bar, Group, Line, Series

SVG = "{http://www.w3.org/2000/svg}"
MARK = re.compile(r"<!-- results:(\w+) -->")
RATIOS = (
    "hosts",
    "hosts-shapes",
    "layers",
    "layers-models",
    "one-host",
    "tuning",
    "kernel-choice",
    "scale",
)


def test_tables_and_charts_are_those_of_the_raw_json() -> None:
    outdated = [
        str(path.relative_to(tables.ROOT))
        for path, text in tables.made()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    assert not outdated, "run: python benchmarks/tables.py"


def test_check_names_what_is_out_of_date(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page, chart = tmp_path / "page.md", tmp_path / "some.svg"
    page.write_text("<!-- results:one -->\nold\n<!-- /results:one -->\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    monkeypatch.setattr(tables, "PAGES", (page,))
    monkeypatch.setattr(tables, "TABLES", {"one": lambda: "new"})
    monkeypatch.setattr(charts, "CHARTS", {"some.svg": lambda: "<svg/>\n"})
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
    assert "new" in page.read_text() and chart.read_text() == "<svg/>\n"


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


@pytest.mark.parametrize("name", charts.CHARTS)
def test_charts_are_legible(name: str) -> None:
    root = ElementTree.parse(tables.FOLDER / name).getroot()
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    assert root.findtext(f"{SVG}title")
    style = root.findtext(f"{SVG}style") or ""
    assert "prefers-color-scheme: dark" in style
    sizes = [float(size) for size in re.findall(r"font-size: (\d+)px", style)]
    assert sizes and min(sizes) * drawing.NARROWEST / width >= 11
    ground = next(one for one in root.iter(f"{SVG}rect") if one.get("class") == "ground")
    assert float(ground.attrib["width"]) == width - 1
    for text in root.findall(f".//{SVG}text"):
        begin, wide = float(text.attrib["x"]), drawing.text_width(text.text or "")
        begin -= {"end": wide, "middle": wide / 2}.get(text.get("text-anchor", ""), 0)
        group = next((g for g in root.findall(f"{SVG}g") if text in list(g)), None)
        if group is None or "transform" not in group.attrib:
            assert begin >= 0 and begin + wide <= width, text.text
            assert 0 < float(text.attrib["y"]) < height, text.text
    assert (root.find(f".//{SVG}line[@class='one']") is not None) == (name[:-4] in RATIOS)


def drawn(**options: object) -> ElementTree.Element:
    groups = (
        Group("a & b", (Bar(0.5, (0.4, 0.6), 0.2), Bar(None)), "first"),
        Group("c", (Bar(3.0, (2.0, 9.0)), Bar(1.0)), "second"),
    )
    series = (Series("one", 2), Series("two", 1))
    text = drawing.bars("title", "below", "ms", series, groups, **options)  # type: ignore[arg-type]
    return ElementTree.fromstring(text)


def rectangles(root: ElementTree.Element) -> list[float]:
    """Widths of the bars, without ground and legend."""
    found = [one for one in root.iter(f"{SVG}rect") if one.get("class") != "ground"]
    return [float(one.attrib["width"]) for one in found if "rx" not in one.attrib]


def test_bars_are_as_long_as_their_values() -> None:
    first, second, third = rectangles(drawn())
    assert second / first == pytest.approx(6, rel=0.01) and third / first == pytest.approx(2, 0.01)


def test_bars_beyond_the_axis_are_cut_and_keep_their_value() -> None:
    root = drawn(most=1.5, reference=1.0, interval="90%", mark="least")
    assert rectangles(root)[1] / rectangles(root)[2] == pytest.approx(1.5, 0.01)
    texts = [one.text for one in root.iter(f"{SVG}text")]
    for said in ("3.00", "–", "a & b", "first", "second", "90%", "least", "ms"):
        assert said in texts


def test_segment_widths_add_up_to_the_total() -> None:
    root = drawn(stacked=True)
    assert [one.text for one in root.iter(f"{SVG}text")].count("4.00") == 1
    assert sum(rectangles(root)[-2:]) / rectangles(root)[0] == pytest.approx(8, 0.01)


def test_lines_stand_on_logarithmic_axes() -> None:
    points = ((1.0, 1.0), (10.0, 10.0), (100.0, 100.0))
    text = drawing.lines("t", "s", "M", "ms", (Series("one", 2),), [("op", [Line(points)])])
    root = ElementTree.fromstring(text)
    at = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter(f"{SVG}circle")]
    (x0, y0), (x1, y1), (x2, y2) = at
    assert x1 - x0 == pytest.approx(x2 - x1) and y0 - y1 == pytest.approx(y1 - y2) and y0 > y1
