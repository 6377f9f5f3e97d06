"""One rank of two that sum by NCCL in a call in CUDA Graph mode. Prints one line of JSON about what happened."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.distributed as dist

from gpu_timed import CudaGraph, gpu_timed
from gpu_timed.testing import capture


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))

    @gpu_timed(name="summed", mode=CudaGraph(warmup=3, collectives=True))
    def summed(x: Any) -> Any:
        y = x * 1.0
        dist.all_reduce(y)
        return y * 0.5

    wrong = 0
    with capture() as records:
        for value in range(50):
            found = summed(torch.full((1024,), float(value + rank), device="cuda"))
            wrong += not torch.equal(found, torch.full((1024,), value + 0.5, device="cuda"))
    torch.cuda.synchronize()
    print(
        json.dumps(
            {
                "rank": rank,
                "wrong": wrong,
                "modes": [record.mode for record in records],
                "reasons": sorted({record.mode_reason for record in records}),
            }
        ),
        flush=True,
    )
    dist.destroy_process_group()  # which waits for ever for the end of graphs that hold a communicator


if __name__ == "__main__":
    main()
