"""Plots of a comparison as SVG that stands in a page: its colours are the page's, and nothing is fetched.

Names used: ``matplotlib.figure.Figure``, ``matplotlib.rc_context`` (public; matplotlib 3.9 to 3.11). No pyplot, so no
window and no global figure. Colours are drawn as marks that are replaced by the page's CSS variables, so that one
picture serves light and dark; the text stays text.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import math
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, Final

from gpu_timed.arms import Arm, Comparison
from gpu_timed.errors import missing_extra
from gpu_timed.record import Missing
from gpu_timed.step_timeline import ProfiledSteps, spoken
from gpu_timed.views import drawing, words

INK: Final = "#010101"
_MUTED: Final = "#020202"
_GRID: Final = "#030303"
ARMS: Final = tuple(f"#0404{index:02x}" for index in range(1, 7))
_VARIABLES: Final = {INK: "ink", _MUTED: "muted", _GRID: "grid"} | {
    color: f"arm-{index}" for index, color in enumerate(ARMS)
}
_WIDE_IN: Final = 9.0
_NARROW_IN: Final = 3.8
_DOTS_PER_IN: Final = 72
_LOG_FROM: Final = 3.0
"""From which ratio of the arms' medians on their axis is logarithmic."""
_LEAST_WIDE: Final = 0.075
"""Which part of the axis a gap must have for a label."""
_LEAST_NARROW: Final = 0.2
_LETTERS_WIDE: Final = 110
"""Letters that would fit into the whole axis."""
_LETTERS_NARROW: Final = 45
_JITTER: Final = 0.618033988749895
_SETTINGS: Final = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "text.color": INK,
    "axes.edgecolor": _MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": _GRID,
    "text.parse_math": False,
    "text.usetex": False,
    "axes.formatter.useoffset": False,
}

Draw = Callable[[Any, bool], None]


def load() -> Any:
    """Return matplotlib.

    Raises:
        MissingExtraError: It is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise missing_extra("A page with plots", "matplotlib", "plots")
    return importlib.import_module("matplotlib")


def distribution(found: Comparison, name: str) -> str:
    """Return how the wall times of each arm are spread. *name* is unique in the page."""
    arms = [arm for arm in found.arms if len(arm.samples)]
    colors = _colors(found)
    medians = [arm.samples.typical(arm.samples.wall_ns) for arm in arms]
    logarithmic = max(medians) > _LOG_FROM * min(medians)
    scale, unit = _unit(min(medians))
    first, last = drawing.reach([arm.samples.wall_ns for arm in arms], medians, logarithmic=logarithmic)
    beyond = sum(not first <= one <= last for arm in arms for one in arm.samples.wall_ns)

    def draw(figure: Any, narrow: bool) -> None:  # noqa: FBT001
        axes = figure.subplots()
        for row, arm in enumerate(arms):
            color = colors[arm.name]
            dots = drawing.thinned([one for one in arm.samples.wall_ns if first <= one <= last])
            heights = [row + 0.5 * ((_JITTER * index) % 1) - 0.25 for index in range(len(dots))]
            axes.plot([one / scale for one in dots], heights, ".", color=color, alpha=0.35, markersize=4, mew=0)
            low, high = (drawing.quantile(arm.samples.wall_ns, part) / scale for part in (0.05, 0.95))
            middle = medians[row] / scale
            axes.plot([low, high], [row, row], color=color, linewidth=5, solid_capstyle="butt", alpha=0.8)
            axes.plot([middle, middle], [row - 0.3, row + 0.3], color=INK, linewidth=1.6)
            axes.annotate(
                words.duration(medians[row]), (middle, row - 0.33), ha="center", va="bottom", fontsize=9, color=INK
            )
        if logarithmic:
            axes.set_xscale("log")
            _plain_ticks(axes.xaxis)
        if first < last:
            axes.set_xlim(first / scale, last / scale)
        axes.set_ylim(len(arms) - 0.5, -0.75)  # the first on top
        axes.set_yticks(range(len(arms)), [_short(arm.name, narrow) for arm in arms])
        axes.tick_params(axis="y", length=0)
        label = f"wall time of a call, {unit}" + (" (logarithmic)" if logarithmic else "")
        if beyond:
            total = sum(len(arm.samples) for arm in arms)
            label += f"{chr(10) if narrow else '; '}{beyond:,} of {total:,} calls lie beyond the axis"
        axes.set_xlabel(label)
        axes.grid(visible=True, axis="x")

    said = "; ".join(f"{arm.name} {words.duration(held)}" for arm, held in zip(arms, medians, strict=True))
    return _both(name, f"Distribution of the wall times of each arm, medians: {said}", draw, 0.9 + 0.62 * len(arms))


def steps(found: Comparison, name: str) -> str:
    """Return when in a step the device worked, one row for each arm on one axis."""
    arms = [(arm, arm.timeline.typical) for arm in found.arms if isinstance(arm.timeline, ProfiledSteps)]
    colors = _colors(found)
    until = max(step.end_ns for _, step in arms)
    scale, unit = _unit(until)

    def draw(figure: Any, narrow: bool) -> None:  # noqa: FBT001
        bins = 90 if narrow else 220
        rows = figure.subplots(len(arms), 1, sharex=True, squeeze=False)[:, 0]
        width = until / bins / scale
        for axes, (arm, step) in zip(rows, arms, strict=True):
            shares = drawing.busy_shares(step, until, bins)
            edges = [index * width for index in range(bins + 1)]
            axes.stairs([100 * share for share in shares], edges, fill=True, color=colors[arm.name], linewidth=0)
            axes.axvline(step.end_ns / scale, color=_MUTED, linewidth=1, linestyle=(0, (2, 2)))
            axes.set_ylim(0, 100)
            axes.set_yticks([0, 100], ["0", "100 %"])
            axes.set_title(f"{_short(arm.name, narrow)}: {words.duration(step.busy_ns)} busy of {_spent(step)}")
        rows[-1].set_xlim(0, until / scale)
        rows[-1].set_xlabel(f"since the host began the step, {unit}")

    said = "; ".join(f"{arm.name} worked {words.duration(step.busy_ns)} of {_spent(step)}" for arm, step in arms)
    return _both(name, f"When the device worked in one profiled step: {said}", draw, 0.6 + 0.95 * len(arms))


def stretches(found: Comparison, name: str) -> str:
    """Return a typical stretch of each arm's step, kernel by kernel; empty where no arm has gaps."""
    held = [
        (arm, arm.timeline, stretch)
        for arm in found.arms
        if isinstance(arm.timeline, ProfiledSteps) and (stretch := drawing.typical_stretch(arm.timeline)) is not None
    ]
    if not held:
        return ""
    colors = _colors(found)

    def draw(figure: Any, narrow: bool) -> None:  # noqa: FBT001
        rows = figure.subplots(len(held), 1, squeeze=False)[:, 0]
        for axes, (arm, seen, stretch) in zip(rows, held, strict=True):
            part = (drawing.typical_stretch(seen, drawing.AROUND_NARROW) if narrow else None) or stretch
            _stretch(axes, part, colors[arm.name], narrow=narrow)
            axes.set_title(f"{_short(arm.name, narrow)}: {len(part.kernels)} kernels", pad=16)
        rows[-1].set_xlabel("since the first of them began, µs")

    said = "; ".join(_stretch_words(arm, stretch) for arm, _, stretch in held)
    return _both(name, f"A typical stretch of a step, kernel by kernel: {said}", draw, 0.6 + 1.25 * len(held))


