"""Devices: what the process can see and open, or plainly why it sees none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from gpu_timed.findings import DeviceFacts, Finding, Inventory

NO_DEVICE_WORDS: Final = 'spans show host times, and Missing("no_device") in place of device times'
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


def findings(inventory: Inventory, environment: Mapping[str, str], *, driver_present: bool) -> Iterator[Finding]:
    """Report every device of *inventory*, or why it has none.

    Args:
        inventory: What was found.
        environment: For ``CUDA_VISIBLE_DEVICES``, which hides devices.
        driver_present: Whether the driver's library could be loaded.
    """
    if not inventory.devices:
        yield _none(inventory, environment, driver_present=driver_present)
    for device in inventory.devices:
        yield _device(device, inventory.driver_version)
    if inventory.devices and environment.get(_VISIBLE):
        yield Finding(
            "visible_devices",
            "note",
            f"{_VISIBLE}={environment[_VISIBLE]} says which devices this process sees, and in which order",
            values={"value": environment[_VISIBLE]},
        )
    if inventory.source == "nvml":
        yield Finding(
            "order",
            "note",
            "the CUDA driver is not initialised in this process, and asking must not do it: "
            "indices are NVML's, which may differ from CUDA's",
        )
    if inventory.devices and inventory.nvml:
        yield Finding(
            "nvml",
            "note",
            f"NVML cannot be asked ({inventory.nvml}): whether a device is a MIG instance is not known for certain",
            "pip install 'gpu-timed[nvml]'",
        )


def _none(inventory: Inventory, environment: Mapping[str, str], *, driver_present: bool) -> Finding:
    values = {"absent": inventory.absent}
    visible = environment.get(_VISIBLE)
    if inventory.absent == "not_initialised":
        return Finding(
            "none",
            "note",
            "this process has not initialised CUDA, and asking for devices must not do it; "
            "`gpu-timed doctor` in a process of its own shows them",
            values=values,
        )
    if not driver_present:
        return Finding(
            "none",
            "warning",
            f"there is no GPU that this process can use (no NVIDIA driver): {NO_DEVICE_WORDS}",
            "on a machine with a GPU: install its driver, or start the container with --gpus all",
            values,
        )
    if visible is not None and inventory.absent == "no_device":
        return Finding(
            "none",
            "problem",
            f"{_VISIBLE}={visible!r} leaves this process no GPU: {NO_DEVICE_WORDS}",
            f"unset {_VISIBLE}, or name a device that is there (nvidia-smi -L lists them)",
            values,
        )
    if inventory.absent == "no_device":
        return Finding(
            "none",
            "warning",
            f"there is no GPU that this process can use (a driver, but no device): {NO_DEVICE_WORDS}",
            "on a machine with a GPU: start the container with --gpus all, and look at nvidia-smi",
            values,
        )
    return Finding(
        "none",
        "problem",
        f"the NVIDIA driver is there and does not start ({inventory.absent}): {NO_DEVICE_WORDS}",
        "run nvidia-smi: library and kernel module may be of different versions, or a reboot is due",
        values,
    )


def _device(device: DeviceFacts, driver_version: str | None) -> Finding:
    values = {
        "index": device.index,
        "uuid": device.uuid,
        "name": device.name,
        "memory_bytes": device.memory_bytes,
        "compute_mode": device.compute_mode,
        "mig": device.mig,
        "in_use": device.in_use,
        "driver_version": driver_version,
    }
    parts = [f"{device.index}: {device.name or 'of unknown name'}"]
    if device.mig:
        parts.append("a MIG instance")
    if device.memory_bytes is not None:
        parts.append(f"{device.memory_bytes / 2**30:.0f} GiB")
    parts.append(device.uuid or "UUID unknown")
    if device.compute_mode not in ("default", "unknown"):
        parts.append(f"compute mode {device.compute_mode}")
    if device.in_use:
        parts.append("in use by this process")
    text, key = ", ".join(parts), f"device.{device.index}"
    if device.compute_mode == "prohibited":
        return Finding(
            key, "problem", f"{text}: no process may open it", f"sudo nvidia-smi -i {device.index} -c DEFAULT", values
        )
    return Finding(key, "ok", text, values=values)
