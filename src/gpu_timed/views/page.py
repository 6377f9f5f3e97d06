"""A comparison as one page of HTML that stands by itself: words first, then plots, then the figures, then doubts.

It fetches nothing, runs no script, and what a user named is escaped wherever it stands.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Final

from gpu_timed._version import VERSION
from gpu_timed.arms import Comparison, Verdict
from gpu_timed.record import Missing
from gpu_timed.step_timeline import spoken
from gpu_timed.views import drawing, plots, words

_CLASSES: Final = {"faster": "faster", "slower": "slower", "same": "same", "ambiguous": "open", None: "open"}
_DISTRIBUTION: Final = (
    "Each dot is a warm call (of more than {most} of an arm, {most} drawn, evenly by rank). The bar goes from the 5th "
    "to the 95th percentile of all of them, the line is the median over blocks. The axis holds the 1st to the 99th "
    "percentile of every arm."
)
_STEPS: Final = (
    "The median one of the profiled steps. The height is the share of each slice of the time (1/220 of the axis, 1/90 "
    "on a small screen) in which at least one kernel, copy or memset ran; the dashed line is where the last of them "
    "ended. Recording costs the host time, so a step that waits for the host is longer here than a call that is not "
    "profiled"
)
_STRETCHES: Final = (
    "From the same steps, around a gap of typical length. Coloured: a kernel ran, by stream. Grey: nothing ran; in it "
    "how long, above it the operator that the host was launching meanwhile. Each row has an axis of its own."
)
_OPERATORS: Final = 8
_CURVES: Final = "Medians. Busy ratios rest on profiled kernel time over unprofiled wall time."


def to_html(found: Comparison, path: str | os.PathLike[str]) -> Path:
    """Write the page of *found* to *path*, and return it.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    target = Path(path)
    target.write_text(html(found), encoding="utf-8")
    return target


