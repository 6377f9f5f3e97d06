"""Keep the parent span across a thread pool and a process pool, with OpenTelemetry's own means.

pip install -e ".[demo]" && python examples/worker_pool.py
"""

from __future__ import annotations

import contextvars
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import torch
from opentelemetry import context, propagate

from gpu_timed import configure, flush, gpu_span, gpu_timed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@gpu_timed(name="embed", attributes=lambda batch: {"batch": batch})
def embed(batch: int) -> float:
    return float(torch.full((64, 64), batch, device=DEVICE).sum())


def start(role: str) -> None:
    """Set a process up: each has a provider and a file of its own."""
    configure(service_name=role, exporter="jsonl", path=f"gpu_timed-spans-{os.getpid()}.jsonl")


def in_process(carrier: dict[str, str], batch: int) -> bool:
    """Run in a worker process, under the span whose name tag came along."""
    token = context.attach(propagate.extract(carrier))
    try:
        embed(batch)
    finally:
        context.detach(token)
    # Worker processes of a pool end without running what is registered for exit: deliver now.
    return bool(flush(10))


def main() -> None:
    start("parent")
    with gpu_span("threads"), ThreadPoolExecutor(2) as threads:
        # A thread of a pool starts with an empty context. A copy for each task: one can be entered only once.
        tasks = [threads.submit(contextvars.copy_context().run, embed, batch) for batch in (1, 2)]
    print(f"threads: {[task.result() for task in tasks]}")

    # Spawned, not forked: a CUDA context does not survive a fork, and neither do threads.
    fresh = multiprocessing.get_context("spawn")
    with gpu_span("processes"), ProcessPoolExecutor(2, fresh, start, ("worker",)) as processes:
        carrier: dict[str, str] = {}
        propagate.inject(carrier)  # the W3C traceparent: text, so that it passes where a context cannot
        tasks = [processes.submit(in_process, carrier, batch) for batch in (3, 4)]
    print(f"processes: delivered {[task.result() for task in tasks]}, under traceparent {carrier['traceparent']}")
    print("delivered" if flush(10) else "not delivered")


if __name__ == "__main__":
    main()
