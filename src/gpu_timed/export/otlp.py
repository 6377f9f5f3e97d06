"""OTLP exporters for ``configure(exporter="otlp")``: over HTTP and over gRPC, made of OpenTelemetry's own."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.util.re import parse_env_headers

from gpu_timed.errors import ConfigurationError, missing_extra, unknown_value
from gpu_timed.export.sending import Answers, PerProcess
from gpu_timed.ledger import Ledger

PROTOCOLS: Final = frozenset({"http/protobuf", "grpc"})
_PROTOCOL_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HEADER_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
_INSECURE_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_INSECURE", "OTEL_EXPORTER_OTLP_INSECURE")
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


def exporter(
    *, protocol: str | None, endpoint: str | None, headers: Mapping[str, str] | None, ledger: Ledger
) -> SpanExporter:
    """Return the exporter for *protocol*; what is None comes from ``OTEL_EXPORTER_OTLP_*``.

    Raises:
        ConfigurationError: The protocol, the endpoint or a header cannot be used.
        MissingExtraError: The exporter's package is not installed.
    """
    protocol = _protocol(protocol)
    held = None if headers is None else {**_environment_headers(), **_checked(headers)}
    return _grpc(endpoint, held, ledger) if protocol == "grpc" else _http(endpoint, held, ledger)


def _protocol(given: object) -> str:
    if given is not None:
        if not isinstance(given, str) or given not in PROTOCOLS:
            raise unknown_value("protocol", given, PROTOCOLS)
        return given
    for variable in _PROTOCOL_VARIABLES:
        text = os.environ.get(variable, "").strip()
        if text and text not in PROTOCOLS:
            raise ConfigurationError(f"{variable}: {unknown_value('protocol', text, PROTOCOLS)}")
        if text:
            return text
    return "http/protobuf"  # the one that survives a fork


def over_http(endpoint: str | None, **options: Any) -> SpanExporter:
    """Return OpenTelemetry's exporter over HTTP; *options* are its own.

    Raises:
        ConfigurationError: The endpoint is no address.
        MissingExtraError: The exporter's package is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    except ImportError:
        raise missing_extra("exporter='otlp'", "opentelemetry-exporter-otlp-proto-http", "otlp") from None
    return OTLPSpanExporter(endpoint=None if endpoint is None else traces_url(endpoint), **options)


def traces_url(endpoint: str) -> str:
    """Return where spans for *endpoint* go over HTTP: its own path, or ``/v1/traces`` where it has none.

    Raises:
        ConfigurationError: It has no scheme or no host.
    """
    parts = _split(endpoint, "http://localhost:4318")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(
            f"endpoint={endpoint!r} needs a scheme and a host, http or https: http://localhost:4318"
        )
    return parts._replace(path="/v1/traces").geturl() if parts.path in ("", "/") else endpoint


def _http(endpoint: str | None, headers: dict[str, str] | None, ledger: Ledger) -> SpanExporter:
    endpoint = None if endpoint is None else traces_url(endpoint)
    if importlib.util.find_spec("requests") is None:  # the exporter's own need, asked for before it
        raise missing_extra("exporter='otlp'", "opentelemetry-exporter-otlp-proto-http", "otlp")
    answers = Answers(ledger)

    def make() -> SpanExporter:
        return over_http(endpoint, headers=headers, session=answers.session())

    return PerProcess(make, ledger, survives=True, answers=answers).ready()


def _grpc(endpoint: str | None, headers: dict[str, str] | None, ledger: Ledger) -> SpanExporter:
    target: dict[str, Any] = {"headers": headers}
    if endpoint is not None:
        parts = _split(endpoint, "localhost:4317")
        if parts.scheme not in ("", "http", "https") or not parts.hostname or (not parts.port and not _tls(parts)):
            raise ConfigurationError(f"endpoint={endpoint!r} needs a host and a port: localhost:4317")
        if parts.path not in ("", "/") or parts.query:
            raise ConfigurationError(
                f"endpoint={endpoint!r} has a path, which gRPC does not. Write {parts.netloc!r}, or use "
                "protocol='http/protobuf'."
            )
        target["endpoint"] = f"https://{parts.netloc}" if _tls(parts) else f"http://{parts.netloc}"
        target["insecure"] = not _tls(parts)
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    except ImportError:
        raise missing_extra("protocol='grpc'", "opentelemetry-exporter-otlp-proto-grpc", "otlp-grpc") from None
    return PerProcess(lambda: OTLPSpanExporter(**target), ledger, survives=False)


def _tls(parts: SplitResult) -> bool:
    """Whether the connection is encrypted: as the scheme says, else as OpenTelemetry's variable, else unless loopback.

    The SDK encrypts wherever no scheme stands, and a collector on this machine does not understand it.
    """
    if parts.scheme:
        return parts.scheme == "https"
    for variable in _INSECURE_VARIABLES:
        text = os.environ.get(variable, "").strip().lower()
        if text:
            return text != "true"
    return parts.hostname not in _LOOPBACK


def _split(endpoint: object, example: str) -> SplitResult:
    refusal = ConfigurationError(f"endpoint={endpoint!r} is not the address of a collector. Write it as {example}.")
    if not isinstance(endpoint, str):
        raise refusal
    try:
        parts = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}")
        _ = parts.port  # raises on one that is no number
    except ValueError:
        raise refusal from None
    return parts


def _environment_headers() -> dict[str, str]:
    for variable in _HEADER_VARIABLES:
        if os.environ.get(variable):
            return dict(parse_env_headers(os.environ[variable], liberal=True))
    return {}


def _checked(headers: object) -> dict[str, str]:
    if not isinstance(headers, Mapping):
        raise ConfigurationError(f"headers must be a mapping of names to texts, not {type(headers).__name__}.")
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ConfigurationError(f"headers must be a mapping of names to texts; of {name!r} one is not a text.")
        if not name.strip() or any(mark in name + value for mark in "\r\n\0"):
            raise ConfigurationError(f"the header {name!r} is empty or holds a line break.")
    return {name.strip().lower(): value for name, value in headers.items()}  # gRPC takes lower case only