def html(found: Comparison) -> str:
    """Return the page of *found*.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    plots.load()
    skeleton = Template(resources.files("gpu_timed.views").joinpath("page.html").read_text(encoding="utf-8"))
    card = found.environment.card
    return skeleton.substitute(
        version=escape(VERSION),
        title=escape(f"{found.name}: compared"),
        heading=escape(found.name),
        where=escape(f"On {card}" if isinstance(card, str) else "On the host alone: no device was there"),
        main="\n".join(_swept(found) if found.points else _single(found, "all")),
        honesty="\n".join(f"<li>{escape(text)}</li>" for text in words.honesty(found)),
        conditions="\n".join(
            f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in words.conditions(found)
        ),
    )


def _swept(found: Comparison) -> Iterator[str]:
    everywhere = words.everywhere(found)
    if everywhere:
        yield f"<h3>At every {escape(found.sweep)}</h3>"
    for text in everywhere:
        yield f'<div class="answer open"><p>{escape(text)}</p></div>'
    for point in found.points:
        yield f"<h3>{escape(found.sweep)} = {escape(str(point.value))}</h3>"
        yield from _answer(point.comparison, everywhere)
    if "curves" in plots.drawable(found):
        yield f"<h2>Over {escape(found.sweep)}</h2>"
        yield _figure(plots.curves(found, "curves"), _CURVES)
        yield from _sweep_table(found)
    for index, point in enumerate(found.points):
        label = f"{found.sweep} = {point.value}"
        yield f"<details{'' if index else ' open'}><summary>{escape(label)}: what limits, plots and figures</summary>"
        yield from _why(list(words.limits(point.comparison))[:1])
        yield from _evidence(point.comparison, f"point-{index}")
        yield "</details>"


def _single(found: Comparison, name: str) -> Iterator[str]:
    yield from _answer(found)
    yield from _why(list(words.limits(found))[:1])
    yield from _evidence(found, name)


def _answer(found: Comparison, said: Sequence[str] = ()) -> Iterator[str]:
    """Say what was found, but for what has been *said*."""
    if found.refused and words.headline(found)[0] not in said:
        yield f'<div class="answer open"><p>{escape(words.headline(found)[0])}</p></div>'
    for verdict, text in () if found.refused else zip(found.verdicts, words.headline(found), strict=True):
        if text not in said:
            yield f'<div class="answer {_CLASSES[verdict.word]}"><p>{escape(text)}</p></div>'
    for text in words.troubles(found):
        if text not in said:
            yield f'<p class="trouble">{escape(text)}</p>'


def _why(limits: Iterable[tuple[str, Iterable[str]]]) -> Iterator[str]:
    """Say what limits some arms."""
    for heading, sentences in limits:
        yield f'<h3>{escape(heading)}</h3><ul class="why">'
        yield "".join(f"<li>{escape(text)}</li>" for text in sentences) + "</ul>"


def _evidence(found: Comparison, name: str) -> Iterator[str]:
    drawable = plots.drawable(found)
    if "distribution" in drawable:
        yield "<h2>How long calls take</h2>"
        yield _figure(plots.distribution(found, f"{name}-d"), _DISTRIBUTION.format(most=drawing.MOST_DOTS))
    if "steps" in drawable:
        yield "<h2>What the device does in a step</h2>"
        walls = "; ".join(
            f"{arm.name} {words.middle(arm.samples, arm.samples.wall_ns)}" for arm in found.arms if len(arm.samples)
        )
        yield _figure(plots.steps(found, f"{name}-t"), f"{_STEPS} (wall: {walls}).")
    if "stretches" in drawable:
        yield "<h2>A typical stretch of it</h2>"
        yield _figure(plots.stretches(found, f"{name}-s"), _STRETCHES)
    others = list(words.limits(found))[1:]
    if others:
        yield f"<h2>What limits the other {'arms' if len(others) > 1 else 'arm'}</h2>"
        yield from _why(others)
    if found.arms and not found.refused:
        yield "<h2>The figures</h2>"
        yield from _table(found)
        yield from _waited(found)


def _table(found: Comparison) -> Iterator[str]:
    verdicts = {verdict.arm: verdict for verdict in found.verdicts}
    yield '<div class="scroll"><table><thead><tr><th scope="col"></th>'
    for index, arm in enumerate(found.arms):
        swatch = f'<span class="swatch" style="background: var(--arm-{index % len(plots.ARMS)})"></span>'
        yield f'<th scope="col">{swatch}{escape(arm.name)}</th>'
    yield "</tr></thead><tbody>"
    for row in words.rows(found):
        hint = f' <span class="hint">{escape(row.hint)}</span>' if row.hint else ""
        yield f'<tr><th scope="row">{escape(row.name)}{hint}</th>'
        for arm, cell in zip(found.arms, row.cells, strict=True):
            style = _style(verdicts.get(arm.name)) if row.name == "verdict" else ""
            yield f"<td{style}>{escape(cell)}</td>"
        yield "</tr>"
    yield "</tbody></table></div>"


def _sweep_table(found: Comparison) -> Iterator[str]:
    names = ("arm", *words.swept_names(found))
    yield '<div class="scroll"><table class="stacked"><thead><tr>'
    yield "".join(f'<th scope="col">{escape(name)}</th>' for name in (found.sweep, *names))
    yield "</tr></thead><tbody>"
    for value, arm, cells in words.swept(found):
        yield f'<tr><th scope="row" data-name="{escape(found.sweep)}">{escape(value)}</th>'
        for name, text in zip(names, (arm, *cells), strict=True):
            yield f'<td data-name="{escape(name)}">{escape(text)}</td>'
        yield "</tr>"
    yield "</tbody></table></div>"


def _waited(found: Comparison) -> Iterator[str]:
    """List whom the device waited for, of each arm that was profiled."""
    for arm in found.arms:
        operators = () if isinstance(arm.timeline, Missing) else arm.timeline.operators[:_OPERATORS]
        if not operators:
            continue
        yield f"<h3>Whom the device waited for: {escape(arm.name)}</h3>"
        yield '<div class="scroll"><table><thead><tr><th scope="col">operator being launched</th>'
        yield '<th scope="col">gaps a step</th><th scope="col">together a step</th>'
        yield '<th scope="col">typical gap</th><th scope="col">inside</th></tr></thead><tbody>'
        for one in operators:
            yield f'<tr><th scope="row">{escape(spoken(one.operator))}</th>' + _cells(
                (
                    f"{one.gaps:,}",
                    words.duration(one.total_ns),
                    words.duration(one.typical_ns),
                    spoken(one.within) or words.NONE,
                )
            )
        yield "</tbody></table></div>"


def _cells(texts: Iterable[str]) -> str:
    return "".join(f"<td>{escape(text)}</td>" for text in texts) + "</tr>"


def _style(verdict: Verdict | None) -> str:
    return f' class="{_CLASSES[verdict.word]}"' if verdict is not None else ""


def _figure(drawn: str, caption: str) -> str:
    return f"<figure>{drawn}<figcaption>{escape(caption)}</figcaption></figure>"
