"""How much memory of the device is held, as the driver sees it. The leaf: torch is imported here."""

from __future__ import annotations

import torch

from gpu_timed.record import Measured, Missing


def held() -> Measured:
    """Return the bytes that are taken of the current device, after torch has given back what it does not need.

    By whoever: graphs and compiled code hold memory that torch does not count, and so may other processes.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return Missing("no_device")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return int(total - free)
