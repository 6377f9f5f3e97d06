"""Whether the blocks of an arm are alike: where they are not, its figures are those of some blocks, and it is said."""

from __future__ import annotations

from typing import Final

from gpu_timed.arms import Arm
from gpu_timed.record import Missing

UNLIKE: Final = 2.0
"""Block medians are unlike where nine in ten of them are below more than so many times what one in ten is below."""
_FEWEST: Final = 3
_BUSY_HOST: Final = 1.0
"""Load for each CPU from which on others wait for one."""


def varies(arm: Arm) -> float:
    """Return by which factor the wall time of a call varies from block to block: p90 over p10 of the block medians.

    1 where there are fewer than three blocks, or a time is 0.
    """
    held = sorted(arm.samples.block_medians(arm.samples.wall_ns))
    if len(held) < _FEWEST or held[0] <= 0:
        return 1.0
    last = len(held) - 1
    return held[round(0.9 * last)] / held[round(0.1 * last)]


def unsteady(arms: tuple[Arm, ...], load: float | Missing, *, on_cpu: bool) -> list[str]:
    """Return a sentence about the arms whose calls vary more than :data:`UNLIKE`-fold from block to block, if any do.

    Args:
        arms: All of them.
        load: Load average for each CPU of the host.
        on_cpu: Whether torch computes on the host.
    """
    found = [(arm.name, factor) for arm in arms if len(arm.samples) and (factor := varies(arm)) > UNLIKE]
    if not found:
        return []
    each = ", ".join(f"those of {name} {factor:.1f}-fold" for name, factor in found)
    said = f"Calls vary from block to block, {each}: their times are those of a typical block, and say little"
    if isinstance(load, float) and load > _BUSY_HOST:
        said += f"; the host's load is {load:.1f} for each CPU, so others compete for it"
    return [f"{said}.{_THREADS if on_cpu else ''}"]


_THREADS: Final = " Where torch computes on the CPU, OMP_NUM_THREADS=1 often steadies it."
