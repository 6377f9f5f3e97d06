"""Views of a comparison: nothing is shown that was not found, nor lost in JSON, and nothing a user named is markup."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import re
import statistics
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import make_believe_comparison as believe
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from gpu_timed.analysis.concluding import conclude
from gpu_timed.analysis.timeline import HostSpan, summarised, timelines
from gpu_timed.arms import Agreement, Comparison, Diagnosis, Point, Samples, Verdict, not_measured
from gpu_timed.errors import MissingExtraError
from gpu_timed.record import Missing
from gpu_timed.step_timeline import Kernel, OperatorGaps, ProfiledSteps, StepTimeline
from gpu_timed.views import drawing, page, plots, table, words

COMPARISONS = {
    "three arms": lambda: believe.comparison(kernels=60),
    "no device": believe.host_only,
    "refused": believe.refused,
    "sweep": lambda: believe.swept(kernels=40),
    "sweep of names": lambda: dataclasses.replace(
        believe.swept((1, 8), kernels=40),
        points=tuple(
            point._replace(value=name)
            for point, name in zip(believe.swept((1, 8), kernels=40).points, (believe.EVIL, "b"), strict=True)
        ),
    ),
}
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
PLAIN = {ord("\N{MULTIPLICATION SIGN}"): "x", ord("\N{EN DASH}"): "-"}
EMPTY = {"meta", "br", "hr", "img", "link", "input"}


@pytest.fixture(params=COMPARISONS, scope="module")
def found(request: pytest.FixtureRequest) -> Comparison:
    """One comparison of each kind."""
    return COMPARISONS[request.param]()


# -- plain data


def test_json_is_strict_and_says_all_that_is_in_the_nouns(found: Comparison) -> None:
    def none(word: str) -> None:
        raise AssertionError(word)

    plain = json.loads(found.to_json(), parse_constant=none)
    assert plain["schema"] == 1
    assert {field.name for field in dataclasses.fields(Comparison)} <= set(plain)
    for arm, held in zip(found.arms, plain["arms"], strict=True):
        assert {field.name for field in dataclasses.fields(arm)} == set(held)
        assert held["samples"]["wall_ns"] == list(arm.samples.wall_ns)
    assert [one["word"] for one in plain["verdicts"]] == [one.word for one in found.verdicts]
    assert [one["comparison"]["name"] for one in plain["points"]] == [one.comparison.name for one in found.points]


def test_what_was_not_measured_is_no_number_in_json() -> None:
    plain = believe.host_only().to_dict()
    assert plain["arms"][0]["samples"]["device_ns"] == {"missing": "no_device", "detail": ""}
    assert plain["arms"][0]["timeline"]["detail"] == "torch finds no CUDA device"
    infinite = Verdict(arm="a", against="b", word=None, reason="", ratio=float("inf"))
    held = dataclasses.replace(believe.refused(), verdicts=(infinite,))
    assert json.loads(held.to_json())["verdicts"][0]["ratio"] == {"missing": "not_finite", "detail": "inf"}


def test_the_kernels_of_the_typical_step_come_back_from_json() -> None:
    found = believe.comparison(kernels=60)
    seen = found.arms[0].timeline
    assert not isinstance(seen, Missing)
    held = json.loads(found.to_json())["arms"][0]["timeline"]
    texts, columns = held["typical"]["texts"], held["typical"]["columns"]
    rows = [dict(zip(columns, row, strict=True)) for row in held["typical"]["rows"]]
    again = [Kernel(**{**row, **{name: texts[row[name]] for name in ("name", "operator", "within")}}) for row in rows]
    assert tuple(again) == seen.typical.kernels
    assert len(held["steps"]) == len(seen.steps)
    assert held["busy_ns"] == seen.busy_ns


def test_a_swept_value_that_json_has_no_word_for_is_shown_by_its_repr() -> None:
    held = believe.swept((1,), kernels=10)
    held = dataclasses.replace(held, points=(held.points[0]._replace(value={"a": 1 + 2j}),))
    assert held.to_dict()["points"][0]["value"] == {"a": "(1+2j)"}


# -- words


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("faster", "a is faster than b, 2 x as fast: it takes 0.5 x b's wall time (99 % interval 0.49 to 0.51)."),
        ("same", "a is as fast as b: it takes 0.5 x b's wall time (99 % interval 0.49 to 0.51)."),
        (
            "ambiguous",
            "It cannot be told whether a or b is faster: a takes 0.5 x b's wall time (99 % interval 0.49 to 0.51); no.",
        ),
        (None, "No verdict on a: no."),
    ],
)
def test_a_verdict_is_a_sentence(word: Any, said: str) -> None:
    verdict = Verdict(arm="a", against="b", word=word, reason="no", ratio=0.5, low=0.49, high=0.51, level=0.99)
    assert words.sentence(verdict).translate(PLAIN) == said


def test_the_ratio_says_of_which_time_it_is() -> None:
    held = believe.comparison(kernels=20)
    device = dataclasses.replace(held, verdicts=(dataclasses.replace(held.verdicts[0], quantity="device"),))
    hints = [next(row.hint for row in words.rows(one) if row.name == words.RATIO) for one in (held, device)]
    assert [hint.partition(" ")[0] for hint in hints] == ["Wall", "Device"]


def test_a_wide_interval_is_said_in_place_of_a_ratio() -> None:
    wide = Verdict(arm="compile", against="eager", word="slower", reason="", ratio=85.21, low=9.624, high=754.5)
    held = dataclasses.replace(believe.host_only(), baseline="eager", verdicts=(wide,))
    arms = tuple(dataclasses.replace(arm, name=name) for arm, name in zip(held.arms, ("eager", "compile"), strict=True))
    held = dataclasses.replace(held, arms=arms)
    said = "compile is slower than eager: it takes 9.6 to 750 x eager's wall time (95 % interval: it is wide)."
    assert [one.translate(PLAIN) for one in words.headline(held)] == [said]
    assert "85.2" not in held.to_text()
    assert next(row.cells for row in words.rows(held) if row.name == words.RATIO) == ("1", "9.6 to 750")
    faster = dataclasses.replace(wide, word="faster", ratio=0.05, low=0.01, high=0.1)
    assert "as fast" not in words.sentence(faster)


def test_times_are_those_of_a_typical_block() -> None:
    """One block with many short calls, two with few long ones: blocks count alike, as in the ratio."""
    samples = Samples(block=(0, 0, 0, 0, 1, 2), wall_ns=(1, 1, 1, 1, 7_000, 9_000), launch_ns=(1, 1, 1, 1, 600, 700))
    assert samples.block_medians(samples.wall_ns) == [1, 7_000, 9_000]
    held = believe.host_only()
    held = dataclasses.replace(held, arms=tuple(dataclasses.replace(arm, samples=samples) for arm in held.arms))
    rows = {row.name: row.cells for row in words.rows(held)}
    assert rows["wall"] == ("7.00 µs", "7.00 µs")
    assert "7.00 µs in place of 7.00 µs" not in words.headline(held)[0]  # of an open one nothing but the interval
    told = dataclasses.replace(held.verdicts[0], word="faster")
    assert "7.00 µs in place of 7.00 µs" in words.headline(dataclasses.replace(held, verdicts=(told,)))[0]


def test_without_a_device_that_is_said_once_and_nothing_that_says_nothing() -> None:
    held = believe.host_only()
    why = "this build of torch has no CUDA"
    unknown = Diagnosis(bound="unknown", sentences=(f"No device time was measured ({why}).",))
    arms = tuple(
        dataclasses.replace(arm, samples=dataclasses.replace(arm.samples, device_ns=Missing("no_device", why)))
        for arm in held.arms
    )
    held = dataclasses.replace(held, arms=arms, diagnoses={arm.name: unknown for arm in arms})
    swept = Comparison(name="x", arms=(), baseline="mine", sweep="n", points=(Point(1, held), Point(2, held)))
    for found in (held, swept):
        text = found.to_text(300)
        assert text.count(why) == 1
        assert text.count("what limits") == 1
        assert "Device: between" not in text
        assert "kernel records" not in text
    assert {row.name for row in words.rows(held)}.isdisjoint({"launch", "device", "bound"})
    assert words.swept_names(swept) == ("wall", "verdict", "\N{MULTIPLICATION SIGN} baseline's time")
    assert words.swept_names(believe.swept((1,), kernels=20)) == words.SWEPT
    assert words.without_device(believe.comparison(kernels=20)) == ""
    assert words.TIMES in words.honesty(believe.comparison(kernels=20))


def test_what_is_said_at_every_value_of_a_sweep_is_said_once() -> None:
    pytest.importorskip("matplotlib")
    swept = believe.swept((1, 8), kernels=20)
    fell = words.headline(swept.points[0].comparison)[1]
    assert words.everywhere(swept)[0] == fell
    for text in (swept.to_text(300), page.html(swept)):
        assert text.count(fell) == 1
        assert "At every batch" in text
    assert words.everywhere(believe.swept((1,), kernels=20)) == ()


def test_an_arm_that_strayed_has_its_fallback_told_once() -> None:
    held = believe.comparison(kernels=20)
    strayed = "it ran as eager after a while: torch skipped CUDA Graphs: a mutated input"
    arm = dataclasses.replace(held.arms[2], strayed=strayed)
    verdict = conclude(arm, held.arms[0], None, quantity="wall")
    assert verdict.reason == strayed
    held = dataclasses.replace(held, arms=(*held.arms[:2], arm), verdicts=(held.verdicts[0], verdict))
    assert held.to_text(300).count("a mutated input") == 1


def test_how_long_it_took_is_told_apart_from_compiling() -> None:
    def said(**more: Any) -> str:
        return dict(words.conditions(dataclasses.replace(believe.host_only(), **more)))["measured"]

    found = said(seconds=15.0, blocks_s=6.04, first_calls_s=8.4, blocks=20, stopped="enough")
    assert found == "20 shuffled blocks (seed 0) in 6.0 s, after 8.4 s of first calls; enough"
    assert said(blocks=1).startswith("1 shuffled block (")


def test_what_is_slower_is_not_said_to_be_so_many_times_as_fast() -> None:
    verdict = Verdict(arm="a", against="b", word="slower", reason="", ratio=1.02, low=1.01, high=1.03)
    assert words.sentence(verdict).startswith("a is slower than b: it takes 1.02")
    assert "as fast" not in words.sentence(verdict)


@pytest.mark.parametrize(
    ("nanoseconds", "said"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1_234, "1.23 µs"),
        (999_700, "1.00 ms"),
        (21_700_000, "21.7 ms"),
        (123_456_789_000, "123 s"),
    ],
)
def test_times_have_three_digits_and_a_unit(nanoseconds: int, said: str) -> None:
    assert words.duration(nanoseconds) == said


def test_a_figure_that_no_arm_has_is_left_out_and_a_missing_one_has_its_reason() -> None:
    rows = {
        row.name: tuple(cell.translate(PLAIN) for cell in row.cells)
        for row in words.rows(believe.comparison(kernels=30))
    }
    assert rows["kernels a call"] == ("30", "30", "- (not_profiled)")
    assert rows["ran as"] == ("-", "-", "eager, not reduce-overhead")
    assert rows["pays after"][1] == "32 calls"
    assert rows["outputs"][:2] == ("equal to the bit", "equal (by 0.002)")
    assert rows["waited most for"][1] == "nobody: the gaps are the device's own"
    without = {row.name for row in words.rows(believe.host_only())}
    assert without.isdisjoint({"device", "busy", "kernels a call", "ran as", "pays after"})


def test_outputs_of_another_shape_differ_by_nothing_that_could_be_said_and_have_no_ratio() -> None:
    held = believe.host_only()
    arms = (
        dataclasses.replace(held.arms[0], agreement=Agreement(equal=True, max_abs=2e-3)),
        dataclasses.replace(held.arms[1], agreement=Agreement(equal=False, max_abs=0.0, text="(3,) in place of (2,)")),
    )
    verdict = dataclasses.replace(held.verdicts[0], word=None)
    rows = {row.name: row.cells for row in words.rows(dataclasses.replace(held, arms=arms, verdicts=(verdict,)))}
    assert rows["outputs"] == ("equal (by 0.002)", "differ")
    assert rows[words.RATIO] == ("1", words.NONE)


def test_the_busy_ratio_says_what_it_is_made_of_wherever_it_is_shown() -> None:
    assert words.BUSY in words.honesty(believe.comparison(kernels=30))
    assert words.BUSY in words.honesty(believe.swept(kernels=30))
    assert words.BUSY not in words.honesty(believe.host_only())


# -- the table


def test_the_table_has_the_answer_before_the_figures(found: Comparison) -> None:
    text = found.to_text(120)
    for answer in words.headline(found):
        assert answer in text
    if found.name == "decode" and found.arms and not found.refused:
        assert text.index("is faster than") < text.index("wall") < text.index("The busy ratio is")


def test_a_terminal_that_knows_ascii_only_gets_ascii() -> None:
    held = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    table.show(Console(file=held, width=100), believe.comparison(kernels=30))
    held.flush()
    text = held.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert "x as fast" in text
    assert "17" in text
    assert "?" not in text


def test_markup_of_the_terminal_in_a_name_is_text() -> None:
    found = dataclasses.replace(believe.refused(), name="[bold]x[/bold]", refused="[red]no[/red]")
    assert "[bold]x[/bold]" in found.to_text()
    assert "[red]no[/red]" in found.to_text()


# -- the data frame


def test_the_data_frame_has_a_row_for_each_call() -> None:
    pandas = pytest.importorskip("pandas")
    found = believe.swept((1, 8), kernels=10)
    frame = found.to_pandas()
    assert list(frame.columns) == ["batch", "arm", "mode", "block", "wall_ns", "launch_ns", "device_ns"]
    assert len(frame) == 2 * 3 * 240
    one = frame[(frame["batch"] == 8) & (frame["arm"] == "cuda_graph")]
    assert one["wall_ns"].tolist() == list(found.points[1].comparison.arm("cuda_graph").samples.wall_ns)
    assert set(frame[frame["arm"] == "reduce-overhead"]["mode"]) == {"eager"}
    without = believe.host_only().to_pandas()
    assert without["device_ns"].isna().all()
    assert without["device_ns"].dtype == pandas.Int64Dtype()
    clash = dataclasses.replace(found, sweep="arm").to_pandas()
    assert list(clash["arm_"].unique()) == [1, 8]


@pytest.mark.parametrize(("package", "extra"), [("pandas", "pandas"), ("matplotlib", "plots")])
def test_a_package_that_is_missing_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str, extra: str
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == package else real(name, *more))
    found = believe.refused()
    with pytest.raises(MissingExtraError, match=re.escape(f"gpu-timed[{extra}]")):
        _ = found.to_pandas() if package == "pandas" else found.to_html(tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


# -- the page


class Balanced(HTMLParser):
    """Fails where an element is not closed in its place, and collects what a page could fetch."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.fetched: list[str] = []
        self.text: list[str] = []
        self.tags: set[str] = set()
        self.labels: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in EMPTY:
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), name
            if name == "id":
                self.ids.append(str(value))
            if name in ("src", "href", "xlink:href", "srcset", "data", "action", "poster") and value:
                self.fetched.append(value)
            if name == "aria-label":
                self.labels.append(str(value))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in EMPTY:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parsed(text: str) -> Balanced:
    """Return the page as a browser reads it, well-formed to its end."""
    held = Balanced()
    held.feed(text)
    held.close()
    assert held.open == []
    return held


