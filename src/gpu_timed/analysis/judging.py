"""Holds spans against kernels whose duration is known, and says whether each promise was kept.

The promises, which are those that a span makes of itself:

``measured``   every span has a device time
``place``      it was measured on the device and the stream that the work was put on
``interval``   the truth lies within [``device_min_ns``, ``device_ns``] ± (uncertainty, floor)
``exact``      where it says that no launch gap is included, ``device_ns`` is the truth, but for the floor
``placement``  the kernel lies in the device span on the host's axis, within the stated uncertainty
``order``      its place contradicts nothing that the host knows of the order of events

All but ``exact`` hold in 99 % of the spans of a row, and one span may always break them: a row of
fifty cannot tell 98 % from 99 %. ``exact`` is about the median.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from gpu_timed.trials import SHARE, Check, Instrument, Observation, Row, Verdict

FEWEST_EXACT: Final = 3
"""Spans without a launch gap that a row needs for a bias to be told."""


def judge(name: str, sync: str, duration_ns: int, observations: Sequence[Observation], instrument: Instrument) -> Row:
    """Return the row of one regime, policy and duration.

    Args:
        name: The regime.
        sync: The sync policy.
        duration_ns: How long the kernels were asked to run.
        observations: The spans, each beside the truth.
        instrument: How good the truth is.
    """
    values = figures(observations, instrument)
    too_short = duration_ns < instrument.least_ns
    if too_short or not observations:
        text = (
            f"not testable here: shorter than 20 steps of the device's timer, of {instrument.tick_ns} ns each"
            if too_short
            else "no span was made"
        )
        verdict: Verdict = "skipped" if too_short else "error"
        return Row(
            section="regime",
            name=name,
            verdict=verdict,
            text=text,
            sync=sync,
            duration_ns=duration_ns,
            spans=len(observations),
            values=values,
        )
    checks = (
        _share("measured", observations, _is_measured, f"spans have a device time{_reasons(observations)}"),
        _share("place", observations, lambda span: span.right_place, "spans name the right device and stream"),
        _share("interval", observations, lambda span: is_inside(span, instrument), "spans hold the truth"),
        _exact(values, instrument),
        _placement(observations, instrument),
        _share("order", observations, lambda span: not span.fault, "spans are placed without a contradiction"),
    )
    failed = [check for check in checks if check.verdict == "fail"]
    return Row(
        section="regime",
        name=name,
        verdict="fail" if failed else "ok",
        text="; ".join(check.text for check in failed) or checks[2].text,
        sync=sync,
        duration_ns=duration_ns,
        spans=len(observations),
        checks=checks,
        values=values,
    )


def is_inside(span: Observation, instrument: Instrument) -> bool:
    """Return whether the truth lies within [``device_min_ns``, ``device_ns``] ± (uncertainty, floor).

    The uncertainty is that of the span's place, by which the lower bound was drawn; ``device_ns`` does not depend
    on it. A step of the timer belongs to the truth, which can be known no better.
    """
    if not (
        isinstance(span.device_ns, int) and isinstance(span.device_min_ns, int) and isinstance(span.uncertainty_ns, int)
    ):
        return False
    slack = instrument.floor_ns + instrument.tick_ns
    least = span.device_min_ns - span.uncertainty_ns - slack
    return least <= span.true_ns <= span.device_ns + slack


def is_placed(span: Observation, instrument: Instrument) -> bool:
    """Return whether the kernel lies in the device span on the host's axis, as well as both are known."""
    error = placement_error(span)
    if error is None or not isinstance(span.uncertainty_ns, int):
        return False
    return error <= span.uncertainty_ns + span.anchor_ns + instrument.floor_ns + instrument.tick_ns


def placement_error(span: Observation) -> int | None:
    """Return how far the kernel stands out of its device span, in nanoseconds; None where nobody knows.

    A span without a launch gap ends with its kernel, so there a span that is too late at its end is no better.
    """
    if span.lead_ns is None or span.tail_ns is None:
        return None
    out = max(0, -span.lead_ns, -span.tail_ns)
    return max(out, span.lead_ns, span.tail_ns) if span.gaps == "no" else out


