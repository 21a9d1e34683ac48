"""The page of `flux bench suite`: what is drawn, escaped text, and what a real browser sees."""

from __future__ import annotations

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import suite_data
from browser import open_page
from flux.bench import page, results
from flux.bench.page import charts, svg, timeline
from flux.core.events import Event, Kind


class Elements(HTMLParser):
    """Elements and their attributes, the text of the page, and that each element is closed."""

    EMPTY = ("meta", "link", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))
        if name not in self.EMPTY:
            self._open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self._open.pop() == name

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def of_class(self, name: str, css: str) -> list[dict[str, str | None]]:
        return [
            attributes
            for element, attributes in self.elements
            if element == name and css in (attributes.get("class") or "").split()
        ]


def document(**changes: Any) -> dict[str, Any]:
    made = suite_data.document()
    made["timeline"] = results.CallTimeline("one <call>", suite_data.events()).as_json()
    return made | changes


def render(made: dict[str, Any]) -> str:
    return page.render(results.from_json(made))


def methods_of(made: dict[str, Any], kinds: tuple[str, ...]) -> list[tuple[str, dict[str, Any]]]:
    return [
        pair
        for entry in made["entries"]
        if entry["status"] == "done" and entry["kind"] in kinds
        for pair in entry["result"]["methods"].items()
    ]


ALL = (results.SHAPE, *results.SWEEPS)


def test_the_page_has_a_bar_and_a_row_for_each_method() -> None:
    made = document()
    seen = Elements(render(made))
    every = methods_of(made, ALL)
    assert len(seen.of_class("g", "bar")) == len(every)
    assert len(seen.of_class("tr", "figures")) == len(every)
    compared = [name for name, _ in methods_of(made, (results.SHAPE,)) if name != "unfused"]
    assert len(seen.of_class("g", "dot")) == len(compared)
    assert len(seen.of_class("g", "event")) == len(suite_data.events())
    assert len(seen.of_class("figure", "sweep")) == 4
    wrong = [one for _, one in every if one["overall_ms"] is None]
    assert len(seen.of_class("g", "none")) == 2 * len(wrong) == 2, "in both figures of the shape"


def test_figures_in_the_tables_are_those_of_the_document() -> None:
    made = document()
    text = render(made)
    rows = re.findall(r'<tr class="figures" data-method="([^"]+)">(.*?)</tr>', text, re.DOTALL)
    for (name, row), (expected, one) in zip(rows, methods_of(made, ALL), strict=False):
        cells = re.findall(r'<td class="number">\s*([^<]*?)\s*</td>', row)[-8:]
        assert name == expected
        if one["overall_ms"] is None:
            assert cells[:4] == ["–"] * 4
            assert "elements are wrong" in row
            continue
        assert float(cells[0]) == pytest.approx(one["overall_ms"], rel=6e-3)
        assert float(cells[3]) == pytest.approx(one["ect_ms"], rel=6e-3, abs=6e-4)
        assert float(cells[4].rstrip("%")) == pytest.approx(
            100 * one["overlap_efficiency"], abs=0.6
        )
        assert float(cells[6].rstrip("×")) == pytest.approx(one["speedup_vs_unfused"], abs=6e-3)
    assert len(rows) == len(methods_of(made, ALL))


def test_bars_are_as_high_as_their_times() -> None:
    entries = [entry for entry in results.from_json(document()).entries if entry.methods][2:5]
    drawn = str(charts.stacked_bars(charts.shape_groups(entries), "bars"))
    boxes = re.findall(r'height="([\d.]+)" class="(gemm|ect)"', drawn)
    heights: list[float] = []
    for height, kind in boxes:
        if kind == "gemm":
            heights.append(float(height))
        else:
            heights[-1] += float(height)
    whole = heights[0]  # of the first unfused call: 100%
    expected = [
        method["overall_ms"] / entry.methods["unfused"]["overall_ms"]
        for entry in entries
        for method in entry.methods.values()
    ]
    assert [height / whole for height in heights] == pytest.approx(expected, rel=1e-3)


def test_text_is_escaped_and_nothing_is_fetched() -> None:
    made = document()
    made["command"] = ["flux", "<img src=x onerror=alert(2)>"]
    made["entries"][3]["error"] = "<script>alert(3)</script>"
    text = render(made)
    seen = Elements(text)
    names = {name for name, _ in seen.elements}
    assert not names & {"script", "img", "iframe", "object", "b"}
    for name, attributes in seen.elements:
        assert not any(key.startswith("on") for key in attributes), (name, attributes)
        for key in ("href", "src"):
            target = attributes.get(key) or "#"
            assert target.startswith(("#", "data:")), target
    assert "@import" not in text and "url(http" not in text
    words = "".join(seen.text)
    assert "<img src=x onerror=alert(2)>" in words
    assert "<script>alert(3)</script>" in words
    assert '<b>"never"</b>' in words


