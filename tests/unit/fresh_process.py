"""Runs a piece of a test in a fresh process, where runtimes are imported after gpu_timed is at work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

_HEAD = """
    import json, sys, threading
    from gpu_timed import current, gpu_span, gpu_timed
    from gpu_timed.testing import capture
    gpu_timed(lambda: None, sync="deferred")()
    def show(records):
        print(json.dumps([{"name": r.name, "warmth": r.warmth, "tier": str(r.tier), "quality": r.quality,
            "reason": r.mode_reason, "compile_ns": r.compile_ns if isinstance(r.compile_ns, int) else None,
            "causes": [[c.probe, c.what, c.tier, c.detail] for c in r.causes]} for r in records]))
"""


def run(body: str, *, timeout_s: float = 110, **environment: str) -> list[list[dict[str, Any]]]:
    """Run *body* in a fresh process; return what each ``show(records)`` in it has shown."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(_HEAD) + textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[{") or line == "[]"]