@pytest.fixture(scope="module")
def html(found: Comparison) -> str:
    """The page of it."""
    pytest.importorskip("matplotlib")
    return page.html(found)


def test_the_page_is_well_formed_and_its_drawings_are_xml(html: str) -> None:
    held = parsed(html)
    assert len(held.ids) == len(set(held.ids))
    for drawing_ in re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL):
        ET.fromstring(drawing_)  # noqa: S314 - our own
    assert {"main", "h1", "title"} <= held.tags


def test_the_page_fetches_nothing_and_runs_nothing(html: str) -> None:
    held = parsed(html)
    assert [value for value in held.fetched if not value.startswith("#")] == []
    assert held.tags.isdisjoint({"script", "link", "iframe", "object", "embed", "img", "base", "form"})
    names = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # of namespaces: nobody fetches those
    assert set(re.findall(r"[a-z]+://[^\"'\s<)]*", html)) <= names
    assert "@import" not in html
    assert all(target.startswith("#") for target in re.findall(r"url\(\s*[\"']?([^)]*)", html))


def test_every_reference_inside_a_drawing_has_its_target(html: str) -> None:
    ids = set(parsed(html).ids)
    assert set(re.findall(r"(?:href=\"#|url\(#)([^\")]*)", html)) <= ids


def test_the_page_says_the_answer_and_what_the_figures_are(found: Comparison, html: str) -> None:
    text = " ".join(parsed(html).text)
    for said in [*words.honesty(found), *(value for _, value in words.conditions(found))]:
        assert said in text
    for one in [point.comparison for point in found.points] or [found]:
        for answer in words.headline(one):
            assert answer in text
    assert text.index((words.headline(found.points[0].comparison if found.points else found))[0]) < text.index(
        "What these figures are"
    )


