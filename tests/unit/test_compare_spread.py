"""Blocks that are unlike are said to be, with what may be behind it; others are not."""

from __future__ import annotations

import make_believe_comparison as believe
import pytest

from gpu_timed.analysis.spread import unsteady, varies
from gpu_timed.arms import Arm, Samples
from gpu_timed.record import Missing

CALM = Arm(name="eager", mode="eager", samples=believe.samples(1.0, 0.9, 0.1))


def arm(*blocks: int) -> Arm:
    """Return an arm with one call in each block."""
    return Arm(
        name="compile",
        mode="compile",
        samples=Samples(block=tuple(range(len(blocks))), wall_ns=blocks, launch_ns=blocks),
    )


def test_one_block_in_twenty_is_an_outlier_and_one_in_five_is_not() -> None:
    assert varies(arm(*[40] * 19, 7_000)) == 1
    assert varies(arm(*([40] * 16 + [7_000] * 4))) == 175
    assert varies(arm(*([40, 70] * 10))) == pytest.approx(1.75)
    assert varies(arm(1, 100)) == 1  # too few to tell
    assert varies(Arm(name="a", mode="eager")) == 1


def test_it_is_said_of_the_arms_that_vary_with_the_load_and_what_helps() -> None:
    rough = arm(*([40] * 16 + [7_000] * 4))
    assert unsteady((CALM, arm(*[40] * 20)), 3.0, on_cpu=True) == []
    (said,) = unsteady((CALM, rough), 2.41, on_cpu=True)
    assert said.startswith("Calls vary from block to block, those of compile 175.0-fold: ")
    assert "the host's load is 2.4 for each CPU" in said
    assert "OMP_NUM_THREADS=1" in said
    assert "eager" not in said
    for load in (0.3, Missing("not_set")):
        (quiet,) = unsteady((CALM, rough), load, on_cpu=False)
        assert "load" not in quiet
        assert "OMP" not in quiet