def test_absent_peers_and_failures_are_named() -> None:
    words = " ".join("".join(Elements(render(document())).text).split())
    for name, reason in suite_data.ABSENT.items():
        assert name in words
        assert reason is None or reason in words
    assert (
        "gemm_rs 8192 x 12288 x 49152: failed. RankFailedError: rank 1: killed by SIGKILL" in words
    )
    assert "gemm_rs 4096 x 12288 x 49152: skipped. not started: --budget was used up" in words
    assert "peer te_userbuffers: RuntimeError: <none>" in words
    assert "10 of 12" in words


def test_page_without_results_says_not_yet_measured() -> None:
    made = document(timeline=None)
    for entry in made["entries"]:
        entry["status"] = "pending"
        entry.pop("result", None)
    words = "".join(Elements(render(made)).text)
    assert "0 of 12" in words
    assert "not yet measured" in words


@pytest.mark.parametrize("groups", [1, 3])
def test_charts_omit_negative_ect_and_undefined_ratios(groups: int) -> None:
    """A call that noise makes faster than its GEMM, and shapes where nothing is communicated."""
    one = suite_data.figures(0.9, 1.0, 0.0, 1.0)
    assert one["ect_ms"] < 0 and one["overlap_efficiency"] is None
    entry = results.SuiteEntry(
        "shape", "ag_gemm", 64, 1, 1, result={"methods": {"unfused": one, "flux": one}}
    )
    drawn = charts.shape_groups([entry] * groups)
    assert str(charts.stacked_bars(drawn, "t")).count('class="gemm"') == 2 * groups
    assert 'class="ect"' not in charts.stacked_bars(drawn, "t")
    assert charts.efficiency(drawn, "t").count("none") == groups


# -- the timeline ----------------------------------------------------------------------------------


def test_the_timeline_has_a_row_for_each_lane_and_a_box_for_each_event() -> None:
    events = suite_data.events(ranks=3, tiles=4)
    drawn = timeline.timeline(events)
    seen = Elements(drawn)
    lanes = [(one["data-rank"], one["data-lane"]) for one in seen.of_class("g", "lane")]
    assert lanes == [(str(r), lane) for r in range(3) for lane in ("main", "copy", "gemm")]
    assert len(seen.of_class("g", "event")) == len(events)
    waits = [event for event in events if event.kind in timeline.WAITS]
    assert len(seen.of_class("rect", "stripes")) == len(waits) > 0
    for event in events:
        assert timeline.describe(event) in "".join(seen.text)


def test_boxes_lie_where_their_times_are() -> None:
    events = [
        Event(0, "gemm", Kind.gemm, "first", 10.0, 20.0),
        Event(0, "gemm", Kind.wait, "waits for <tile> & more", 30.0, 60.0, {"tile": 3}),
        Event(0, "gemm", Kind.gemm, "too short to see", 90.0, 0.0),
    ]
    drawn = timeline.timeline(events)
    boxes = [
        (float(x), float(wide))
        for x, wide in re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', drawn)
    ]
    (first, one), (second, two), (third, least) = boxes
    assert one / two == pytest.approx(20 / 60, rel=1e-2)
    assert second - first == pytest.approx(one, abs=0.02)
    assert third - second == pytest.approx(two, abs=0.02)
    assert least > 0
    assert "waits for &lt;tile&gt; &amp; more" in drawn
    assert timeline.longest_waits(events)[0].startswith("rank 0, gemm: waits for <tile>")
    assert timeline.lane_rows(events) == [("0", "gemm", "3", "20.0", "1", "60.0")]


def test_timeline_without_events_says_so() -> None:
    assert "No timeline" in timeline.timeline([])


def test_grid_lines_are_round() -> None:
    assert svg.steps(0.0, 1.06) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert len(svg.steps(-1.0, 1.3, 7)) <= 8
    assert svg.steps(0.0, 0.0) == [0.0]


# -- the document ----------------------------------------------------------------------------------


def test_documents_are_read_as_they_were_written(tmp_path: Path) -> None:
    made = document()
    target = tmp_path / "folder" / "results.json"
    results.save(results.from_json(made), target)
    again = results.load(target)
    assert again.peers == made["peers"]
    assert again.timeline == results.CallTimeline("one <call>", suite_data.events())
    results.save(again, target)
    assert results.load(target) == again
    assert list(target.parent.iterdir()) == [target], "no temporary file is left"


RESULT = ("entries", 0, "result")
FLUX = (*RESULT, "methods", "flux")
FIRST_EVENT = ("timeline", "events", 0)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("format",), None, "not results of `flux bench suite --json`"),
        (("version",), 99, "version: expected 1, got 99"),
        (("entries",), None, "entries: expected a list, got None"),
        (("entries", 0, "status"), "fine", "entries[0].status"),
        (RESULT, None, "entries[0].result: expected an object, got None"),
        ((*RESULT, "m"), 1, "entries[0].result.m: expected 64, got 1"),
        ((*FLUX, "overall_ms"), "<b>", "overall_ms: expected a number or null, got '<b>'"),
        ((*FLUX, "ect_ms"), ..., "methods.flux.ect_ms: expected a number or null, got 'nothing'"),
        ((*FLUX, "repeats_ms"), ["1"], "flux.repeats_ms: expected times, got ['1']"),
        (
            (*FLUX, "overlap_efficiency_interval"),
            [1],
            "overlap_efficiency_interval: expected two numbers or null, got [1]",
        ),
        ((*FIRST_EVENT, "lane"), ..., "timeline.events[0].lane: expected a str"),
        ((*FIRST_EVENT, "kind"), "sleep", "timeline.events[0].kind"),
    ],
)
def test_foreign_and_damaged_documents_are_refused(
    path: tuple[Any, ...], value: Any, words: str, tmp_path: Path
) -> None:
    made: Any = document()
    inner = made
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    if value is ...:
        del inner[path[-1]]
    target = tmp_path / "results.json"
    for damaged in (made, [made]):
        target.write_text(json.dumps(damaged))
        with pytest.raises(ValueError, match=re.escape(words)) as caught:
            results.load(target)
        assert str(target) in str(caught.value)
        words = "not results of `flux bench suite --json`"


