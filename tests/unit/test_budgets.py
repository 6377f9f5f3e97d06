"""The table of budgets: what is judged as met, missed, not shown or not measured, from what the scripts say."""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "perf"))

import budget_rows
import budgets


def arm(added_ns, ratio=0.1):
    return {"ns": added_ns + 60, "added_ns": added_ns, "ratio": ratio}


def shares(**changed):
    every = {"spans": 1200, "inside_with_stated_uncertainty": 0.995, "inside_without_tolerance": 0.9}
    every |= {"inside": 0.97, "exact_median_ns": 1_100, "exact_p99_ns": 1_900}
    every |= {"contained_with_floor": 0.999, "start_within_with_floor": 0.998, "end_within_with_floor": 0.997}
    return every | {"uncertainty_median_ns": 5_000} | changed


def step(sent):
    bare = {"p50_us": 200.0, "p99_us": 210.0, "p99.9_us": 300.0}
    alone = {name: value * 1.01 for name, value in bare.items()} | {"p99.9_ratio": 1.01}
    return {"bare": bare, "measured": alone, "exported": {name: value * 2 for name, value in bare.items()} | sent}


GOOD = {
    "overhead": {
        "arms": {
            "gpu_timed, deferred, inside a span": arm(7_900, 0.24),
            "gpu_timed, deferred": arm(6_000),
            "gpu_timed, every=1000000 (left out)": arm(300),
            "gpu_timed, unsampled parent": arm(990),
            "gpu_timed, unsampled root": arm(3_000),
            "the sampler of the line above alone": arm(1_600),
        },
        "stages": {
            "an empty call": 50,
            "mark placed and given back, once": 2_050,
            "decision under an unsampled parent": 450,
            "context attached and detached": 550,
        },
    },
    "disabled": {"same": True},
    "replay": {"steps": {"graph replay": step({"p99.9_ratio": 1.09})}},
    "decode": {
        "steps": {"decode step": step({"throughput": 0.996, "throughput_half_width": 0.002, "p99_ratio": 1.05})}
    },
    "intervals": {"all": shares(), "by_regime": {"idle": shares(), "queued": shares(inside=0.5)}, "by_work": {}},
    "placement": {
        "all": shares(),
        "by_way": {"idle": shares()},
        "two_seconds_after_the_pause": shares(),
        "settings": {"minutes": 8.0, "pause_s": 180.0},
    },
    "threads": {"cost_ns": {"one": [100_000.0], "many": [150_000.0]}, "ratio": 1.5, "faults": []},
    "soak": {
        "looks": [
            {"rss_mb": 50.0, "made": 50_000, "threads": 4, "marks": 1, "missing": 0, "limits": {}},
            {"rss_mb": 99.0, "made": 1_050_000, "threads": 4, "marks": 1, "missing": 0, "limits": {"kinds": 3}},
        ]
    },
}
GOOD["soak_gpu"] = copy.deepcopy(GOOD["soak"])
"""Each figure is just within its budget."""


def verdicts(parts):
    return [row.verdict for row in budget_rows.rows(parts)]


def changed(part, *path, value):
    """GOOD with one figure of one part changed."""
    parts = copy.deepcopy(GOOD)
    inner = parts[part]
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return parts


def test_what_is_within_its_budget_is_met():
    """All of it but what cannot be measured yet."""
    found = verdicts(GOOD)
    assert [verdict for verdict in found if verdict != "met"] == ["there is no benchmark() yet"]
    assert len(found) == 15


@pytest.mark.parametrize(
    ("part", "path", "value", "missed"),
    [
        ("overhead", ("arms", "gpu_timed, deferred, inside a span", "added_ns"), 8_001, 1),
        ("overhead", ("arms", "gpu_timed, deferred, inside a span", "ratio"), 0.251, 1),
        ("overhead", ("arms", "gpu_timed, unsampled parent", "added_ns"), 1_001, 1),
        ("overhead", ("arms", "gpu_timed, unsampled root", "added_ns"), 3_101, 1),
        ("disabled", ("same",), False, 1),
        ("replay", ("steps", "graph replay", "exported", "p99.9_ratio"), 1.11, 1),
        ("decode", ("steps", "decode step", "exported", "throughput"), 0.9949, 1),
        ("decode", ("steps", "decode step", "exported", "p99_ratio"), 1.11, 1),
        ("intervals", ("all", "inside_with_stated_uncertainty"), 0.989, 1),
        ("intervals", ("all", "exact_median_ns"), 1_251, 1),
        ("intervals", ("all", "exact_median_ns"), -1_251, 1),
        ("placement", ("all", "contained_with_floor"), 0.989, 1),
        ("placement", ("all", "start_within_with_floor"), None, 1),
        ("placement", ("all", "end_within_with_floor"), 0.989, 1),
        ("threads", ("ratio",), 2.1, 1),
        ("threads", ("faults",), ["a span id came twice"], 1),
        ("soak", ("looks", 1, "rss_mb"), 100.1, 1),
        ("soak", ("looks", 1, "threads"), 5, 1),
        ("soak", ("looks", 1, "marks"), 2, 1),
        ("soak", ("looks", 1, "missing"), 1, 1),
        ("soak_gpu", ("looks", 1, "rss_mb"), 100.1, 1),
    ],
)
def test_what_is_just_beyond_it_is_missed(part, path, value, missed):
    found = verdicts(changed(part, *path, value=value))
    assert found.count("missed") == missed
    assert found.count("met") == 14 - missed


