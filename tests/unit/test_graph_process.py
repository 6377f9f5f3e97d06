"""What a mode may do to a process that serves traffic, apart from a wrong answer: end it, hang it, fill it, hold it up."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_timed import CudaGraph, gpu_timed
from gpu_timed.testing import capture

torch = pytest.importorskip("torch")
from make_believe_graphs import Device  # noqa: E402
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402

from gpu_timed.modes import torch_graphs  # noqa: E402
from gpu_timed.modes.torch_watching import Watch, key_of  # noqa: E402

GRAPH = CudaGraph(warmup=1)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch_graphs, "Device", lambda *_: device)
    return device


def two(*values: float) -> Any:
    return torch.tensor(values or (1.0, 2.0))


# -- tensors that are made of others ----------------------------------------------------------------------


def test_what_is_changed_of_a_tensor_made_of_others_are_its_parts(graphs: Device) -> None:
    """Such a tensor (DTensor, a quantised weight) has no memory: to set that aside would be to read at address 0."""
    state = TwoTensor(torch.zeros(2), torch.zeros(2))
    with Watch(lambda _: True, 1 << 20) as watch:
        state.add_(1)
    assert set(watch.changed) == {key_of(state.a), key_of(state.b)}
    assert not watch.blocked

    def f(a: Any) -> Any:
        state.add_(a)
        return a + state.a

    f = gpu_timed(name="f", mode=GRAPH)(f)
    with capture() as records:
        for call in range(5):
            assert f(torch.ones(2)).tolist() == [call + 3.0] * 2
    assert [record.mode for record in records] == ["eager"] * 2 + ["cuda_graph"] * 3
    assert state.b.tolist() == [6.0, 6.0]