def curves(found: Comparison, name: str) -> str:
    """Return step time and busy ratio over what was swept."""
    values = [point.value for point in found.points]
    numeric = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    places = values if numeric else list(range(len(values)))
    colors = _colors(found.points[0].comparison)
    times: dict[str, list[float]] = {arm: [] for arm in colors}
    ratios: dict[str, list[float]] = {arm: [] for arm in colors}
    for point in found.points:
        for arm in colors:
            times[arm].append(_median_ns(point.comparison, arm))
            ratios[arm].append(_busy_percent(point.comparison, arm))
    known_times = [height for heights in times.values() for height in heights if not math.isnan(height)]
    scale, unit = _unit(min(known_times, default=1e6))
    times = {arm: [height / scale for height in heights] for arm, heights in times.items()}
    known = not all(math.isnan(height) for heights in ratios.values() for height in heights)
    spread = numeric and min(places) > 0 and max(places) > _LOG_FROM * min(places)

    def draw(figure: Any, narrow: bool) -> None:  # noqa: FBT001
        shown = [(times, f"wall time of a call, {unit}"), (ratios, "busy ratio, %")][: 2 if known else 1]
        grid = figure.subplots(*((len(shown), 1) if narrow else (1, len(shown))), squeeze=False)
        for axes, (lines, title) in zip(grid.flat, shown, strict=True):
            for arm, heights in lines.items():
                if not all(map(math.isnan, heights)):
                    axes.plot(places, heights, "o-", color=colors[arm], label=_short(arm, narrow), markersize=4)
            if spread:
                axes.set_xscale("log", base=2)
            axes.set_xticks(places, [str(value) for value in values])
            axes.minorticks_off()
            axes.set_ylim(0, 105 if lines is ratios else None)
            axes.set_xlabel(found.sweep)
            axes.set_title(title)
            axes.grid(visible=True)
        grid.flat[0].legend(frameon=False, loc="best", labelcolor=INK)

    said = "; ".join(
        f"{arm}: " + ", ".join(f"{value} {held:.4g} {unit}" for value, held in zip(values, heights, strict=True))
        for arm, heights in times.items()
        if not any(map(math.isnan, heights))
    )
    return _both(
        name,
        f"Wall time and busy ratio over {found.sweep}. Wall times: {said}",
        draw,
        3.0,
        narrow_in=5.2 if known else 2.8,
    )


