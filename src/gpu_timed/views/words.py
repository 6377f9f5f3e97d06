"""What was found, in words and cells that the table for the terminal and the page share. British English, no markup."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from gpu_timed.arms import NOT_PROFILED, Arm, Comparison, Diagnosis, Samples, Verdict, counted, not_measured
from gpu_timed.record import Missing
from gpu_timed.step_timeline import ProfiledSteps, spoken

NONE: Final = "\N{EN DASH}"
_TIMES: Final = "\N{MULTIPLICATION SIGN}"
BUSY: Final = (
    "The busy ratio is the time in which at least one kernel, copy or memset ran, from a separate profiled pass, over "
    "the median wall time of the calls that were not profiled: the profiler's own cost is in neither."
)
GAPS: Final = (
    "Gaps, their lengths and operators are from the profiled pass, which widens them: recording costs the host time."
)
TIMES: Final = (
    "Wall: from the call until the device had done it. Launch: until the call returned. Device: between two marks on "
    "the device around the call, gaps included."
)
MEDIANS: Final = (
    "Times are of warm calls: the median over blocks of the median of each; first calls are apart, under one-off. "
    "Ratios are of arms in the same block, so that what drifts falls out: they need not be those of the medians."
)
NO_DEVICE: Final = "No device time was measured ({}): times are the wall's, and what limits is not known."
RATIO: Final = f"{_TIMES} baseline's time"
SWEPT: Final = ("wall", "busy", "busy ratio", "typical gap", "verdict", RATIO)
"""Rows that a sweep is shown by."""
_ROUNDED: Final = 0.9995
"""Part of a unit from which on three digits make it a whole one."""
_UNITS: Final = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"))
_BYTES: Final = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
BOUNDS: Final = {
    "launch": "launch-bound",
    "device": "device-bound",
    "mixed": "mixed",
    "unknown": "what limits is not known",
}
_PERCENT: Final = 100
_WORTH_TIMES: Final = 1.1


class Row(NamedTuple):
    """One quantity of all arms."""

    name: str
    cells: tuple[str, ...]
    """One for each arm, in their order."""
    hint: str = ""
    """What the name means."""


def duration(nanoseconds: float | Missing | None) -> str:
    """Return a time with three digits and its unit; of one that was not measured, its reason."""
    if nanoseconds is None:
        return NONE
    if isinstance(nanoseconds, Missing):
        return reason(nanoseconds)
    for size, unit in _UNITS:
        if abs(nanoseconds) >= _ROUNDED * size:
            return f"{_three(nanoseconds / size)} {unit}"
    return f"{nanoseconds:.0f} ns"


def size(count: int | Missing) -> str:
    """Return a number of bytes with its unit."""
    if isinstance(count, Missing):
        return reason(count)
    for least, unit in _BYTES:
        if abs(count) >= least:
            return f"{_three(count / least)} {unit}"
    return f"{count} B"


def share(part: float | Missing) -> str:
    """Return a part of 1 as a percentage."""
    return reason(part) if isinstance(part, Missing) else f"{_PERCENT * part:.1f} %"


def number(value: float | Missing | None) -> str:
    """Return a number with separators."""
    if value is None:
        return NONE
    return reason(value) if isinstance(value, Missing) else f"{value:,}"


def reason(missing: Missing) -> str:
    """Return a cell for what was not measured."""
    return NONE if missing.reason in ("not_set", "not_run") else f"{NONE} ({missing.reason})"


def headline(found: Comparison) -> list[str]:
    """Return the answer: a sentence for each arm but the baseline, or why there is none."""
    if found.refused:
        return [f"Not compared: {found.refused}"]
    return [sentence(verdict, _in_place(found, verdict)) for verdict in found.verdicts]


def sentence(verdict: Verdict, medians: str = "") -> str:
    """Return a verdict as a sentence, with the *medians* of both arms in it where they are known."""
    if verdict.word is None:
        return _stopped(f"No verdict on {verdict.arm}: {verdict.reason or 'nobody knows why'}")
    takes = _takes(verdict)
    if verdict.word in ("faster", "slower"):
        return f"{verdict.arm} is {verdict.word} than {verdict.against}{_times(verdict)}: {medians}it {takes}."
    if verdict.word == "same":
        return f"{verdict.arm} is as fast as {verdict.against}: {medians}it {takes}."
    either = f"It cannot be told whether {verdict.arm} or {verdict.against} is faster"
    known = [] if isinstance(verdict.ratio, Missing) else [f"{verdict.arm} {takes}"]
    return _stopped(f"{either}: " + "; ".join([*known, *([verdict.reason] if verdict.reason else [])]))


def _in_place(found: Comparison, verdict: Verdict) -> str:
    """Return the medians of both arms."""
    arms = {arm.name: arm.samples for arm in found.arms}
    both = [
        middle(samples, samples.device_ns if verdict.quantity == "device" else samples.wall_ns)
        for name in (verdict.arm, verdict.against)
        if (samples := arms.get(name)) is not None and len(samples)
    ]
    if len(both) < 2 or any(text.startswith(NONE) for text in both) or verdict.wide:  # noqa: PLR2004
        return ""
    return f"{both[0]} in place of {both[1]}; "


def rows(found: Comparison) -> Iterator[Row]:
    """Return the figures of all arms. A quantity that no arm has is left out."""
    verdicts = {verdict.arm: verdict for verdict in found.verdicts}

    def each(name: str, cell: Callable[[Arm], str], hint: str = "") -> Iterator[Row]:
        cells = tuple(cell(arm) for arm in found.arms)
        if any(not text.startswith(NONE) for text in cells):
            yield Row(name, cells, hint)

    def verdict(arm: Arm) -> str:
        if arm.name == found.baseline:
            return "baseline"
        held = verdicts.get(arm.name)
        return NONE if held is None else held.word or "no verdict"

    def ratio(arm: Arm) -> str:
        held = verdicts.get(arm.name)
        if arm.name == found.baseline:
            return "1"
        return NONE if held is None or held.word is None else _ratio(held)  # of other work a ratio says nothing

    def profile(show: Callable[[ProfiledSteps], str]) -> Callable[[Arm], str]:
        return lambda arm: reason(arm.timeline) if isinstance(arm.timeline, Missing) else show(arm.timeline)

    def diagnosed(show: Callable[[Diagnosis], str]) -> Callable[[Arm], str]:
        return lambda arm: NONE if (held := found.diagnoses.get(arm.name)) is None else show(held)

    def pays(arm: Arm) -> str:
        held = found.break_evens.get(arm.name)
        if held is None:
            return NONE
        return _never(held.calls) if isinstance(held.calls, Missing) else f"{held.calls:,} calls"

    quantity = "Device" if any(verdict.quantity == "device" for verdict in found.verdicts) else "Wall"
    yield from each("ran as", ran, "The mode that ran, where it is another than the one asked for.")
    yield from each("verdict", verdict)
    yield from each(RATIO, ratio, f"{quantity} time as a part of the baseline's, with its interval.")
    yield from each(
        "wall", lambda arm: middle(arm.samples, arm.samples.wall_ns), "From the call until the device had done it."
    )
    if not without_device(found):  # where the call returns when all is done
        yield from each("launch", lambda arm: middle(arm.samples, arm.samples.launch_ns), "From call to return.")
    yield from each(
        "device", lambda arm: middle(arm.samples, arm.samples.device_ns), "Between two marks; gaps included."
    )
    yield from each("busy", profile(lambda seen: duration(seen.busy_ns)), "At least one kernel or copy ran.")
    yield from each("busy ratio", diagnosed(lambda held: share(held.busy_ratio)), "Busy (profiled) / wall (not).")
    if not without_device(found):
        yield from each("bound", diagnosed(lambda held: BOUNDS[held.bound].removeprefix("what limits is ")))
    yield from each("kernels a call", profile(lambda seen: number(seen.kernels)))
    yield from each("launches a call", profile(lambda seen: number(seen.launches)), "Calls that gave the device work.")
    yield from each("gaps a call", profile(lambda seen: number(seen.gap_count)), "Times in which nothing ran.")
    yield from each("typical gap", profile(lambda seen: duration(seen.gap_ns)), "Median, in the profiled pass.")
    yield from each(
        "idle for each gap", diagnosed(lambda held: duration(held.idle_per_gap_ns)), "(Wall - busy) / gaps, unprofiled."
    )
    yield from each("waited most for", profile(_most), "The operator being launched in most of the gap time.")
    yield from each("memory held", lambda arm: size(arm.memory_held_bytes), "Beyond what was held before.")
    yield from each(
        "one-off",
        lambda arm: duration(arm.cold.one_off_ns),
        "Compiling, capturing, warming up; what one arm compiled, the next finds in torch's caches.",
    )
    yield from each("pays after", pays, "Calls after which what it takes once beyond the baseline is won back.")
    yield from each("outputs", agreement, "Beside the baseline's.")
    yield from each("samples", lambda arm: number(len(arm.samples)) if len(arm.samples) else NONE)


def swept_names(found: Comparison) -> tuple[str, ...]:
    """Return those of :data:`SWEPT` that some arm has at some value."""
    held = {row.name for point in found.points for row in rows(point.comparison)}
    return tuple(name for name in SWEPT if name in held)


def swept(found: Comparison) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Return the value, the arm and the cells of :func:`swept_names` for each arm at each value of a sweep."""
    names = swept_names(found)
    for point in found.points:
        held = {row.name: row.cells for row in rows(point.comparison)}
        for index, arm in enumerate(point.comparison.arms):
            yield str(point.value), arm.name, tuple(held[name][index] if name in held else NONE for name in names)


