"""What the resource of ``configure(exporter=…)`` says about this process: host, process, service, rank.

Everything is read from the operating system and the environment. No device is asked and no process group
is made: the GPU stands on the spans (``hw.id``), and launchers say the rank in variables.
"""

from __future__ import annotations

import os
import socket
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from opentelemetry.sdk.resources import OTELResourceDetector, ProcessResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider

RANK: Final = "gpu_timed.rank"
"""Rank of this process among all of the job."""
LOCAL_RANK: Final = "gpu_timed.local_rank"
"""Rank of this process among those of this machine."""
WORLD_SIZE: Final = "gpu_timed.world_size"
"""How many processes the job has."""

_LAUNCHERS: Final[Mapping[str, tuple[str, ...]]] = {  # torchrun first: it may run inside the other two
    RANK: ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"),
    LOCAL_RANK: ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"),
    WORLD_SIZE: ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"),
}
# Of what the SDK's detector finds. The command line and the user's name may be nobody else's business.
_PROCESS: Final = (
    "process.pid",
    "process.parent_pid",
    "process.runtime.name",
    "process.runtime.version",
    "process.runtime.description",
)
_INSTANCE: Final = "service.instance.id"


def make(service_name: str | None) -> Resource:
    """Return the resource: what is known of host, process and rank, under whatever ``OTEL_*`` says.

    Jaeger takes spans whose resource names no host for spans of another machine and "corrects" their
    clock; so the host is always named.
    """
    found = Resource({**_host(), **_of_this_process(os.environ)})
    return found.merge(Resource.create({"service.name": service_name} if service_name else {}))


def renew(provider: TracerProvider) -> None:
    """In a forked child: let *provider* name this process, not its parent. What ``OTEL_*`` says stays."""
    said = OTELResourceDetector().detect().attributes
    mine = Resource({name: value for name, value in _of_this_process(os.environ).items() if name not in said})
    update = getattr(provider, "_update_resource", None)  # sdk 1.45: reaches the tracers that exist as well
    if update is not None:
        update(mine)
    else:
        provider._resource = provider.resource.merge(mine)  # noqa: SLF001 - for the tracers made from now on


def ranks(environment: Mapping[str, str]) -> dict[str, int]:
    """Return the ranks that torchrun, Slurm or Open MPI have written into *environment*; none that is unreadable."""
    found = {}
    for name, variables in _LAUNCHERS.items():
        for variable in variables:
            text = environment.get(variable, "").strip()
            if text.isascii() and text.isdigit():
                found[name] = int(text)
                break
    return found


def _host() -> dict[str, Any]:
    held = {"host.name": socket.gethostname()}
    machine = Path("/etc/machine-id")
    if machine.is_file():
        held["host.id"] = machine.read_text().strip() or held["host.name"]
    return held


def _of_this_process(environment: Mapping[str, str]) -> dict[str, Any]:
    detected = ProcessResourceDetector().detect().attributes
    held: dict[str, Any] = {name: detected[name] for name in _PROCESS if name in detected}
    if sys.executable:  # not the SDK's: that of 1.30 takes the path for the name, and the folder for the path
        held["process.executable.name"] = Path(sys.executable).name
        held["process.executable.path"] = sys.executable
    held[_INSTANCE] = str(uuid.uuid4())
    return {**held, **ranks(environment)}
