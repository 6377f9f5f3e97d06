"""What 4,000 unsynchronised launches look like from the host and from the device, as CSV and as a picture.

    python tests/perf/launch_queue.py [--csv FILE] [--plot FILE.png]

The device's launch queue fills after about a thousand entries; from then on every launch waits for one to
be taken out. A host timer shows a kernel that became slower; the device's own time shows that it did not.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
LAUNCHES, ROUNDS = 4000, 10_000


def measure() -> list[Any]:
    """Return the records of all launches, in order."""
    import torch
    from card_kernels import SIZE, cuda, numba_work

    from gpu_timed import gpu_timed
    from gpu_timed.testing import capture

    a = cuda.to_device(torch.ones(SIZE).numpy())
    launch = gpu_timed(numba_work, sync="deferred")[SIZE // 256, 256]
    for _ in range(10):
        launch(a, ROUNDS)
        cuda.synchronize()
    with capture(60) as records:
        for _ in range(LAUNCHES):
            launch(a, ROUNDS)
        cuda.synchronize()
    return sorted(records, key=lambda record: record.call_index)


def main() -> None:
    """Print a summary by the hundred, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    records = measure()
    host = [after.start_ns - before.start_ns for before, after in itertools.pairwise(records)]
    print("launches      host µs each   device µs    queue ms   launch_queue_full")
    for first in range(0, LAUNCHES, 250):
        part = records[first : first + 250]
        device, queue = (
            statistics.median(getattr(record, name) for record in part) for name in ("device_ns", "queue_ns")
        )
        each = statistics.median(host[first : first + 250])
        noted = sum("launch_queue_full" in record.quality for record in part)
        print(f"{first:>5}-{first + 249:<5} {each / 1e3:>14.1f} {device / 1e3:>11.1f} {queue / 1e6:>11.2f} {noted:>12}")
    noted = [index for index, record in enumerate(records) if "launch_queue_full" in record.quality]
    print(f"first noted at launch {noted[0] if noted else 'none'}")
    if options.csv:
        rows = [f"{r.call_index},{r.launch_ns},{r.device_ns},{r.queue_ns},{'|'.join(r.quality)}" for r in records]
        options.csv.write_text("\n".join(["launch,launch_ns,device_ns,queue_ns,quality", *rows]) + "\n")
    if options.plot:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt

        figure, axes = plt.subplots(figsize=(9, 4.5))
        axes.plot([each / 1e3 for each in host], ".", ms=2, label="host: from one launch to the next")
        axes.plot([r.device_ns / 1e3 for r in records], ".", ms=2, label="device")
        axes.set(
            xlabel="launch", ylabel="µs", yscale="log", title=f"{LAUNCHES} unsynchronised launches of one Numba kernel"
        )
        axes.legend()
        figure.savefig(options.plot, dpi=120)


if __name__ == "__main__":
    main()