def test_the_answer_comes_with_both_times_and_what_limits_the_baseline_before_the_plots() -> None:
    pytest.importorskip("matplotlib")
    held = believe.comparison(kernels=60)
    assert "as fast: 2.97 ms in place of 21.6 ms; it takes" in words.headline(held)[0]
    text = " ".join(parsed(page.html(held)).text)
    order = ["is faster than eager", "eager: launch-bound", "How long calls take", "cuda_graph: device-bound"]
    assert [text.index(one) for one in order] == sorted(text.index(one) for one in order)
    text = " ".join(parsed(page.html(believe.swept((1, 8), kernels=30))).text)
    order = [
        "batch = 1",
        "batch = 8",
        "Over batch",
        "batch = 1: what limits",
        "eager: launch-bound",
        "How long calls take",
    ]
    assert [text.index(one) for one in order] == sorted(text.index(one) for one in order)
    device = dataclasses.replace(held.verdicts[0], quantity="device")
    assert "2.95 ms in place of 21.5 ms" in words.headline(dataclasses.replace(held, verdicts=(device,)))[0]


def test_a_refusal_says_nothing_of_times_and_nothing_twice() -> None:
    held = believe.host_only()
    arms = tuple(dataclasses.replace(arm, samples=Samples(), refused=not_measured("eager")) for arm in held.arms)
    arms = (dataclasses.replace(arms[0], refused="boom"), *arms[1:])
    found = dataclasses.replace(held, arms=arms, baseline="eager", refused="boom", verdicts=(), diagnoses={}, notes=())
    assert list(words.troubles(found)) == []
    assert words.TIMES not in words.honesty(found)
    assert words.MEDIANS in words.honesty(held)
    assert words.MEDIANS not in words.honesty(dataclasses.replace(held, refused="boom"))
    other = (arms[0], dataclasses.replace(arms[1], refused="no memory"))
    assert list(words.troubles(dataclasses.replace(found, arms=other))) == [
        f"{arms[1].name} was not measured: no memory."
    ]
    fell = believe.comparison(kernels=30)
    verdict = dataclasses.replace(fell.verdicts[1], reason=f"it ran as eager: {fell.arms[2].reason}")
    assert list(words.troubles(fell))
    assert not list(words.troubles(dataclasses.replace(fell, verdicts=(fell.verdicts[0], verdict))))