def everywhere(found: Comparison) -> tuple[str, ...]:
    """Return what is said at each of several values of a sweep alike, and is not worth saying again."""
    said = [[*headline(point.comparison), *troubles(point.comparison)] for point in found.points]
    return tuple(one for one in said[0] if all(one in each for each in said[1:])) if len(said) > 1 else ()


def without_device(found: Comparison) -> str:
    """Return why no arm has device time, where none has any and some were measured; else nothing."""
    absent = [arm.samples.device_ns for arm in found.arms if len(arm.samples)]
    if not absent or not all(isinstance(one, Missing) for one in absent):
        return ""
    first = absent[0]
    return (first.detail or first.reason.replace("_", " ")) if isinstance(first, Missing) else ""


def ran(arm: Arm) -> str:
    """Return which mode ran, where that is not the one that was asked for."""
    if isinstance(arm.ran, Missing):
        return "not run" if arm.refused else NONE
    return NONE if arm.honoured else f"{arm.ran}, not {arm.mode}"


def agreement(arm: Arm) -> str:
    """Return how the outputs of *arm* compare with the baseline's, in few words."""
    held = arm.agreement
    if isinstance(held, Missing):
        return reason(held)
    if held.exact:
        return "equal to the bit"
    # Of another shape or type there is nothing to subtract.
    differ = f" (by {held.max_abs:.2g})" if not isinstance(held.max_abs, Missing) and held.max_abs else ""
    return f"equal{differ}" if held.equal else f"differ{differ}"


