"""The files that need CUPTI, each in a process of its own. Needs one GPU, torch, CuPy and cupti-python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from own_process import OWN_PROCESS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize("file", sorted(OWN_PROCESS))
def test_passes_in_a_process_of_its_own(file: str) -> None:
    pytest.importorskip("cupti")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "gpu",
            "-q",
            "-rs",
            "-p",
            "no:cacheprovider",
            Path(__file__).with_name(file),
        ],
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    print(done.stdout[-20_000:], done.stderr[-3_000:])
    assert done.returncode == 0
