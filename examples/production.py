"""What a service sets: never wait, sample whole traces, thin what is frequent, bound every queue, end with the truth.

    pip install -e ".[demo]" && python examples/production.py

All but ``every=`` can be set from outside, in the deployment: GPU_TIMED_* is ours, OTEL_* is OpenTelemetry's.
"""

from __future__ import annotations

import os

import torch
from opentelemetry import trace

from gpu_timed import configure, gpu_timed, shutdown

REQUESTS, STEPS = 100, 20
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# One trace in four, decided at its root and followed below it: what is left out touches no device.
os.environ.setdefault("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
os.environ.setdefault("OTEL_TRACES_SAMPLER_ARG", "0.25")
os.environ.setdefault("OTEL_BSP_MAX_QUEUE_SIZE", "8192")  # spans between two exports; beyond it the oldest are dropped

configure(
    service_name="production",
    exporter="jsonl",  # a service says "otlp"
    path="gpu_timed-spans.jsonl",
    sync="deferred",  # a call never waits for the device: a thread looks at the marks later
    max_pending=10_000,  # spans that may wait for the device; beyond it the device time is Missing("overflow")
    max_queue=100_000,  # finished spans that may wait to be handed on; beyond it they are dropped, and counted
    exit_timeout_s=5,  # what the end of the process may take, whatever the collector does
)
weights = torch.randn(128, 128, device=DEVICE)


@gpu_timed(name="step", every=10)  # a step is short and frequent: one in ten is recorded, all are counted
def step(state: torch.Tensor) -> torch.Tensor:
    return torch.tanh(state @ weights)


@gpu_timed(name="infer")
def infer(state: torch.Tensor) -> torch.Tensor:
    for _ in range(STEPS):
        state = step(state)
    return state


def main() -> None:
    tracer = trace.get_tracer("server")
    state = torch.randn(1, 128, device=DEVICE)
    for _ in range(REQUESTS):
        with tracer.start_as_current_span("request"):
            infer(state)

    result = shutdown(10)  # resolves what is pending, exports what is queued; at most 10 seconds
    print(f"{REQUESTS} requests of {STEPS} steps; {os.environ['OTEL_TRACES_SAMPLER_ARG']} of them sampled")
    print(f"delivered: {bool(result)}, pending: {result.pending}")
    for kind, count in sorted(result.counts.items()):  # anything dropped, lost or refused has its own line here
        print(f"  {kind:<16} {count}")


if __name__ == "__main__":
    main()
