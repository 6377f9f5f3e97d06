"""Fixtures for the tests that need no device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from make_believe_graphs import Device


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Device:
    """The device of the CUDA Graph mode, which captures on the CPU."""
    from make_believe_graphs import Device  # which needs torch

    from gpu_timed.modes import torch_graphs

    device = Device()
    monkeypatch.setattr(torch_graphs, "Device", lambda *_: device)
    return device