def test_what_limits_all_arms_alike_is_said_once() -> None:
    held = believe.comparison(kernels=30)
    assert [heading for heading, _ in words.limits(held)] == ["eager: launch-bound", "cuda_graph: device-bound"]
    later = dataclasses.replace(held, baseline="cuda_graph")
    assert [heading for heading, _ in words.limits(later)] == ["cuda_graph: device-bound", "eager: launch-bound"]
    unknown = Diagnosis(bound="unknown", sentences=("No device.",))
    same = dataclasses.replace(held, diagnoses={"eager": unknown, "cuda_graph": unknown})
    assert list(words.limits(same)) == [("all arms: what limits is not known", ("No device.",))]
    cells = next(row.cells for row in words.rows(same) if row.name == "bound")
    assert cells[:2] == ("not known", "not known")


def test_names_of_arms_stay_whole_in_the_table_of_a_sweep() -> None:
    text = believe.swept(kernels=30).to_text(80)
    assert "reduce-overhead" in text[: text.index("batch = 1")]


def test_hashes_of_compiled_graphs_are_not_shown() -> None:
    pytest.importorskip("matplotlib")
    held = believe.comparison(kernels=60)
    name = f"## Call CompiledFxGraph f{'abcde2' * 8} ##"
    seen = held.arms[0].timeline
    assert isinstance(seen, ProfiledSteps)
    seen = dataclasses.replace(seen, operators=(OperatorGaps(name, name, 1, 900_000, 900_000),))
    arms = (dataclasses.replace(held.arms[0], timeline=seen), *held.arms[1:])
    found = dataclasses.replace(held, arms=arms)
    assert "a compiled graph of torch (fabcde) (1 gap)" in " ".join(found.to_text(300).split())
    for shown in (page.html(found), found.to_text(100)):
        assert "abcde2" not in shown
    assert name in found.to_json()


