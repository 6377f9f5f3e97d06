"""``python -m gpu_timed``: the same as the ``gpu-timed`` command, with an interpreter and flags of one's choice."""

from __future__ import annotations

from gpu_timed.cli.main import main

main()
