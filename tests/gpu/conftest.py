"""What every GPU test needs: a CUDA device, or it is skipped."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "perf"))


@pytest.fixture(autouse=True)
def _cuda() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(scope="session")
def spin() -> Any:
    """A kernel of known duration."""
    pytest.importorskip("cupy")
    from workloads import Spin

    return Spin()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what attaches CUPTI last: launches stay slower after it."""
    items.sort(key=lambda item: "test_placement" in item.nodeid or "test_gpu_cupti" in item.nodeid)