def troubles(found: Comparison) -> Iterator[str]:
    """Return a sentence for each arm that did not run, or not as asked, and for outputs that differ."""
    said = "".join(headline(found))
    for arm in found.arms:
        if arm.refused:
            if found.refused and arm.refused == not_measured(found.baseline):
                continue
            if arm.refused.rstrip(".") not in said:
                yield _stopped(f"{arm.name} was not measured: {arm.refused}")
        elif not arm.honoured and not isinstance(arm.ran, Missing) and (arm.reason.rstrip(".") or NONE) not in said:
            yield _stopped(f"{arm.name} ran as {arm.ran}: {arm.reason}")
        if arm.strayed and arm.strayed not in said:
            yield _stopped(f"{arm.name}: {arm.strayed}")
        if not isinstance(arm.agreement, Missing) and not arm.agreement.equal and arm.agreement.text not in said:
            yield _stopped(f"{arm.name}: {arm.agreement.text}")


def conditions(found: Comparison) -> Iterator[tuple[str, str]]:
    """Return where and under what it was measured, as names and texts."""
    held = found.environment
    if not isinstance(held.card, Missing):
        yield "card", held.card
    yield "device times by", held.clock
    if held.driver:
        yield "driver", held.driver
    if held.versions:
        yield "versions", ", ".join(f"{name} {version}" for name, version in held.versions.items())
    if held.platform:
        yield "platform", held.platform
    if not isinstance(held.sm_clock_mhz, Missing):
        low, high = held.sm_clock_mhz
        yield "SM clock", f"{low} MHz" if low == high else f"{low} to {high} MHz"
    if not isinstance(held.throttle, Missing):
        yield "clocks held by", ", ".join(held.throttle) or "nothing"
    if not isinstance(held.host_load, Missing):
        yield "host load", f"{held.host_load:.2f} for each CPU"
    if held.date:
        yield "date", held.date
    if found.blocks:
        yield (
            "measured",
            f"{counted(found.blocks, 'shuffled block')} (seed {found.seed}) in {_spent(found)}; {found.stopped}",
        )


