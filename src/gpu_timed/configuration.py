"""Configuring the process: :func:`configure`. Optional; OpenTelemetry's global provider is used as it is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from gpu_timed import current
from gpu_timed.errors import ConfigurationError
from gpu_timed.settings import LatePolicy, SyncPolicy


def configure(
    *,
    service_name: str | None = None,
    exporter: Literal["otlp", "jsonl", "console", "none"] | None = None,
    path: str | os.PathLike[str] | None = None,
    endpoint: str | None = None,
    protocol: Literal["http/protobuf", "grpc"] | None = None,
    headers: Mapping[str, str] | None = None,
    mode: str | None = None,
    sync: SyncPolicy | None = None,
    late: LatePolicy | None = None,
    device_spans: bool | None = None,
    warmth: bool | None = None,
    module_loads: bool | None = None,
    vitals: bool | None = None,
    vitals_interval_s: float | None = None,
    max_pending: int | None = None,
    max_queue: int | None = None,
    poll_ms: float | None = None,
    exit_timeout_s: float | None = None,
) -> None:
    """Set the process up. What is left out keeps its value; spans already open keep theirs.

    With ``exporter`` a tracer provider is made of OpenTelemetry's own parts and set as the global one, so
    that the application's spans go the same way. Without it nothing global is touched: spans go to the
    provider that the application sets, before or after this call.

    Args:
        service_name: ``service.name`` of the resource; needs ``exporter``. ``OTEL_SERVICE_NAME`` works too.
        exporter: ``otlp`` (to a collector; all of ``OTEL_EXPORTER_OTLP_*`` applies), ``jsonl`` (OTLP JSON
            lines, which Jaeger's UI can upload), ``console``, or ``none``.
        path: File for ``jsonl``; lines are appended.
        endpoint: Where ``otlp`` sends. Over HTTP a URL, such as ``http://localhost:4318``; ``/v1/traces`` is put
            on where it has no path. Over gRPC host and port, ``localhost:4317``: encrypted unless the host is
            this machine, ``OTEL_EXPORTER_OTLP_INSECURE`` is true, or ``http://`` stands before it.
        protocol: How ``otlp`` sends: ``http/protobuf``, or ``grpc``, which needs the extra ``otlp-grpc`` and
            survives no fork once it has sent. Left out, it is ``OTEL_EXPORTER_OTLP_TRACES_PROTOCOL``, else
            ``OTEL_EXPORTER_OTLP_PROTOCOL``, else ``http/protobuf``.
        headers: Headers that ``otlp`` sends, over those of ``OTEL_EXPORTER_OTLP_HEADERS``.
        mode: Modes of sites by name, over those in the code: ``decode*=cuda_graph,prefill=compile``; the first that
            matches holds, and a mode alone is for every site. An empty text takes them back.
        sync: Sync policy where a site names none.
        late: Which span may be late where a site does not say.
        device_spans: Whether a second span shows the device's work.
        warmth: Whether compilers and caches are watched, to tell cold calls from warm ones. Set it before the
            first recorded call.
        module_loads: Whether CUDA modules that are loaded in a call are told among its causes: what an eager first
            call waits for. Set it before the first recorded call. Needs the extra ``cupti``, and CUPTI for itself: no
            Nsight, and no ``torch.profiler`` of CUDA, beside it. ``diagnose()`` says whether it works.
        vitals: Whether the machine's state (clocks, throttling, power, load) is read in the background, and put
            on spans. Set it before the first recorded call. The GPU's part needs the extra ``nvml``.
        vitals_interval_s: Seconds between two such readings; 0 switches them off.
        max_pending: Spans that may wait for the device at once.
        max_queue: Finished spans that may wait to be handed on.
        poll_ms: Milliseconds between two looks at pending marks. Each look takes the interpreter from the application.
        exit_timeout_s: Seconds the end of the process may take to deliver what is left.

    Raises:
        ConfigurationError: A value cannot be used, or a provider is set already and ``exporter`` asks for another.
        MissingExtraError: The exporter's package is not installed; the message has the pip command.
    """
    if exporter is None:
        for option, value in (
            ("service_name", service_name),
            ("path", path),
            ("endpoint", endpoint),
            ("protocol", protocol),
            ("headers", headers),
        ):
            if value is not None:
                raise ConfigurationError(
                    f"{option}= needs exporter=: without one, spans go to the application's provider."
                )
    values = {
        "mode": mode,
        "sync": sync,
        "late": late,
        "device_spans": device_spans,
        "warmth": warmth,
        "module_loads": module_loads,
        "vitals": vitals,
        "vitals_interval_s": vitals_interval_s,
        "max_pending": max_pending,
        "max_queue": max_queue,
        "poll_ms": poll_ms,
        "exit_timeout_s": exit_timeout_s,
    }
    current.settings().with_values(**values)  # refuse before anything is changed
    if exporter is not None:
        current.install_exporter(
            exporter, service_name=service_name, path=path, endpoint=endpoint, protocol=protocol, headers=headers
        )
    current.set_settings(**values)
