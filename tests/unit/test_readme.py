"""README's code runs as it stands there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gpu_timed import flush

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)


def test_readme_has_the_blocks_that_are_run_here() -> None:
    """Four blocks: ten lines, ways to use it, comparing, in your tests. A fifth needs a test of its own."""
    assert len(BLOCKS) == 4


def test_the_ten_lines_write_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block ends with three spans in the file it names."""
    pytest.importorskip("torch")
    pytest.importorskip("opentelemetry.exporter.otlp.json.file")
    monkeypatch.chdir(tmp_path)
    exec(BLOCKS[0].replace("4096, 4096", "8, 8"), {"__name__": "readme"})
    assert flush(10)
    lines = [json.loads(line) for line in (tmp_path / "spans.jsonl").read_text().splitlines()]
    spans = [span for line in lines for scope in line["resourceSpans"][0]["scopeSpans"] for span in scope["spans"]]
    assert [span["name"] for span in spans if not span["name"].endswith("[gpu]")] == ["infer"] * 3


def test_the_ways_to_use_it_run(device: Any) -> None:
    """The second block decorates, opens a block and reads its record."""
    held: dict[str, Any] = {"__name__": "readme", "launch": lambda: device.launch(2_000)}
    exec(BLOCKS[1], held)
    assert held["record"].device_ns == 0
    exec(BLOCKS[1].replace("step(1)", "launch()"), held)
    assert held["record"].device_ns == 2_000


def test_the_comparison_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third block compares, and says why it cannot where there is no CUDA device."""
    torch = pytest.importorskip("torch")
    for needed in ("scipy", "matplotlib", "rich"):
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    short = BLOCKS[2].replace(', "reduce-overhead"', "").replace("modes=", "budget_s=0.5, modes=")
    assert short.count("budget_s=0.5") == 1
    held: dict[str, Any] = {"__name__": "readme", "step": lambda x: x @ x, "x": torch.ones(64, 64)}
    exec(short, held)
    result = held["result"]
    assert result.arm("eager").samples.wall_ns
    if not torch.cuda.is_available():
        assert "no CUDA device" in result.verdict("cuda_graph").reason
    assert (tmp_path / "found.html").read_text()[:15].lower() == "<!doctype html>"


def test_the_testing_snippet_holds() -> None:
    """The fourth block's own assertion is true."""
    exec(BLOCKS[3], {"__name__": "readme"})