def allowed_outside(spans: int, share: float = SHARE) -> int:
    """Return how many of *spans* may break a promise that *share* of them must keep: one, at the least."""
    return max(1, math.floor(spans * (1 - share) + 1e-9))


def figures(observations: Sequence[Observation], instrument: Instrument) -> dict[str, Any]:
    """Return what the row shows, in nanoseconds; None of what cannot be told.

    ``bias_ns`` and ``spread_ns`` are the median of ``device_ns`` less the truth, and the width of its middle 90 %,
    over spans that say they hold no launch gap; ``excess_ns`` is that median over all spans. ``width_ns`` is the
    median distance of the two bounds.
    """
    told = [span for span in observations if isinstance(span.device_ns, int) and isinstance(span.device_min_ns, int)]
    errors = [int(span.device_ns) - span.true_ns for span in told if isinstance(span.device_ns, int)]
    exact = [int(span.device_ns) - span.true_ns for span in told if span.gaps == "no" and span.right_place]
    widths = [
        span.device_ns - span.device_min_ns
        for span in told
        if isinstance(span.device_ns, int) and isinstance(span.device_min_ns, int)
    ]
    placed = [error for span in told if (error := placement_error(span)) is not None]
    enough = len(exact) >= FEWEST_EXACT
    return {
        "spans": len(observations),
        "true_ns": _median(span.true_ns for span in observations),
        "device_ns": _median(span.device_ns for span in told if isinstance(span.device_ns, int)),
        "share_inside": _part(observations, lambda span: is_inside(span, instrument)),
        "exact_spans": len(exact),
        "bias_ns": _median(exact) if enough else None,
        "spread_ns": spread(exact) if enough else None,
        "excess_ns": _median(errors),
        "width_ns": _median(widths),
        "uncertainty_ns": _median(span.uncertainty_ns for span in told if isinstance(span.uncertainty_ns, int)),
        "placement_ns": quantile(placed, SHARE) if placed else None,
        "anchor_ns": _median(span.anchor_ns for span in told if span.lead_ns is not None),
        "host_ns": _median(span.host_ns for span in observations),
    }


def spread(values: Sequence[int]) -> int:
    """Return the width of the middle nine tenths of *values*."""
    return quantile(values, 0.95) - quantile(values, 0.05)


def quantile(values: Sequence[int], share: float) -> int:
    """Return the least of *values* that *share* of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def _exact(values: dict[str, Any], instrument: Instrument) -> Check:
    bias = values["bias_ns"]
    most = instrument.floor_ns + instrument.turnaround_ns + instrument.tick_ns
    if bias is None:
        return Check("exact", "skipped", None, most, "no span says that it holds no launch gap")
    ok = -instrument.floor_ns - instrument.tick_ns <= bias <= most
    text = f"spans without a launch gap are off by {bias:+,} ns (median; {most:,} ns may be)"
    return Check("exact", "ok" if ok else "fail", bias, most, text)


def _placement(observations: Sequence[Observation], instrument: Instrument) -> Check:
    known = [span for span in observations if placement_error(span) is not None]
    if not known:
        return Check("placement", "skipped", None, SHARE, "the kernels' own place on the host's axis is not known")
    return _share("placement", known, lambda span: is_placed(span, instrument), "kernels lie in their device spans")


def _share(name: str, spans: Sequence[Observation], kept: Callable[[Observation], bool], text: str) -> Check:
    good = sum(map(kept, spans))
    ok = len(spans) - good <= allowed_outside(len(spans))
    return Check(name, "ok" if ok else "fail", good / len(spans), SHARE, f"{good} of {len(spans)} {text}")


def _is_measured(span: Observation) -> bool:
    return isinstance(span.device_ns, int)


def _reasons(observations: Sequence[Observation]) -> str:
    reasons = Counter(span.reason for span in observations if span.reason)
    return f" ({', '.join(f'{reason}: {count}' for reason, count in reasons.items())})" if reasons else ""


def _part(spans: Sequence[Observation], kept: Callable[[Observation], bool]) -> float | None:
    return sum(map(kept, spans)) / len(spans) if spans else None


def _median(values: Iterable[int]) -> int | None:
    held = list(values)
    return round(statistics.median(held)) if held else None