def test_an_interval_that_is_too_wide_shows_nothing():
    """Unless all of it lies below the budget."""
    wide = changed("decode", "steps", "decode step", "exported", "throughput_half_width", value=0.01)
    assert "not shown" in verdicts(wide)
    wide["decode"]["steps"]["decode step"]["exported"]["throughput"] = 0.95
    assert "not shown" not in verdicts(wide)
    assert "missed" in verdicts(wide)


def test_without_marks_nothing_is_met():
    """On a machine without a card the cost of a span has no marks in it: that meets no budget."""
    parts = copy.deepcopy(GOOD)
    del parts["overhead"]["stages"]["mark placed and given back, once"]
    assert verdicts(parts)[0] == budget_rows.NEEDS_A_CARD
    assert verdicts(parts).count("met") == 12


def test_what_is_not_there_says_why():
    """Not run, no card, or a script that says it otherwise: a row for each, and the others as they are."""
    parts = copy.deepcopy(GOOD)
    del parts["replay"]
    parts["placement"] = {"absent": "needs a card"}
    parts["threads"] = {"ratio": 1.0}
    found = verdicts(parts)
    assert found.count("met") == 11
    assert {"not run", "needs a card"} < set(found)
    assert any(verdict.startswith("cannot be read (KeyError") for verdict in found)


def test_a_short_form_says_so():
    parts = copy.deepcopy(GOOD)
    parts["soak"]["quick"] = parts["disabled"]["quick"] = True
    found = {row.what: row.verdict for row in budget_rows.rows(parts)}
    assert found["disabled, no mode"] == "met"
    assert sorted(set(found.values())) == ["met", "met (short form)", "there is no benchmark() yet"]


def test_of_what_is_missed_the_stages_are_told(capsys):
    """The dearest first, each less an empty call."""
    budget_rows.show(
        budget_rows.rows(changed("overhead", "arms", "gpu_timed, unsampled parent", "added_ns", value=2_000))
    )
    said = capsys.readouterr().out
    assert "an unsampled span under an unsampled parent: the wrapper alone 0.30 µs, the decision 0.40 µs" in said
    assert "mark placed" not in said  # what is met needs no telling


def test_parts_are_run_as_far_as_the_time_goes(monkeypatch):
    """What needs a card is left out without one; what there is no time for says so; a failure is the part's own."""
    monkeypatch.setattr(budgets.cuda_driver, "device_present", lambda: False)
    options = argparse.Namespace(within=0.0, quick=True)
    found = dict(budgets.measure(["replay", "threads"], options))
    assert found["replay"]["absent"] == "needs a card"
    assert found["threads"]["absent"] == "no time left"


def test_a_script_that_fails_says_how(tmp_path, monkeypatch):
    monkeypatch.setattr(budgets, "HERE", tmp_path)
    (tmp_path / "bad.py").write_text("raise SystemExit('no such thing here')")
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    (tmp_path / "soak.py").write_text("import sys; open(sys.argv[-1], 'w').write('{\"made\": 1}\\n{\"made\": 2}\\n')")
    (tmp_path / "half.py").write_text("import sys; open(sys.argv[-1], 'w').write('{}'); raise KeyError('half-way')")
    (tmp_path / "found.py").write_text("import sys; open(sys.argv[-1], 'w').write('{}'); sys.exit(True)")
    assert budgets.run(budgets.Part("half.py"), (), 30, tmp_path) == {"absent": "failed: KeyError: 'half-way'"}
    assert budgets.run(budgets.Part("found.py"), (), 30, tmp_path) == {}
    assert budgets.run(budgets.Part("bad.py"), (), 30, tmp_path) == {"absent": "failed: no such thing here"}
    assert budgets.run(budgets.Part("slow.py"), (), 0.2, tmp_path) == {"absent": "not done within 0 s"}
    assert budgets.run(budgets.Part("soak.py"), (), 30, tmp_path) == {"looks": [{"made": 1}, {"made": 2}]}


def test_disabled_is_asked_in_a_process_of_its_own():
    assert budgets.run_disabled() == {"same": True}
