"""What the scripts say, held against the budgets: pure functions over their JSON, for budgets.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

Found = dict[str, Any]
NEEDS_A_CARD = "needs a card"
NOT_RUN = "not run"
DISABLED_ROW = "disabled, no mode"


class Row(NamedTuple):
    """A budget, and what came of it."""

    what: str
    budget: str
    measured: str
    verdict: str
    where: str = ""


Judge = Callable[[Found], Iterator[Row]]


def judged(good: bool) -> str:
    """Return the verdict on what was measured well enough."""
    return "met" if good else "missed"


def us(ns: float) -> str:
    """Show nanoseconds as microseconds."""
    return f"{ns / 1e3:.2f} µs"


def calls(found: Found) -> Iterator[Row]:
    """Judge what calls cost on their own thread, by overhead.py."""
    arms, stages = found["arms"], found["stages"]
    nothing = stages["an empty call"]
    mine = {name: ns for name, ns in stages.items() if name != "an empty call" and "unsampled" not in name}
    parts = sorted(((ns - nothing, name) for name, ns in mine.items()), reverse=True)
    where = ", ".join(f"{name} {us(ns)}" for ns, name in parts)
    ours = arms["gpu_timed, deferred, inside a span"]
    marked = "mark placed and given back, once" in stages
    what = "a deferred span with two marks, a parent, exported: added to the call"
    said = f"{us(ours['added_ns'])} (as a root {us(arms['gpu_timed, deferred']['added_ns'])})"
    if marked:
        yield Row(what, "≤ 8 µs", said, judged(ours["added_ns"] <= 8_000), where)
        yield Row(
            "the same over an OpenTelemetry span with two torch events",
            "≤ 0.25",
            f"{ours['ratio']:.3f}",
            judged(ours["ratio"] <= 0.25),
            where,
        )
    else:
        yield Row(what, "≤ 8 µs", f"{said}, without marks", NEEDS_A_CARD, where)
    wrapper = arms["gpu_timed, every=1000000 (left out)"]["added_ns"]
    child = arms["gpu_timed, unsampled parent"]["added_ns"]
    where = (
        f"the wrapper alone {us(wrapper)}, the decision {us(stages['decision under an unsampled parent'] - nothing)}"
    )
    yield Row("an unsampled span under an unsampled parent", "≤ 1 µs", us(child), judged(child <= 1_000), where)
    root = arms["gpu_timed, unsampled root"]["added_ns"]
    sampler = arms["the sampler of the line above alone"]["added_ns"]
    yield Row(
        "an unsampled root, less its sampler",
        "≤ 1.5 µs",
        f"{us(root - sampler)} (the sampler {us(sampler)})",
        judged(root - sampler <= 1_500),
        f"the wrapper alone {us(wrapper)}, the context {us(stages['context attached and detached'] - nothing)}; the "
        "rest is ids, the decision and what stands for the span",
    )


def disabled(found: Found) -> Iterator[Row]:
    """Judge what a disabled decorator is."""
    same = bool(found["same"])
    yield Row(DISABLED_ROW, "the function itself", "it is" if same else "it is not", judged(same))


def _latencies(rows: Found, percentile: str) -> tuple[Found, str]:
    """Return the row of what is exported, and what measuring and exporting add, in words."""
    bare, alone, sent = (rows[arm] for arm in ("bare", "measured", "exported"))
    return sent, (
        f"undecorated {bare[percentile + '_us']:,.1f} µs; measuring alone {alone[percentile + '_us']:,.1f}; "
        f"exporting from the process {sent[percentile + '_us']:,.1f}"
    )


def replay(found: Found) -> Iterator[Row]:
    """Judge the graph replay, by steps.py."""
    rows = found["steps"]["graph replay"]
    sent, where = _latencies(rows, "p99.9")
    alone = rows["measured"]["p99.9_ratio"]
    yield Row(
        "a replay of 200 µs, deferred, exported: p99.9 over undecorated",
        "≤ 1.1",
        f"{sent['p99.9_ratio']:.2f} exporting in the process ({alone:.2f} exporting nothing)",
        judged(sent["p99.9_ratio"] <= 1.1),
        where,
    )


def decode(found: Found) -> Iterator[Row]:
    """Judge the decode step, by steps.py."""
    rows = found["steps"]["decode step"]
    sent, where = _latencies(rows, "p50")
    half, through = sent["throughput_half_width"], sent["throughput"]
    verdict = judged(through >= 0.995)
    if half > 0.0025 and through + half >= 0.995:
        verdict = "not shown"
    yield Row(
        "a decode step of 1,100 kernels, deferred, exported: throughput over undecorated",
        "≥ 0.995 ± 0.0025",
        f"{through:.4f} ± {half:.4f}",
        verdict,
        where,
    )
    sent, where = _latencies(rows, "p99")
    yield Row("its p99", "≤ 1.1", f"{sent['p99_ratio']:.3f}", judged(sent["p99_ratio"] <= 1.1), where)


def _worst(groups: Found, field: str) -> str:
    """Name the group with the smallest share."""
    told = {name: one[field] for name, one in groups.items() if one[field] is not None}
    if not told:
        return ""
    name = min(told, key=lambda key: told[key])
    return f"least in {name}: {100 * told[name]:.2f} %"


def intervals(found: Found) -> Iterator[Row]:
    """Judge the device times of live spans, by intervals.py."""
    every = found["all"]
    inside = every["inside_with_stated_uncertainty"]
    yield Row(
        "a live span: the truth lies between device_min_ns and device_ns, ± uncertainty and floor",
        "≥ 99 %",
        f"{100 * inside:.2f} % of {every['spans']:,} (nothing added: {100 * every['inside_without_tolerance']:.2f} %)",
        judged(inside >= 0.99),
        _worst({name: one for name, one in found["by_regime"].items() if "contended" not in name}, "inside"),
    )
    exact, most = every["exact_median_ns"], every["exact_p99_ns"]
    if exact is None:
        yield Row("device_ns over the truth where no gap is included", "≤ 1.25 µs", "no such span", "not shown")
        return
    by_work = {name: one["exact_median_ns"] for name, one in found["by_work"].items()}
    yield Row(
        "device_ns over the truth where no gap is included",
        "≤ 1.25 µs",
        f"median {us(exact)}, p99 {us(most)}",
        judged(abs(exact) <= 1_250),
        "; ".join(f"{name} {us(ns)}" for name, ns in by_work.items() if ns is not None),
    )


def placement(found: Found) -> Iterator[Row]:
    """Judge where device spans stand on the host's axis, by placement.py."""
    every, after = found["all"], found["two_seconds_after_the_pause"]
    shares = [every[field] for field in ("contained_with_floor", "start_within_with_floor", "end_within_with_floor")]
    settings = found["settings"]
    good = all(share is not None and share >= 0.99 for share in shares)
    told = [f"{100 * share:.2f} %" if share is not None else "-" for share in shares]
    yield Row(
        "device spans on the host's axis: true error within the stated one, over 8 minutes with a pause of 3",
        "≥ 99 %",
        f"spans {told[0]}, starts {told[1]}, ends {told[2]}, over {settings['minutes']:g} minutes",
        judged(good),
        f"{_worst(found['by_way'], 'contained_with_floor')}; {after['spans']} spans after the pause; "
        f"stated, median: {us(every['uncertainty_median_ns'] or 0)}",
    )


