"""Decorate an inference function; every call becomes a span in a file, and a record that can be read in code.

pip install -e ".[demo]" && python examples/decorate.py
"""

from __future__ import annotations

import torch

from gpu_timed import configure, flush, gpu_timed
from gpu_timed.testing import capture

SPANS = "gpu_timed-spans.jsonl"  # OTLP JSON lines: Jaeger's UI takes this file under Search > Upload
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@torch.inference_mode()
@gpu_timed(attributes={"model": "two-layers"})  # waits for its own work: the numbers are there on return
def infer(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).softmax(-1)


def main() -> None:
    configure(service_name="decorate", exporter="jsonl", path=SPANS)
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 10)).to(DEVICE)
    batch = torch.randn(64, 512, device=DEVICE)

    with capture() as records:
        for _ in range(3):
            infer(model, batch)

    for record in records:
        print(f"{record.name}, call {record.call_index}{' (the first)' if record.first_call else ''} on {DEVICE}")
        print(f"  the host took      {record.launch_ns / 1e6:.3f} ms to launch it")
        if isinstance(record.device_ns, int):
            least, most = record.device_min_ns / 1e6, record.device_ns / 1e6
            print(
                f"  the device worked  {least:.3f} to {most:.3f} ms, after {record.queue_ns / 1e6:.3f} ms in the queue"
            )
        else:
            print(f"  no device time     {record.device_ns.reason}: a host time is never passed off as one")

    delivered = flush(10)
    print(f"{delivered.counts['exported']} spans in {SPANS}" if delivered else f"not delivered: {delivered}")


if __name__ == "__main__":
    main()