@pytest.mark.parametrize("text", ["", "{", "[1, NaN]", "\x00", "[" * 100_000])
def test_invalid_json_is_refused(text: str, tmp_path: Path) -> None:
    target = tmp_path / "results.json"
    target.write_text(text)
    with pytest.raises(ValueError, match="damaged, or not JSON"):
        results.load(target)


def test_csv_has_all_methods_and_all_reasons() -> None:
    import csv

    made = document()
    rows = list(csv.DictReader(results.to_csv(results.from_json(made)).splitlines()))
    done = [row for row in rows if row["status"] == "done"]
    for row, (name, one) in zip(done, methods_of(made, ALL), strict=True):
        assert row["method"] == name
        for key in ("overall_ms", "ect_ms", "overlap_efficiency"):
            assert row[key] == ("" if one[key] is None else str(one[key]))
    assert [row["status"] for row in rows if row["status"] in ("failed", "skipped")] == [
        "skipped",
        "failed",
    ]
    (absent,) = [row for row in rows if row["status"] == "absent"]
    assert absent["method"] == "te_userbuffers" and "RuntimeError" in absent["note"]


# -- in a browser ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("browser")
@pytest.mark.parametrize("arguments", [(), ("--open", "--dark")], ids=["as it is", "all opened"])
def test_a_browser_shows_the_page(arguments: tuple[str, ...], tmp_path: Path) -> None:
    made = document()
    path = tmp_path / "page.html"
    path.write_text(render(made), encoding="utf-8")
    selectors = ("g.bar", "g.dot", "tr.figures", "tr.peer", "g.event", "rect.stripes", "script")
    seen = open_page(path, *selectors, *arguments)
    every = methods_of(made, ALL)
    events = suite_data.events()
    assert seen["counts"] == {
        "g.bar": len(every),
        "g.dot": len([n for n, _ in methods_of(made, (results.SHAPE,)) if n != "unfused"]),
        "tr.figures": len(every),
        "tr.peer": len(suite_data.ABSENT),
        "g.event": len(events),
        "rect.stripes": len([event for event in events if event.kind in timeline.WAITS]),
        "script": 0,
    }
    assert seen["messages"] == [], "no script error, nothing that the page's own policy forbids"
    assert [url for url in seen["requests"] if not url.startswith("data:")] == [path.as_uri()]
    for width, view in seen["widths"].items():
        assert view["inner"] == int(width)
        assert view["scroll"] <= view["inner"], (width, view)
        assert view["wide"] == [], (width, view)
    ground = [int(part) for part in re.findall(r"\d+", seen["ground"])]
    assert (max(ground) < 64) if "--dark" in arguments else (min(ground) > 192)
    assert seen["title"] == "flux bench suite: Invented GPU"
    assert "Not measured, or not right" in seen["text"]


@pytest.mark.usefixtures("browser")
def test_browser_reports_errors_of_a_damaged_page(tmp_path: Path) -> None:
    """Without this check the test above could pass on any page."""
    path = tmp_path / "page.html"
    path.write_text(
        "<!doctype html><title>t</title><body><div style='width:900px'>wide</div>"
        "<img src='http://127.0.0.1:9/x.png'><script>throw new Error('broken')</script></body>"
    )
    seen = open_page(path, "div")
    assert any("broken" in message for message in seen["messages"])
    assert any("127.0.0.1" in url for url in seen["requests"])
    assert seen["widths"]["400"]["scroll"] > 400
    assert any("DIV" in one for one in seen["widths"]["400"]["wide"])
    assert seen["widths"]["1280"]["wide"] == []


def test_documents_are_not_changed_by_being_shown() -> None:
    made = document()
    before = copy.deepcopy(made)
    render(made)
    results.to_csv(results.from_json(made))
    assert made == before


@pytest.mark.parametrize("repeats", [None, [], [0.0] * 6])
def test_page_renders_when_repeats_give_no_interval(repeats: list[float] | None) -> None:
    document = suite_data.document()
    for entry in document["entries"]:
        for method in entry.get("result", {}).get("methods", {}).values():
            method.pop("repeats_ms", None)
            if repeats is not None:
                method["repeats_ms"] = repeats
    results.check(document)
    assert "</svg>" in render(document)