def threads(found: Found) -> Iterator[Row]:
    """Judge many threads beside one, by threads.py."""
    one, many = (sum(found["cost_ns"][kind]) / len(found["cost_ns"][kind]) for kind in ("one", "many"))
    faults = "; ".join(found["faults"]) or "every record there, every parent its own thread's"
    yield Row(
        "64 threads: process time of a span over one thread's; no record lost or under another thread's parent",
        "≤ 2, none",
        f"{found['ratio']:.2f} ({us(many)} to {us(one)}); {faults}",
        judged(found["ratio"] <= 2 and not found["faults"]),
    )


def soak(found: Found) -> Iterator[Row]:
    """Judge what a long run leaves behind, by soak.py: its first and its last look."""
    first, last = found["looks"][0], found["looks"][-1]
    grown = last["rss_mb"] - first["rss_mb"]
    millions = (last["made"] - first["made"]) / 1e6
    same = last["threads"] <= first["threads"] and last["marks"] <= first["marks"]
    kept = ", ".join(f"{name} {value:,}" for name, value in last["limits"].items())
    yield Row(
        "memory after a million spans; threads and marks; spans neither exported nor counted",
        "≤ 50 MB, the same, none",
        f"{grown:+.1f} MB in {millions:.2f} million; {'the same' if same else 'more'}; {last['missing']}",
        judged(grown <= 50 * max(millions, 0.2) and same and not last["missing"]),
        f"kept: {kept}",
    )


def soak_gpu(found: Found) -> Iterator[Row]:
    """Judge the same with real kernels on real streams."""
    for row in soak(found):
        yield row._replace(what=f"the same on the card: {row.what}")


def benchmark(_: Found) -> Iterator[Row]:
    """Say what cannot be judged yet."""
    yield Row(
        "benchmark()'s device time, each method alone, 3 µs to 10 ms",
        "≤ max(0.3 µs, 1 %)",
        "-",
        "there is no benchmark() yet",
    )


JUDGES: dict[str, tuple[Judge, str]] = {
    "overhead": (calls, "what a call costs on its thread"),
    "disabled": (disabled, "disabled"),
    "decode": (decode, "a decode step of 1,100 kernels"),
    "replay": (replay, "a graph replay of 200 µs"),
    "benchmark": (benchmark, "benchmark()"),
    "intervals": (intervals, "a live span's device time"),
    "placement": (placement, "placement of device spans"),
    "soak": (soak, "memory"),
    "soak_gpu": (soak_gpu, "memory on the card"),
    "threads": (threads, "64 threads"),
}
"""Who judges which part, and what stands in the table where that part is not there."""


def rows(parts: Found) -> list[Row]:
    """Return the table, from what the parts have *found*: their JSON, or why there is none."""
    made: list[Row] = []
    for name, (judge, what) in JUDGES.items():
        found = parts.get(name, {"absent": NOT_RUN}) if name != "benchmark" else {}
        if "absent" in found:
            made.append(Row(what, "", "-", found["absent"]))
            continue
        try:
            made += [_marked(row, found) for row in judge(found)]
        except (KeyError, IndexError, TypeError) as error:  # a script that says it in another way now
            made.append(Row(what, "", "-", f"cannot be read ({type(error).__name__}: {error})"))
    return made


def _marked(row: Row, found: Found) -> Row:
    """Say of a verdict that it is a short form's."""
    short = found.get("quick") and row.verdict in ("met", "missed", "not shown") and row.what != DISABLED_ROW
    return row._replace(verdict=f"{row.verdict} (short form)") if short else row


def show(made: Sequence[Row]) -> None:
    """Print the table, and below it where the time goes that is missing."""
    print("| what | budget | measured | verdict |\n|---|---|---|---|")
    for row in made:
        print(f"| {row.what} | {row.budget} | {row.measured} | {row.verdict} |")
    print()
    for row in made:
        if row.where and not row.verdict.startswith("met"):
            print(f"{row.what}: {row.where}")