def test_a_terminal_has_sentences_that_go_on_below_themselves() -> None:
    held = believe.comparison(kernels=30)
    console = Console(file=io.StringIO(), width=60, force_terminal=True, color_system=None)
    table.show(console, held)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 60
    at = next(index for index, line in enumerate(lines) if line.startswith("    Launch-bound: the device"))
    assert lines[at + 1].startswith("    ")
    file = Console(file=io.StringIO(), width=60)
    table.show(file, held)
    assert words.headline(held)[0] in file.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_every_drawing_has_a_text_and_two_widths_and_the_pages_colours(html: str) -> None:
    held = parsed(html)
    drawings = re.findall(r"<svg(.*?)</svg>", html, flags=re.DOTALL)
    assert len(held.labels) == len(drawings)
    assert all(len(label) > 40 for label in held.labels)
    assert html.count('<div class="wide">') == html.count('<div class="narrow">') == len(drawings) / 2
    for one in drawings:
        assert "var(--" in one
        assert set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", one)) <= {"#ffffff"}


def test_names_with_markup_in_them_are_text() -> None:
    """Wherever a user, a driver or a runtime can put a text: names, reasons, operators, streams, notes, versions."""
    pytest.importorskip("matplotlib")
    evil = believe.EVIL
    held = believe.host_only()
    seen = believe.profile(30, 0.1, launch_us=20)
    named = tuple(one._replace(operator=evil, within=evil) for one in seen.operators)
    arms = (
        dataclasses.replace(held.arms[0], mode="eager", ran=evil, reason=evil, strayed=evil),
        dataclasses.replace(held.arms[1], refused=f"1 {evil}", timeline=dataclasses.replace(seen, operators=named)),
    )
    one = dataclasses.replace(
        held,
        arms=arms,
        notes=(evil,),
        diagnoses={evil: Diagnosis(bound="unknown", sentences=(evil,))},
        environment=dataclasses.replace(held.environment, card=evil, versions={evil: evil}),
    )
    swept = Comparison(name=evil, arms=(), baseline=evil, sweep=evil, points=(Point(evil, one), Point(2, one)))
    for found in (one, dataclasses.replace(one, refused=evil), swept):
        made = page.html(found)
        read = parsed(made)
        assert "script" not in read.tags
        assert "<script" not in made
        assert sum(text.count(evil) for text in read.text) >= 6


