"""Configuring the process: :func:`configure`. Optional; OpenTelemetry's global provider is used as it is."""

from __future__ import annotations

import os
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
    sync: SyncPolicy | None = None,
    late: LatePolicy | None = None,
    device_spans: bool | None = None,
    warmth: bool | None = None,
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
        exporter: ``otlp`` (HTTP; all of ``OTEL_EXPORTER_OTLP_*`` applies), ``jsonl`` (OTLP JSON lines, which
            Jaeger's UI can upload), ``console``, or ``none``.
        path: File for ``jsonl``; lines are appended.
        endpoint: Where ``otlp`` sends, such as ``http://localhost:4318``.
        sync: Sync policy where a site names none.
        late: Which span may be late where a site does not say.
        device_spans: Whether a second span shows the device's work.
        warmth: Whether compilers and caches are watched, to tell cold calls from warm ones. Set it before the
            first recorded call.
        max_pending: Spans that may wait for the device at once.
        max_queue: Finished spans that may wait to be handed on.
        poll_ms: Milliseconds between two looks at pending marks.
        exit_timeout_s: Seconds the end of the process may take to deliver what is left.

    Raises:
        ConfigurationError: A value cannot be used, or a provider is set already and ``exporter`` asks for another.
        MissingExtraError: The exporter's package is not installed; the message has the pip command.
    """
    if exporter is None:
        for option, value in (("service_name", service_name), ("path", path), ("endpoint", endpoint)):
            if value is not None:
                raise ConfigurationError(
                    f"{option}= needs exporter=: without one, spans go to the application's provider."
                )
    values = {
        "sync": sync,
        "late": late,
        "device_spans": device_spans,
        "warmth": warmth,
        "max_pending": max_pending,
        "max_queue": max_queue,
        "poll_ms": poll_ms,
        "exit_timeout_s": exit_timeout_s,
    }
    current.settings().with_values(**values)  # refuse before anything is changed
    if exporter is not None:
        current.install_exporter(exporter, service_name=service_name, path=path, endpoint=endpoint)
    current.set_settings(**values)
