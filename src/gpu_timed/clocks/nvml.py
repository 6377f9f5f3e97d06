"""What NVML says of the devices: it needs no context, and tells MIG instances by their own UUIDs.

Public names of ``nvidia-ml-py`` (12 and later), which is an extra: ``pynvml.nvmlInit`` … as used below.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, Final

from gpu_timed.findings import DeviceFacts, Inventory

COMPUTE_MODES: Final = {0: "default", 1: "exclusive", 2: "prohibited", 3: "exclusive"}
"""As NVML and the CUDA driver number them; 1 was a thread's exclusive use, until CUDA 8."""


def inventory() -> Inventory:
    """Return all devices and MIG instances of the machine. Never raises: ``nvml`` says why there are none."""
    try:
        pynvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return Inventory(nvml="nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Inventory(nvml=str(error))
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        devices = tuple(_devices(pynvml))
        return Inventory(devices=devices, source="nvml" if devices else "none", driver_version=driver)
    except pynvml.NVMLError as error:
        return Inventory(nvml=str(error))
    finally:
        pynvml.nvmlShutdown()


def _devices(pynvml: Any) -> Iterator[DeviceFacts]:
    index = 0
    for number in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(number)
        mode = COMPUTE_MODES.get(_asked(pynvml, "nvmlDeviceGetComputeMode", handle), "unknown")
        instances = list(_instances(pynvml, handle))
        for held in instances or [handle]:
            memory = _asked(pynvml, "nvmlDeviceGetMemoryInfo", held)
            uuid = _asked(pynvml, "nvmlDeviceGetUUID", held)
            name = _asked(pynvml, "nvmlDeviceGetName", held) or _asked(pynvml, "nvmlDeviceGetName", handle)
            yield DeviceFacts(
                index=index,
                uuid=_text(uuid) if uuid else None,
                name=_text(name) if name else None,
                memory_bytes=int(memory.total) if memory is not None else None,
                compute_mode=mode,
                mig=bool(instances),
            )
            index += 1


def _instances(pynvml: Any, handle: Any) -> Iterator[Any]:
    mode = _asked(pynvml, "nvmlDeviceGetMigMode", handle)  # not supported: a device without MIG
    if mode is None or not mode[0]:
        return
    for slot in range(_asked(pynvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        try:
            yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
        except pynvml.NVMLError:  # an empty slot
            continue


def _asked(pynvml: Any, question: str, handle: Any) -> Any:
    """Return the answer, or None where this device, or this driver, has none."""
    try:
        return getattr(pynvml, question)(handle)
    except (AttributeError, pynvml.NVMLError):
        return None


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
