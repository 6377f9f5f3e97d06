"""Sites are known as long as they are there, and their calls for good; to begin anew leaves nothing behind."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import pytest

from gpu_timed.ledger import Ledger
from gpu_timed.site import Site
from gpu_timed.sites import Sites


def finalizers() -> int:
    registry: Any = weakref.finalize._registry  # type: ignore[attr-defined]
    return len(registry)


def test_to_begin_anew_again_and_again_leaves_nothing_behind() -> None:
    """As children of children that fork do, and every test."""
    sites = Sites()
    held = [sites.new(f"site {index}") for index in range(10)]
    before = finalizers()
    for _ in range(100):
        sites.forget_calls()
        sites.forget()
    assert finalizers() == before
    del held
    gc.collect()
    assert finalizers() == before - 10


def test_calls_of_what_is_gone_are_kept_once() -> None:
    sites = Sites()
    one, other = sites.new("one"), sites.new("one")
    for _ in range(3):
        next(one.calls)
    assert sites.calls() == {"one": 3}
    sites.forget_calls()
    assert sites.calls() == {"one": 0}
    next(one.calls)
    next(other.calls)
    del one
    gc.collect()
    assert sites.calls() == {"one": 2}
    del other
    gc.collect()
    assert sites.calls() == {"one": 2}


def test_a_site_is_found_by_its_key() -> None:
    sites, ledger = Sites(), Ledger()
    made: list[Site] = []

    def make() -> Site:
        made.append(sites.new("block"))
        return made[-1]

    assert sites.find("key", make, ledger) is sites.find("key", make, ledger)
    assert len(made) == 1
    sites.forget()
    assert sites.find("key", make, ledger) is made[1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_counts_anew() -> None:
    sites = Sites()
    held = sites.new("forked")
    next(held.calls)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        sites.forget_calls()
        next(held.calls)
        next(held.calls)
        os.write(write, str(sites.calls()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100).decode() == "{'forked': 2}"
    assert sites.calls() == {"forked": 1}
