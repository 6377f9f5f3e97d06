"""Holds spans against kernels whose duration is known, and says whether each promise was kept.

The promises, which are those that a span makes of itself:

``measured``   every span has a device time
``place``      it was measured on the device and the stream that the work was put on
``interval``   the truth lies within [``device_min_ns``, ``device_ns``] ± (uncertainty, floor)
``exact``      where it says that no launch gap is included, ``device_ns`` is the truth, but for handing over
``placement``  the kernel lies in the device span on the host's axis, within the stated uncertainty
``order``      its place contradicts nothing that the host knows of the order of events

``exact`` is about the median of a row. All others hold in 99 % of the spans. Whether they do is asked of all durations
of a regime together (:func:`pool`): a row of fifty spans cannot tell 98 % from 99 %, and fails only where so many
breaches would be seen less than once in a thousand times if the promise were kept.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from gpu_timed.trials import SHARE, Check, Instrument, Observation, Row, Verdict

FEWEST_EXACT: Final = 3
"""Spans without a launch gap that a row needs for a bias to be told."""
HANDOVERS: Final = 3
"""Floors that a pair may add to a kernel between its marks. An empty pair is one floor, from mark to mark; with a
kernel it is two, from mark to kernel and from kernel to mark, and what comes behind can make it more. By CUPTI, on an
H200 with a floor of 1.25 µs and driver 580: 2.0 to 3.5 µs, median 2.4 to 2.9 by kind of kernel."""
_ODDS: Final = 0.001


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
    held: dict[str, Any] = {"section": "regime", "name": name, "sync": sync, "duration_ns": duration_ns}
    held |= {"spans": len(observations), "values": values}
    if duration_ns < instrument.least_ns:
        text = f"not testable here: shorter than 20 steps of the device's timer, of {instrument.tick_ns} ns each"
        return Row(verdict="skipped", text=text, **held)
    if not observations:
        return Row(verdict="error", text="no span was made", **held)
    shares = _shares(observations, instrument, unlikely)
    checks = (*shares[:3], _exact(values, instrument), *shares[3:])
    return Row(verdict=_verdict(checks), text=_text(checks), checks=checks, **held)


def pool(name: str, sync: str, observations: Sequence[Observation], instrument: Instrument) -> Row:
    """Return the row of one regime and policy, all durations that could be tested together: 99 %, and no less."""
    held: dict[str, Any] = {"section": "regime", "name": name, "sync": sync, "spans": len(observations)}
    if not observations:
        return Row(verdict="skipped", text="nothing of it could be tested", **held)
    checks = _shares(observations, instrument, allowed_outside)
    values = {"share_inside": _part(observations, lambda span: is_inside(span, instrument))}
    return Row(verdict=_verdict(checks), text=_text(checks), checks=checks, values=values, **held)


def is_inside(span: Observation, instrument: Instrument) -> bool:
    """Return whether the truth lies within [``device_min_ns``, ``device_ns``] ± (uncertainty, floor).

    The uncertainty is that of the span's place, by which the lower bound was drawn; ``device_ns`` does not depend
    on it. A step of the timer belongs to the truth, which can be known no better.
    """
    if not (
        isinstance(span.device_ns, int) and isinstance(span.device_min_ns, int) and isinstance(span.uncertainty_ns, int)
    ):
        return False
    slack = instrument.floor_ns + instrument.tick_ns + math.ceil(instrument.doubt * span.true_ns)
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


def allowed_outside(spans: int) -> int:
    """Return how many of *spans* may break a promise that 99 % of them must keep: one, at the least."""
    return max(1, math.floor(spans * (1 - SHARE) + 1e-9))


@functools.cache
def unlikely(spans: int) -> int:
    """Return the most of *spans* that may break a promise before so many would be unlikely if 99 % kept it.

    The upper tail of the binomial distribution, at one in a thousand.
    """
    tail = 1.0
    for count in range(spans + 1):
        tail -= math.comb(spans, count) * (1 - SHARE) ** count * SHARE ** (spans - count)
        if tail < _ODDS:
            return max(1, count)
    return spans


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
    doubt = math.ceil(instrument.doubt * (values["true_ns"] or 0))
    least = -instrument.floor_ns - instrument.tick_ns - doubt
    edges = max(0, instrument.turnaround_ns - instrument.floor_ns)  # of a kernel, which its own stamps leave out
    most = HANDOVERS * instrument.floor_ns + edges + instrument.tick_ns + doubt
    if bias is None:
        return Check("exact", "skipped", None, most, "no span says that it holds no launch gap")
    ok = least <= bias <= most
    text = f"spans without a launch gap are off by {bias:+,} ns (median; {most:,} ns may be)"
    return Check("exact", "ok" if ok else "fail", bias, most, text)


def _shares(spans: Sequence[Observation], instrument: Instrument, allowed: Callable[[int], int]) -> tuple[Check, ...]:
    """Return the checks that are about a share of *spans*; *allowed* of so many may break each."""

    def share(name: str, kept: Callable[[Observation], bool], text: str, of: Sequence[Observation] = spans) -> Check:
        good = sum(map(kept, of))
        verdict: Verdict = "ok" if len(of) - good <= allowed(len(of)) else "fail"
        return Check(name, verdict, good / len(of), SHARE, f"{good} of {len(of)} {text}")

    known = [span for span in spans if placement_error(span) is not None]
    unknown = Check("placement", "skipped", None, SHARE, "the kernels' own place on the host's axis is not known")
    return (
        share("measured", _is_measured, f"spans have a device time{_reasons(spans)}"),
        share("place", lambda span: span.right_place, "spans name the right device and stream"),
        share("interval", lambda span: is_inside(span, instrument), "spans hold the truth"),
        share("placement", lambda span: is_placed(span, instrument), "kernels lie in their device spans", known)
        if known
        else unknown,
        share("order", lambda span: not span.fault, "spans are placed without a contradiction"),
    )


def _verdict(checks: Sequence[Check]) -> Verdict:
    return "fail" if any(check.verdict == "fail" for check in checks) else "ok"


def _text(checks: Sequence[Check]) -> str:
    failed = [check.text for check in checks if check.verdict == "fail"]
    return "; ".join(failed) or next(check.text for check in checks if check.name == "interval")


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
