"""The design's budgets, with what this machine makes of them: one command, one table, one JSON.

    python tests/perf/budgets.py [--quick] [--only overhead,replay] [--within SECONDS] [--json FILE]

Runs the scripts beside it, each in a process of its own, one after the other, and holds what they say against the
budgets. ``--quick`` takes short forms of all of them, some 200 s on a card, and is good for order of magnitude; the
full forms take some 30 minutes, of which placement is 8: with ``--only`` they are run by parts, and a JSON that is
there already keeps the parts that are not run again. What a card is needed for is left out where there is none.

A verdict is ``met``, ``missed``, ``not shown`` (measured, but too coarsely to say) or why there is none. Below the
table it is said of what is missed where the time goes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from budget_rows import NEEDS_A_CARD, Found, rows, show
from surroundings import environment

from gpu_timed.clocks import cuda_driver

HERE = Path(__file__).parent


class Part(NamedTuple):
    """A script, and how it is called."""

    script: str
    full: Sequence[str] = ()
    quick: Sequence[str] = ()
    card: bool = True
    within_s: float = 590.0
    """Longer than this it is not waited for."""


PARTS: dict[str, Part] = {
    "overhead": Part("overhead.py", (), ("--rounds", "8"), card=False),
    "replay": Part("steps.py", ("--decode", "0"), ("--decode", "0", "--replays", "12000")),
    "decode": Part("steps.py", ("--replays", "0"), ("--replays", "0", "--decode", "240")),
    "intervals": Part("intervals.py", (), ("--spans", "1200")),
    "placement": Part("placement.py", (), ("--minutes", "0.4", "--pause-s", "4")),
    "soak_gpu": Part("soak.py", ("--gpu", "--seconds", "300"), ("--gpu", "--seconds", "24")),
    "threads": Part("threads.py", ("--rounds", "1"), ("--rounds", "1", "--spans", "400"), card=False),
    "soak": Part(
        "soak.py", ("--spans", "1000000"), ("--spans", "60000", "--piece", "20000", "--warm-up", "20000"), card=False
    ),
}


DISABLED = "import json, gpu_timed; f = lambda: 1; print(json.dumps({'same': gpu_timed.gpu_timed(f) is f}))"


def run(part: Part, arguments: Sequence[str], within_s: float, folder: Path) -> Found:
    """Run a script; return its JSON, or under ``absent`` why there is none."""
    file = folder / f"{part.script}.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / part.script), *arguments, "--json", str(file)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False)
    except subprocess.TimeoutExpired:
        return {"absent": f"not done within {within_s:.0f} s"}
    broken = done.returncode not in (0, 1) or "Traceback (most recent call last)" in done.stderr  # 1: it found faults
    if broken or not file.exists():
        lines = (done.stderr or done.stdout).strip().splitlines()
        return {"absent": f"failed: {lines[-1][:200] if lines else f'exit code {done.returncode}'}"}
    text = file.read_text(encoding="utf-8")
    if part.script == "soak.py":  # a line for each look
        return {"looks": [json.loads(line) for line in text.splitlines()]}
    found: Found = json.loads(text)
    return found


def run_disabled() -> Found:
    """Ask a process in which gpu_timed is disabled what its decorator returns."""
    asked = [sys.executable, "-c", DISABLED]
    done = subprocess.run(
        asked, env={**os.environ, "GPU_TIMED_DISABLED": "1"}, capture_output=True, text=True, timeout=60, check=False
    )
    return json.loads(done.stdout) if done.returncode == 0 else {"absent": f"failed: {done.stderr[-200:]}"}


def measure(names: Sequence[str], options: argparse.Namespace) -> Iterator[tuple[str, Found]]:
    """Run the parts of these *names*, one after the other, as far as the time goes."""
    ends = time.monotonic() + options.within
    card = cuda_driver.device_present()
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            began = time.monotonic()
            if name == "disabled":
                found = run_disabled()
            elif PARTS[name].card and not card:
                found = {"absent": NEEDS_A_CARD}
            elif began >= ends:
                found = {"absent": "no time left"}
            else:
                part = PARTS[name]
                arguments = part.quick if options.quick else part.full
                found = run(part, arguments, min(part.within_s, ends - began), Path(folder))
            took = time.monotonic() - began
            print(f"{name}: {took:.0f} s {found.get('absent', '')}", file=sys.stderr, flush=True)
            yield name, found | {"quick": options.quick, "took_s": round(took, 1)}


def main() -> None:
    """Measure, print the table, and write it as JSON if asked."""
    every = ["disabled", *PARTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default=",".join(every), help=f"some of {','.join(every)}")
    parser.add_argument("--within", type=float, help="seconds for everything; quick: 240, else without end")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.within = options.within or (240.0 if options.quick else float("inf"))
    names = [name for name in options.only.split(",") if name]
    if unknown := [name for name in names if name not in every]:
        parser.error(f"--only knows {', '.join(every)}, not {', '.join(unknown)}")
    held: Found = {}
    if options.json and options.json.exists():
        held = json.loads(options.json.read_text(encoding="utf-8")).get("parts", {})
    here = environment()
    for name, found in measure(names, options):
        if "absent" not in found or name not in held:
            held[name] = found
        where = found.get("environment", {})
        here |= {key: where[key] for key in ("card", "driver", "torch", "cuda") if key in where}
        if options.json:  # after each: what is cut short keeps what it has
            made = [row._asdict() for row in rows(held)]
            text = json.dumps({"environment": here, "rows": made, "parts": held}, indent=1)
            options.json.write_text(text, encoding="utf-8")
    print(here, "\n")
    show(rows(held))


if __name__ == "__main__":
    main()
