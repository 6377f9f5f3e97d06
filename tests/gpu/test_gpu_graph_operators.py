"""Each operator that torch's own tests know, as a CUDA Graph, against itself. Needs one GPU and torch.

Samples come from ``torch.testing._internal.common_methods_invocations`` (private; torch 2.11 seen), which wants a
package ``expecttest`` of which nothing is used here.
"""

from __future__ import annotations

import random
import sys
import types
import unittest
from collections import Counter
from typing import Any

import pytest

from gpu_timed import CudaGraph, gpu_timed
from gpu_timed.testing import capture

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(400)]

PARTS = 4
SAMPLES = 2
UNTOLD = ("empty", "new_empty", "resize", "attention_forward")
"""In the names of what gives, or leaves, memory that nobody has written to."""


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what torch's own tests know of its operators."""
    if "expecttest" not in sys.modules:
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        stub.assert_expected_inline = None  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "expecttest", stub)
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ImportError as error:
        pytest.skip(f"torch's samples are not to be had: {error}")
    return [each for each in op_db if not any(said in each.name for said in UNTOLD)]


def copied(values: Any) -> Any:
    import torch
    from torch.utils import _pytree as pytree

    return pytree.tree_map(lambda one: one.detach().clone() if isinstance(one, torch.Tensor) else one, values)


def called(function: Any, given: Any) -> tuple[Any, str]:
    """Return what *function* gives, and what its arguments are then; or which error it raises."""
    import torch

    one, others, named = given
    with torch.no_grad():
        try:
            return (function(one, *others, **named), given), ""
        except Exception as error:
            return None, type(error).__name__


def alike(one: Any, other: Any) -> str:
    import torch
    from torch.utils import _pytree as pytree

    ones, spec = pytree.tree_flatten(one)
    others, other_spec = pytree.tree_flatten(other)
    if str(spec) != str(other_spec):
        return "nested in another way"
    for left, right in zip(ones, others, strict=True):
        try:
            if isinstance(left, torch.Tensor):
                torch.testing.assert_close(left, right, equal_nan=True, rtol=1e-5, atol=1e-6)
            elif left == left and left != right:  # noqa: PLR0124 - no NaN
                return f"{left} {right}"
        except AssertionError as error:
            return str(error)
    return ""


def tried(function: Any, sample: Any) -> tuple[str, str]:
    """Return in which mode the last call ran, and how any of them was another than without a mode."""
    import torch
    from torch.utils import _pytree as pytree

    def turned(one: Any) -> Any:
        floats = isinstance(one, torch.Tensor) and one.layout is torch.strided and one.is_floating_point()
        return one.flip(0) if floats and one.dim() else one

    f = gpu_timed(function, name="f", mode=CudaGraph(warmup=1))
    given = sample.input, sample.args, sample.kwargs
    with capture() as records:
        for index in range(4):
            values = pytree.tree_map(turned, given) if index == 3 else given
            mine, theirs = copied(values), copied(values)
            torch.manual_seed(index)
            expected, failed = called(function, theirs)
            torch.manual_seed(index)
            found, fails = called(f, mine)
            differs = fails if fails != failed else alike(expected, found) if not failed else ""
            if differs or failed:
                break
    torch.cuda.synchronize()
    return records[-1].mode, f"call {index} ({records[-1].mode}): {differs}" if differs else ""


@pytest.mark.parametrize("part", range(PARTS))
def test_an_operator_gives_and_changes_what_it_does_without_a_mode(operators: list[Any], part: int) -> None:
    import torch

    modes: Counter[str] = Counter()
    wrong: list[str] = []
    for operator in operators[part::PARTS]:
        dtypes = operator.dtypesIfCUDA or operator.dtypes
        dtype = next((each for each in (torch.float32, torch.int64, torch.bool) if each in dtypes), None)
        if dtype is None:
            continue
        samples = list(operator.sample_inputs("cuda", dtype, requires_grad=False))
        random.Random(0).shuffle(samples)
        for function in filter(None, (operator.op, operator.inplace_variant)):
            for sample in samples[:SAMPLES]:
                mode, differs = tried(function, sample)
                modes[mode] += 1
                if differs:
                    wrong.append(f"{operator.name} {operator.variant_test_name}: {differs}")
    print(dict(modes))
    assert not wrong, "\n".join(wrong)
    assert modes["cuda_graph"] > modes.total() / 2