def test_a_large_comparison_is_a_small_page_and_says_what_was_thinned(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = believe.swept()
    many = believe.samples(21.7, 21.6, 21.4, count=20_000)
    points = tuple(
        point._replace(
            comparison=dataclasses.replace(
                point.comparison,
                arms=tuple(dataclasses.replace(arm, samples=many) for arm in point.comparison.arms),
            )
        )
        for point in found.points
    )
    path = dataclasses.replace(found, points=points).to_html(tmp_path / "page.html")
    assert path.stat().st_size < 5_000_000
    assert "400 drawn, evenly by rank" in path.read_text(encoding="utf-8")


# -- what is drawn


@st.composite
def steps(draw: st.DrawFn) -> StepTimeline:
    """A step with some kernels on two streams."""
    held = draw(
        st.lists(st.tuples(st.integers(0, 900), st.integers(1, 90), st.integers(0, 1)), min_size=1, max_size=30)
    )
    (step,) = timelines([Kernel(at, at + lasts, "k", stream=stream) for at, lasts, stream in held], [(0, 1000)])
    return step


@PATIENT
@given(steps(), st.integers(1, 50), st.integers(1_000, 3_000))
def test_the_drawn_shares_are_the_busy_time(step: StepTimeline, bins: int, until: int) -> None:
    shares = drawing.busy_shares(step, until, bins)
    assert len(shares) == bins
    assert all(0 <= share <= 1 for share in shares)
    assert sum(shares) * until / bins == pytest.approx(step.busy_ns)


def test_a_share_stands_where_the_work_was() -> None:
    (step,) = timelines([Kernel(10, 20, "k"), Kernel(35, 45, "k")], [(0, 50)])
    assert drawing.busy_shares(step, 60, 6) == pytest.approx([0, 1, 0, 0.5, 0.5, 0])


@PATIENT
@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=300), st.integers(2, 50))
def test_thinning_keeps_the_ends_and_the_shape(values: list[int], most: int) -> None:
    kept = drawing.thinned(values, most)
    assert len(kept) == min(len(values), most)
    assert (kept[0], kept[-1]) == (min(values), max(values))
    assert set(kept) <= set(values)


