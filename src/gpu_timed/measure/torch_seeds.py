"""torch's sources of random numbers, on the host and on the devices that are in use. The leaf."""

from __future__ import annotations

from typing import Any

import torch


def seed(number: int) -> None:
    """Set all of them to *number*."""
    torch.manual_seed(number)


def states() -> list[Any]:
    """Return where they stand; initialises no device."""
    found = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found += torch.cuda.get_rng_state_all()
    return found


def put_back(found: list[Any]) -> None:
    """Have them stand where :func:`states` found them."""
    torch.set_rng_state(found[0])
    if len(found) > 1:
        torch.cuda.set_rng_state_all(found[1:])
