"""For the doctor: which provider there is, and what ``OTEL_*`` says. Looks, and uses nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from opentelemetry import trace

from gpu_timed.export import resource
from gpu_timed.findings import Finding

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""The variables that say where spans go, the stronger one first."""
_GRPC_PORT: Final = 4317


def provider_findings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Report the provider of this process, the host in its resource, and the ``OTEL_*`` variables."""
    held = trace.get_tracer_provider()
    kind = f"{type(held).__module__}.{type(held).__qualname__}"
    if isinstance(held, trace.ProxyTracerProvider):
        yield Finding(
            "provider",
            "note",
            "no OpenTelemetry provider is set in this process; gpu_timed uses the application's, or makes one in "
            "configure(exporter=...)",
            values={"kind": None},
        )
        yield _resource(resource.make(None).attributes, "that configure(exporter=...) would use")
    else:
        yield Finding("provider", "ok", f"the provider is {kind}", values={"kind": kind})
        attributes = getattr(getattr(held, "resource", None), "attributes", None)
        if isinstance(attributes, Mapping):
            yield _resource(attributes, "of the application's provider")
    yield from _variables(environment)


def _resource(attributes: Mapping[str, Any], whose: str) -> Finding:
    values = {name: attributes.get(name) for name in ("host.name", "host.id", "service.name")}
    host = values["host.id"] or values["host.name"]
    if not host:
        return Finding(
            "resource",
            "warning",
            f"the resource {whose} names no host: Jaeger then takes device spans for another machine's, "
            "and may move or mark them",
            "OTEL_EXPERIMENTAL_RESOURCE_DETECTORS=host,otel, or put host.name into OTEL_RESOURCE_ATTRIBUTES",
            values,
        )
    text = f"the resource {whose}: host.name={values['host.name']}, host.id={values['host.id']}"
    return Finding("resource", "ok", f"{text}, service.name={values['service.name']}", values=values)


def _variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    held = {name: environment[name] for name in sorted(environment) if name.startswith("OTEL_")}
    shown = {name: _redacted(name, text) for name, text in held.items() if text.strip()}
    text = ", ".join(f"{name}={value}" for name, value in shown.items()) or "no OTEL_* variable is set"
    yield Finding("variables", "ok", text, values={"variables": shown})
    if held.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        yield Finding(
            "sdk_disabled",
            "problem",
            "OTEL_SDK_DISABLED=true: OpenTelemetry makes no spans",
            "unset OTEL_SDK_DISABLED",
        )
    if held.get("OTEL_TRACES_SAMPLER", "").strip().lower() == "always_off":
        yield Finding(
            "sampler",
            "warning",
            "OTEL_TRACES_SAMPLER=always_off: no call is recorded",
            "unset OTEL_TRACES_SAMPLER, or use parentbased_traceidratio",
        )
    yield from _grpc(held)


def _grpc(held: Mapping[str, str]) -> Iterator[Finding]:
    protocol = held.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or held.get("OTEL_EXPORTER_OTLP_PROTOCOL", "")
    asks = protocol.strip() == "grpc" or any(_port(held.get(variable, "")) == _GRPC_PORT for variable in ENDPOINTS)
    if asks:
        yield Finding(
            "protocol",
            "warning",
            "the variables ask for OTLP over gRPC (port 4317); configure(exporter='otlp') speaks HTTP (port 4318)",
            "OTEL_EXPORTER_OTLP_ENDPOINT=http://HOST:4318",
        )


def _port(url: str) -> int | None:
    try:
        return urlsplit(url.strip()).port
    except ValueError:
        return None


def _redacted(name: str, text: str) -> str:
    if "HEADERS" in name:  # they hold keys and tokens
        return ",".join(f"{part.partition('=')[0]}=***" for part in text.split(","))
    return without_password(text)


def without_password(url: str) -> str:
    """Return *url* without the user and password that may stand in it."""
    try:
        parts = urlsplit(url)
        if "@" not in parts.netloc:
            return url
        return urlunsplit(parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]))
    except ValueError:
        return url