@PATIENT
@given(st.lists(st.integers(0, 10**9), min_size=2, max_size=50), st.sampled_from([5, 25, 50, 95]))
def test_quantiles_are_those_of_the_standard_library(values: list[int], percent: int) -> None:
    held = statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
    assert drawing.quantile(values, percent / 100) == pytest.approx(held)


def test_the_stretch_holds_a_typical_gap_with_what_is_around_it() -> None:
    seen = believe.profile(200, 0.5, launch_us=20)
    stretch = drawing.typical_stretch(seen)
    assert stretch is not None
    assert len(stretch.kernels) == 10
    assert isinstance(seen.gap_ns, int)
    assert min(abs(gap.duration_ns / seen.gap_ns - 1) for gap in stretch.gaps) < 0.1
    assert seen.operators[0].operator in {gap.operator for gap in stretch.gaps}
    # Of three operators the one most waited for has the short gaps; the one of 12 is nearer to the middle.
    starts = [0, 20, 40, 62, 150, 170, 190]
    late = [Kernel(at, at + 10, "k", launch=index + 1) for index, at in enumerate(starts)]
    calls = [HostSpan(at - 1, at, "call", 0, index + 1) for index, at in enumerate(starts)]
    around = [HostSpan(at - 2, at + 2, "rare" if at == 150 else "often", 0) for at in starts]
    (step,) = timelines(late, [(-5, 300)], calls=calls, operators=around)
    held = summarised([step], "kineto")
    often = dataclasses.replace(held, operators=held.operators[::-1], gap_ns=10)
    assert [one.operator for one in often.operators] == ["often", "rare"]
    chosen = drawing.typical_stretch(often, (1, 1))
    assert chosen is not None
    assert [gap.duration_ns for gap in chosen.gaps] == [10]
    rare = drawing.typical_stretch(dataclasses.replace(held, gap_ns=12), (1, 1))
    assert rare is not None
    assert [(gap.duration_ns, gap.operator) for gap in rare.gaps] == [(78, "rare")]
    # Where hardly any gap waited for the host the typical one is among all of them.
    few = drawing.typical_stretch(dataclasses.replace(held, operators=held.operators[:1], gap_ns=12), (1, 1))
    assert few is not None
    assert [gap.duration_ns for gap in few.gaps] == [12]
    dense = timelines([Kernel(at, at + 10, "k", launch=1) for at in range(0, 100, 10)], [(0, 100)])
    assert drawing.typical_stretch(summarised(dense, "kineto")) is None


