"""Versions of everything that takes part, read from package metadata: nothing is imported for it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from gpu_timed.findings import Finding, Level

OLDEST_TORCH: Final = (2, 6)
OLDEST_OPENTELEMETRY: Final = (1, 30)
_NUMPY_WITHOUT_ROW_STACK: Final = (2, 5)
_LAST_NUMBA_CUDA_WITH_ROW_STACK: Final = (0, 30, 4)
_REQUIRED: Final = ("opentelemetry-api", "opentelemetry-sdk", "wrapt")
_OPTIONAL: Final = ("torch", "triton", "numba", "numba-cuda", "cupy", "jax", "numpy", "nvidia-ml-py")
_CUPY: Final = ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy")

Installed = Callable[[str], str | None]


class TorchBuild(NamedTuple):
    """What torch was built for: versions, or None."""

    cuda: str | None
    hip: str | None


def findings(
    version: str,
    *,
    driver_version: str | None,
    driver_cuda: tuple[int, int] | None,
    device_present: bool,
    installed: Installed | None = None,
    torch_build: Callable[[], TorchBuild | None] | None = None,
) -> Iterator[Finding]:
    """Report every version, and combinations that are known not to work.

    Args:
        version: gpu_timed's own.
        driver_version: Of the kernel driver, where it could be read.
        driver_cuda: The newest CUDA that the driver runs, or None without a driver.
        device_present: Whether the machine has a driver and a device node.
        installed: Returns the version of a distribution, or None.
        torch_build: Returns what the installed torch was built for.
    """
    installed = installed or installed_version
    torch_build = torch_build or read_torch_build
    yield Finding("python", "ok", f"Python {platform.python_version()}", values={"version": platform.python_version()})
    yield Finding("gpu_timed", "ok", f"gpu_timed {version}", values={"version": version})
    for name in _REQUIRED:
        yield _required(name, installed(name))
    found = {name: installed(name) for name in _OPTIONAL}
    found["cupy"] = next((held for held in map(installed, _CUPY) if held), None)
    build = torch_build() if found["torch"] else None
    for name, held in found.items():
        if name == "torch" and held:
            yield from _torch(held, build, driver_cuda, device_present=device_present)
        else:
            text = f"{name} {held}" if held else f"{name} is not installed"
            yield Finding(name, "ok", text, values={"version": held})
    yield _driver(driver_version, driver_cuda)
    yield from _combinations(found)


def installed_version(name: str) -> str | None:
    """Return the version of the distribution *name*, or None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def read_torch_build(version_file: Path | None = None) -> TorchBuild | None:
    """Return what torch was built for, from the text of its ``version.py``; None where that cannot be read."""
    if version_file is None:
        try:
            spec = importlib.util.find_spec("torch")
        except ValueError:  # half imported
            return None
        if spec is None or not spec.origin:
            return None
        version_file = Path(os.path.dirname(spec.origin)) / "version.py"  # noqa: PTH120 - origin is a text
    try:
        text = version_file.read_text(encoding="utf-8")
    except OSError:
        return None
    return TorchBuild(*(_assigned(text, name) for name in ("cuda", "hip")))


def parse(version: str) -> tuple[int, ...]:
    """Return the leading numbers of *version*: ``2.11.0+cu130`` is ``(2, 11, 0)``."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _assigned(text: str, name: str) -> str | None:
    match = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def _required(name: str, held: str | None) -> Finding:
    values = {"version": held}
    if held is None:
        return Finding(name, "problem", f"{name} is not installed", f"pip install {name}", values)
    if name.startswith("opentelemetry") and parse(held) < OLDEST_OPENTELEMETRY:
        return Finding(
            name,
            "problem",
            f"{name} {held} is older than 1.30, the oldest that works",
            f"pip install -U {name}",
            values,
        )
    return Finding(name, "ok", f"{name} {held}", values=values)


def _torch(
    held: str, build: TorchBuild | None, driver_cuda: tuple[int, int] | None, *, device_present: bool
) -> Iterator[Finding]:
    values = {"version": held, "cuda": build and build.cuda, "hip": build and build.hip}
    if build is None:
        made = "; what it was built for could not be read"
    elif build.cuda:
        made = f", built for CUDA {build.cuda}"
    else:
        made = ", built for ROCm" if build.hip else ", built without CUDA"
    level: Level = "ok"
    fix = ""
    text = f"torch {held}{made}"
    if parse(held) < OLDEST_TORCH:
        level, fix = "problem", "pip install -U 'torch>=2.6'"
        text += ": older than 2.6, the oldest that works"
    elif build is not None and build.hip:
        level, text = "warning", text + ": its device times are not measured, only those of NVIDIA GPUs are"
    elif build is not None and not build.cuda and device_present:
        level = "problem"
        text += ", but there is a GPU here: torch will not use it, and no device time can be measured"
        fix = "install a torch built for CUDA: https://pytorch.org/get-started/locally"
    yield Finding("torch", level, text, fix, values)
    if build is not None and build.cuda and driver_cuda and parse(build.cuda)[:1] > driver_cuda[:1]:
        yield Finding(
            "torch_and_driver",
            "problem",
            f"torch is built for CUDA {build.cuda}, and the driver runs CUDA up to {_dotted(driver_cuda)}: "
            "torch will find no GPU",
            f"update the NVIDIA driver, or install a torch built for CUDA {driver_cuda[0]}: "
            "https://pytorch.org/get-started/locally",
            {"torch_cuda": build.cuda, "driver_cuda": _dotted(driver_cuda)},
        )


def _driver(version: str | None, cuda: tuple[int, int] | None) -> Finding:
    values = {"version": version, "cuda": _dotted(cuda) if cuda else None}
    if cuda is None:
        return Finding("driver", "ok", "no NVIDIA driver", values=values)
    return Finding(
        "driver", "ok", f"NVIDIA driver {version or 'of unknown version'}, CUDA up to {_dotted(cuda)}", values=values
    )


def _combinations(found: dict[str, str | None]) -> Iterator[Finding]:
    numpy, numba_cuda = found["numpy"], found["numba-cuda"]
    if (
        numpy
        and numba_cuda
        and parse(numpy) >= _NUMPY_WITHOUT_ROW_STACK
        and parse(numba_cuda) <= _LAST_NUMBA_CUDA_WITH_ROW_STACK
    ):
        yield Finding(
            "numpy_and_numba_cuda",
            "warning",
            f"numba-cuda {numba_cuda} calls numpy.row_stack, which numpy {numpy} no longer has: kernels do not compile",
            "pip install 'numpy<2.5', or a newer numba-cuda",
            {"numpy": numpy, "numba_cuda": numba_cuda},
        )


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
