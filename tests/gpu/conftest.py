"""What every GPU test needs: a CUDA device, or it is skipped."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "perf"))

from own_process import OWN_PROCESS


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


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave such files, unless they are named, to ``test_own_process.py``, which runs each in a process of its own."""
    if collection_path.name not in OWN_PROCESS:
        return None
    named = {(config.invocation_params.dir / each.partition("::")[0]).resolve() for each in config.args}
    return None if collection_path.resolve() in named else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what attaches CUPTI, where it is named beside others, last: launches stay slower after it."""
    items.sort(key=lambda item: item.path.name in OWN_PROCESS)
