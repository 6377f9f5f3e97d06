"""Is a function launch-bound, and which mode pays? An answer with its evidence: in the terminal, and as a page.

pip install -e ".[compare,plots,torch]" && python examples/compare_modes.py

Without a GPU there is no mode to gain by: the graph says so, and two ways to write the same layer are compared.
"""

from __future__ import annotations

import torch

from gpu_timed import compare

PAGE = "gpu_timed-compare.html"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS, WIDTH, SECONDS = 12, 256, 2.0

torch.manual_seed(0)
weights = [torch.randn(WIDTH, WIDTH, device=DEVICE) / WIDTH**0.5 for _ in range(LAYERS)]


def make(batch: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, WIDTH, device=DEVICE),)


@torch.inference_mode()
def forward(x: torch.Tensor) -> torch.Tensor:
    """Launch two kernels a layer: at a small batch the host takes longer for that than the device for the work."""
    for weight in weights:
        x = torch.relu(x @ weight)
    return x


@torch.inference_mode()
def row_by_row(x: torch.Tensor) -> torch.Tensor:
    """Do the same for one row after the other."""
    return torch.cat([forward(row) for row in x.split(1)])


def main() -> None:
    modes = compare(forward, args=make, modes=("eager", "cuda_graph"), sweep={"batch": [1, 256]}, budget_s=SECONDS)
    print(modes.to_text())
    print(f"the same as a page: {modes.to_html(PAGE)}\n")

    ways = compare({"at once": forward, "row by row": row_by_row}, args=make(8), budget_s=SECONDS)
    print(ways.to_text())
    verdict = ways.verdict("row by row")
    print(f"row by row is {verdict.word}: {verdict.reason}")


if __name__ == "__main__":
    main()
