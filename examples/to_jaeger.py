"""Send spans to Jaeger, or to anything else that takes OTLP over HTTP, and say plainly whether they arrived.

    docker run --rm -p 16686:16686 -p 4318:4318 jaegertracing/jaeger:2.20.0
    pip install -e ".[demo]" && python examples/to_jaeger.py

Elsewhere than on this machine: OTEL_EXPORTER_OTLP_ENDPOINT=http://host:4318, with OTEL_EXPORTER_OTLP_HEADERS for a key.
"""

from __future__ import annotations

import logging
import os
import sys

import torch

from gpu_timed import configure, gpu_span, gpu_timed, shutdown

ENDPOINT = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOOK = """\
In Jaeger's UI (http://localhost:16686) choose service "to-jaeger", Find Traces, and open "generate":
  generate           the request: as long as its parts
    prefill, decode  host spans; gpu_timed.launch.duration_ns is what Python took to launch them
      decode [gpu]   the device's own span, where there is a GPU: gpu_timed.device.duration_ns, and min_ns below it
  decode is deferred: its bar ends when the device is done, and what the call itself took is in its launch duration
  search for tags, such as gpu_timed.first_call=true, to find the calls that load and initialise"""


@gpu_timed(name="prefill")
def prefill(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ x)


@gpu_timed(name="decode", sync="deferred")
def decode(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ x.T)


def main() -> int:
    # The exporter logs each retry with a stack trace; whether it got through is asked below.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    configure(service_name="to-jaeger", exporter="otlp", exit_timeout_s=1)
    with gpu_span("generate"):
        x = prefill(torch.randn(256, 256, device=DEVICE))
        for _ in range(3):
            x = decode(x)
    result = shutdown(3)  # seconds, whatever the receiver does
    if result:
        print(f"{result.counts['exported']} spans taken by {ENDPOINT}\n{LOOK}")
        return 0
    taken, made = (result.counts.get(kind, 0) for kind in ("exported", "batched"))
    print(f"{taken} of {made} spans were taken by {ENDPOINT} within 3 s: is Jaeger, or a collector, listening there?")
    return 1


if __name__ == "__main__":
    sys.exit(main())