def _spent(found: Comparison) -> str:
    """Return how long the blocks took, and what came before."""
    if not found.blocks_s:
        return f"{found.seconds:.1f} s"
    return f"{found.blocks_s:.1f} s, after {found.first_calls_s:.1f} s of first calls"


def honesty(found: Comparison) -> list[str]:
    """Return what is to be known about the figures."""
    each = [one for one in (found, *(point.comparison for point in found.points)) if not one.refused]
    arms = [arm for one in each for arm in one.arms]
    absent = [why for one in each if (why := without_device(one))]
    profiles = [arm.timeline for arm in arms if not isinstance(arm.timeline, Missing)]
    missing = {
        arm.timeline.detail or arm.timeline.reason.replace("_", " ")
        for arm in arms
        if isinstance(arm.timeline, Missing) and arm.timeline != NOT_PROFILED and not absent
    }
    measured = any(len(arm.samples) for arm in arms)
    said = [NO_DEVICE.format(why) for why in absent]
    said += [*([] if absent else [TIMES]), MEDIANS] if measured else []
    if profiles:
        said += [BUSY, GAPS]
    said += [_stopped(f"No kernel records of some arms, so no busy time nor gaps: {text}") for text in sorted(missing)]
    said += [note for one in (found, *(point.comparison for point in found.points)) for note in one.notes]
    said += [note for seen in profiles for note in seen.notes]
    return list(dict.fromkeys(said))


def limits(found: Comparison) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Return what limits each arm, as a heading and sentences, the baseline's first; what all have in common, once."""
    held = found.diagnoses if not without_device(found) else {}  # of which nothing is known that would be news
    same = {(one.bound, one.sentences) for one in held.values()}
    if len(same) == 1 and len(held) > 1:
        ((bound, sentences),) = same
        yield f"all arms: {BOUNDS[bound]}", sentences
        return
    for name in sorted(held, key=lambda one: one != found.baseline):
        yield f"{name}: {BOUNDS[held[name].bound]}", held[name].sentences


def middle(samples: Samples, values: tuple[int, ...] | Missing) -> str:
    """Return the median over blocks of *values*, which are some of the times of *samples*."""
    if isinstance(values, Missing):
        return reason(values)
    return duration(samples.typical(values)) if values else NONE


def _most(seen: ProfiledSteps) -> str:
    if not seen.operators:
        return "nobody: the gaps are the device's own" if seen.late_ns == 0 and seen.gap_count else NONE
    first = seen.operators[0]
    return f"{spoken(first.operator)} ({first.gaps:,} {'gap' if first.gaps == 1 else 'gaps'})"


def _never(calls: Missing) -> str:
    return "never: slower" if calls.reason == "slower" else reason(calls)


def _takes(verdict: Verdict) -> str:
    if isinstance(verdict.ratio, Missing):
        return "is not held against it"
    than = f"{_TIMES} {verdict.against}'s {verdict.quantity} time"
    said = f"takes {verdict.ratio:.4g} {than}"
    if isinstance(verdict.low, Missing) or isinstance(verdict.high, Missing):
        return said
    level = f"{_PERCENT * verdict.level:g} %"
    if verdict.wide:
        return f"takes {_digits(verdict.low, 2)} to {_digits(verdict.high, 2)} {than} ({level} interval: it is wide)"
    return f"{said} ({level} interval {verdict.low:.4g} to {verdict.high:.4g})"


def _ratio(verdict: Verdict) -> str:
    if isinstance(verdict.ratio, Missing) or isinstance(verdict.low, Missing) or isinstance(verdict.high, Missing):
        return NONE if isinstance(verdict.ratio, Missing) else f"{verdict.ratio:.4g}"
    if verdict.wide:
        return f"{_digits(verdict.low, 2)} to {_digits(verdict.high, 2)}"
    return f"{verdict.ratio:.4g} [{verdict.low:.4g}, {verdict.high:.4g}]"


def _times(verdict: Verdict) -> str:
    """Return how many times as fast, where that is more than a little."""
    if isinstance(verdict.ratio, Missing) or not 0 < verdict.ratio < 1 / _WORTH_TIMES or verdict.wide:
        return ""
    return f", {1 / verdict.ratio:.3g} {_TIMES} as fast"


def _stopped(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _three(value: float) -> str:
    """Return three digits and no exponent."""
    whole = len(str(int(abs(value))))
    return f"{value:,.{max(0, 3 - whole)}f}"


def _digits(value: float, digits: int) -> str:
    """Return so many digits and no exponent."""
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.0f}" if rounded >= 10 ** (digits - 1) else f"{rounded:g}"