def _stretch(axes: Any, stretch: drawing.Stretch, color: str, *, narrow: bool) -> None:
    lanes = {stream: lane for lane, stream in enumerate(stretch.streams)}
    bottom = len(lanes) - 0.5

    def at(nanoseconds: int) -> float:
        return (nanoseconds - stretch.start_ns) / 1e3

    length = at(stretch.end_ns)
    for gap in stretch.gaps:
        axes.axvspan(at(gap.start_ns), at(gap.end_ns), facecolor=_GRID, edgecolor="none", alpha=0.7)
        wide = gap.duration_ns / 1e3 / length
        if wide < (_LEAST_NARROW if narrow else _LEAST_WIDE):
            continue
        middle = (at(gap.start_ns) + at(gap.end_ns)) / 2
        axes.text(middle, bottom / 2 - 0.25, words.duration(gap.duration_ns), ha="center", va="center", fontsize=8)
        if gap.operator:
            most = max(4, int((_LETTERS_NARROW if narrow else _LETTERS_WIDE) * wide))
            label = _cut(spoken(gap.operator).removeprefix("aten::"), most)
            axes.text(middle, -0.56, label, ha="center", va="bottom", fontsize=8, color=_MUTED)
    for kernel in stretch.kernels:
        if kernel.stream in lanes:
            box = [(at(kernel.start_ns), kernel.duration_ns / 1e3)]
            axes.broken_barh(box, (lanes[kernel.stream] - 0.36, 0.72), facecolor=color, linewidth=0)
    axes.set_xlim(0, length)
    axes.set_ylim(bottom, -0.5)
    axes.set_yticks(list(lanes.values()), [f"stream {stream}" for stream in lanes])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _stretch_words(arm: Arm, stretch: drawing.Stretch) -> str:
    if not stretch.gaps:
        return f"{arm.name} without gaps"
    longest = max(stretch.gaps, key=lambda gap: gap.duration_ns)
    waiting = f" before {spoken(longest.operator)}" if longest.operator else ""
    return f"{arm.name} with {len(stretch.gaps)} gaps, the longest of {words.duration(longest.duration_ns)}{waiting}"


def _both(name: str, label: str, draw: Draw, height_in: float, *, narrow_in: float | None = None) -> str:
    """Return the plot twice: for a wide page, and for a small screen, of which the page shows one."""
    wide = _svg(f"{name}-wide", label, draw, _WIDE_IN, height_in, narrow=False)
    narrow = _svg(f"{name}-narrow", label, draw, _NARROW_IN, narrow_in or 1.1 * height_in, narrow=True)
    return f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'


def _svg(name: str, label: str, draw: Draw, width_in: float, height_in: float, *, narrow: bool) -> str:
    matplotlib = load()
    figures: Any = importlib.import_module("matplotlib.figure")
    with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": name}):
        figure = figures.Figure(figsize=(width_in, height_in), layout="constrained")
        draw(figure, narrow)
        held = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(held, format="svg", transparent=True, dpi=_DOTS_PER_IN, metadata=nothing)
    return _inline(held.getvalue(), name, label)


def _inline(text: str, name: str, label: str) -> str:
    """Return the ``<svg>`` element alone, as wide as its place, with the page's colours and ids of its own."""
    svg = text[text.index("<svg") :].strip()
    head, rest = svg.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    opening = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" role="img" '
        f'aria-label="{escape(label)}" {box[0] if box else ""}>'
    )
    rest = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", rest)
    rest = re.sub(r"<metadata>.*?</metadata>", "", rest, flags=re.DOTALL)
    for color, variable in _VARIABLES.items():
        rest = rest.replace(color, f"var(--{variable})")
    return opening + rest


def _colors(found: Comparison) -> dict[str, str]:
    return {arm.name: ARMS[index % len(ARMS)] for index, arm in enumerate(found.arms)}


def _unit(nanoseconds: float) -> tuple[float, str]:
    for size, unit in ((1e9, "s"), (1e6, "ms")):
        if nanoseconds >= size:
            return size, unit
    return 1e3, "µs"


def _plain_ticks(axis: Any) -> None:
    ticker: Any = importlib.import_module("matplotlib.ticker")
    axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(ticker.NullLocator())


def _short(text: str, narrow: bool) -> str:  # noqa: FBT001
    return _cut(text, 16 if narrow else 30)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _spent(step: Any) -> str:
    return words.duration(step.end_ns)


def _median_ns(found: Comparison, name: str) -> float:
    held = next((arm.samples for arm in found.arms if arm.name == name and len(arm.samples)), None)
    return math.nan if held is None else held.typical(held.wall_ns)


def _busy_percent(found: Comparison, name: str) -> float:
    held = found.diagnoses.get(name)
    return math.nan if held is None or isinstance(held.busy_ratio, Missing) else 100 * held.busy_ratio


def drawable(found: Comparison) -> Sequence[str]:
    """Return which plots *found* has figures for: ``distribution``, ``steps``, ``stretches``, ``curves``."""
    timelines = [arm.timeline for arm in found.arms if isinstance(arm.timeline, ProfiledSteps)]
    return [
        *(["distribution"] if any(len(arm.samples) for arm in found.arms) else []),
        *(["steps"] if any(seen.typical.kernels for seen in timelines) else []),
        *(["stretches"] if any(seen.typical.gaps for seen in timelines) else []),
        *(["curves"] if len(found.points) > 1 else []),
    ]