def test_outliers_do_not_crush_the_dots_and_are_counted() -> None:
    pytest.importorskip("matplotlib")
    held = believe.host_only()
    wall = tuple(range(20_000_000, 22_400_000, 10_000))
    calm = Samples(block=(0,) * len(wall), wall_ns=wall, launch_ns=wall)
    even = dataclasses.replace(held, arms=tuple(dataclasses.replace(arm, samples=calm) for arm in held.arms))
    assert "lie beyond" not in page.html(even)
    jumped = dataclasses.replace(calm, wall_ns=(*wall[:-1], 900_000_000))
    low, high = drawing.reach([jumped.wall_ns], [21.2e6], logarithmic=False)
    assert 19.7e6 < low < 20e6
    assert 22.4e6 < high < 22.8e6
    shown = page.html(dataclasses.replace(even, arms=(dataclasses.replace(even.arms[0], samples=jumped), even.arms[1])))
    assert "1 of 480 calls lie beyond the axis" in shown
    low, high = drawing.reach([[10] * 50 + [1000] * 50, [10**9]], [10, 10**6], logarithmic=True)
    assert 1 < low < 10
    assert high > 10**9
    assert drawing.reach([[7]], [7], logarithmic=False) == (7, 7)


def test_curves_have_the_unit_of_their_values() -> None:
    pytest.importorskip("matplotlib")
    swept = believe.swept((1, 8), kernels=20)
    assert "wall time of a call, ms" in plots.curves(swept, "a")
    short = Samples(block=(0, 1), wall_ns=(12_300, 12_300), launch_ns=(12_300, 12_300))
    points = tuple(
        point._replace(
            comparison=dataclasses.replace(
                point.comparison,
                arms=tuple(dataclasses.replace(arm, samples=short) for arm in point.comparison.arms),
            )
        )
        for point in swept.points
    )
    drawn = plots.curves(dataclasses.replace(swept, points=points), "a")
    assert "wall time of a call, µs" in drawn
    assert "1 12.3 µs, 8 12.3 µs" in drawn


def test_the_table_of_a_sweep_can_be_stacked_on_a_small_screen() -> None:
    pytest.importorskip("matplotlib")
    made = page.html(believe.swept((1, 8), kernels=20))
    table_ = made[made.index('<table class="stacked">') :]
    table_ = table_[: table_.index("</table>")]
    names = re.findall(r'data-name="([^"]*)"', table_)
    assert [unescape(name) for name in names[: len(words.SWEPT) + 2]] == ["batch", "arm", *words.SWEPT]
    assert table_.count("<td ") == table_.count("<td")
    assert "content: attr(data-name)" in made


def test_samples_may_be_few_and_equal() -> None:
    pytest.importorskip("matplotlib")
    held = believe.host_only()
    one = Samples(block=(0,), wall_ns=(1000,), launch_ns=(900,))
    made = dataclasses.replace(held, arms=tuple(dataclasses.replace(arm, samples=one) for arm in held.arms))
    parsed(page.html(made))
