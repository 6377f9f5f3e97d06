"""For the doctor: whether a receiver takes a span.

The test span goes out by the exporter that ``configure(exporter="otlp")`` would use, from a provider of its
own; the application's provider is never used.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from opentelemetry import context as otel_context

from gpu_timed.errors import ConfigurationError, MissingExtraError
from gpu_timed.export import otlp, resource
from gpu_timed.export.otel_environment import ENDPOINTS, without_password
from gpu_timed.findings import Finding, Level

SPAN_NAME: Final = "gpu_timed doctor"
_DEFAULT_URL: Final = "http://localhost:4318/v1/traces"
_CREDENTIALS: Final = (
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER",
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER",
)
_GRACE_S: Final = 0.5
_JAEGER: Final = (
    "docker run --rm -p 16686:16686 -p 4318:4318 cr.jaegertracing.io/jaegertracing/jaeger:latest, "
    "or name your receiver: gpu-timed doctor --endpoint http://HOST:4318"
)
_HTTP_FIXES: Final = {
    401: "give credentials: OTEL_EXPORTER_OTLP_HEADERS=authorization=...",
    403: "give credentials: OTEL_EXPORTER_OTLP_HEADERS=authorization=...",
    404: "the receiver is there, but not at this path: OTLP over HTTP usually is at /v1/traces",
    405: "the receiver is there, but not at this path: OTLP over HTTP usually is at /v1/traces",
    413: "the receiver takes smaller requests only",
    415: "the receiver does not take OTLP protobuf",
    429: "the receiver is taking no more for now",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What the receiver said to one span."""

    answer: str
    """``accepted``, ``http_error``, ``not_otlp``, ``refused``, ``unknown_host``, ``tls``, ``timeout`` or ``failed``."""
    url: str
    """Where it was sent, without any password."""
    took_s: float
    """Seconds until the answer."""
    status: int | None = None
    """HTTP status, where there was one."""
    detail: str = ""
    """In the words of whoever answered."""


@dataclass
class _Asked:
    url: str = ""
    status: int | None = None
    reason: str = ""
    web_page: bool = False
    error: BaseException | None = None
    said: list[str] = field(default_factory=list)
    answered: threading.Event = field(default_factory=threading.Event)


def send(endpoint: str | None, environment: Mapping[str, str], timeout_s: float) -> Finding:
    """Send one span by the exporter that ``configure(exporter="otlp", endpoint=endpoint)`` would use.

    Takes at most *timeout_s* seconds and a little. Raises nothing that the receiver could cause.
    """
    named = endpoint is not None or any(environment.get(variable, "").strip() for variable in ENDPOINTS)
    level: Level = "problem" if named else "warning"
    try:
        answer = ask(endpoint, environment, timeout_s)
    except MissingExtraError as error:
        fix = "pip install 'gpu-timed[otlp]'"
        return Finding("send", level, str(error).partition(". ")[0], fix, {"answer": "no_exporter"})
    except ConfigurationError as error:
        return Finding("send", "problem", str(error), "write it as http://HOST:4318", {"answer": "failed"})
    values = {
        "answer": answer.answer,
        "url": answer.url,
        "status": answer.status,
        "took_s": round(answer.took_s, 3),
        "detail": answer.detail,
    }
    if answer.answer == "accepted":
        text = f"a test span ({SPAN_NAME!r}) was accepted by {answer.url} ({answer.status or 'no status'})"
        return Finding("send", "ok", text, values=values)
    text, fix = _words(answer, timeout_s, named=named)
    return Finding("send", level, text, fix, values)


def ask(endpoint: str | None, environment: Mapping[str, str], timeout_s: float) -> Answer:
    """Return what the receiver says to one span.

    Raises:
        ConfigurationError: The endpoint is no address.
        MissingExtraError: The exporter's package is not installed.
    """
    asked = _Asked()
    options: dict[str, Any] = {"timeout": timeout_s}
    if not any(environment.get(variable) for variable in _CREDENTIALS):  # there the session is somebody else's
        options["session"] = _session(asked)
    try:
        exporter = otlp.over_http(endpoint, **options)
    except (ConfigurationError, MissingExtraError):
        raise
    except Exception as error:  # noqa: BLE001 - a variable that the exporter itself cannot use
        detail = f"{type(error).__name__}: {error}"
        return Answer("failed", without_password(endpoint or _DEFAULT_URL), 0.0, detail=detail)
    result: list[Any] = []

    def run() -> None:
        try:
            with _unheard(asked.said):
                result.append(exporter.export([_span()]))
        except Exception as error:  # noqa: BLE001 - an older exporter lets everything out
            asked.error = asked.error or error
        finally:
            asked.answered.set()

    began = time.monotonic()
    thread = threading.Thread(target=run, name="gpu_timed-doctor-send", daemon=True)
    thread.start()
    if asked.answered.wait(timeout_s + _GRACE_S):
        thread.join(_GRACE_S)  # what is accepted is accepted only once the exporter says so
    took = time.monotonic() - began
    with _unheard([]), contextlib.suppress(Exception):
        exporter.shutdown()  # which ends its trying again
    url = asked.url or getattr(exporter, "_endpoint", None) or endpoint or _DEFAULT_URL
    succeeded = bool(result) and getattr(result[0], "name", "") == "SUCCESS"
    return Answer(
        _kind(asked, succeeded=succeeded),
        without_password(str(url)),
        took,
        asked.status,
        _detail(asked),
    )


def _span() -> Any:
    sdk: Any = importlib.import_module("opentelemetry.sdk.trace")
    sampling: Any = importlib.import_module("opentelemetry.sdk.trace.sampling")
    own = sdk.TracerProvider(sampler=sampling.ALWAYS_ON, resource=resource.make(None), shutdown_on_exit=False)
    span = own.get_tracer("gpu_timed").start_span(SPAN_NAME, attributes={"gpu_timed.doctor": True})
    span.end()
    if not hasattr(span, "resource"):
        raise ConfigurationError("OTEL_SDK_DISABLED=true: OpenTelemetry makes no spans.")
    return span


def _session(asked: _Asked) -> Any:
    """Return a session of ``requests`` that asks once and notes the answer: what the exporter hides."""
    try:
        requests: Any = importlib.import_module("requests")
    except ImportError:  # an exporter that does without it
        return None
    session = requests.Session()
    request = session.request

    def once(method: str, url: str, *args: Any, **kwargs: Any) -> Any:
        if asked.url:
            raise _AskedAlready
        asked.url = url
        try:
            response = request(method, url, *args, **kwargs)
        except BaseException as error:
            asked.error = error
            asked.answered.set()
            raise
        if response.history and response.request.method != method:  # a POST turned into a GET arrives nowhere
            response = response.history[0]
        asked.status, asked.reason = response.status_code, str(response.reason or "")
        asked.web_page = "text/html" in response.headers.get("content-type", "")
        asked.answered.set()
        return response

    session.request = once
    return session


class _AskedAlready(Exception):  # noqa: N818 - a signal, not an error
    """Raised to the exporter when it would try again."""


@contextlib.contextmanager
def _unheard(said: list[str]) -> Iterator[None]:
    """Keep this thread's messages of the exporter out of the application's log, and its requests out of its traces."""
    ident = threading.get_ident()

    def hold(record: logging.LogRecord) -> bool:
        if record.thread != ident:
            return True
        said.append(record.getMessage())
        return False

    loggers = [
        logger
        for name, logger in list(logging.root.manager.loggerDict.items())
        if isinstance(logger, logging.Logger) and name.startswith(("opentelemetry.exporter", "urllib3"))
    ]
    key = getattr(otel_context, "_SUPPRESS_INSTRUMENTATION_KEY", "suppress_instrumentation")
    token = otel_context.attach(otel_context.set_value(key, True))
    for logger in loggers:
        logger.addFilter(hold)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(hold)
        otel_context.detach(token)


def _kind(asked: _Asked, *, succeeded: bool) -> str:
    if asked.status is not None:
        if not 200 <= asked.status < 300:  # noqa: PLR2004 - HTTP's success
            return "http_error"
        return "not_otlp" if asked.web_page else "accepted" if succeeded else "failed"
    if succeeded:
        return "accepted"
    if asked.error is None:
        return "failed" if asked.said else "timeout"
    errors = list(_chain(asked.error))
    names = {kind.__name__ for error in errors for kind in type(error).__mro__}
    if any(isinstance(error, ConnectionRefusedError) for error in errors):
        return "refused"
    if "gaierror" in names or "NameResolutionError" in names:
        return "unknown_host"
    if "SSLError" in names:
        return "tls"
    return "timeout" if names & {"Timeout", "TimeoutError"} else "failed"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Go through *error* and everything it was made of."""
    waiting, seen = [error], set[int]()
    while waiting:
        held = waiting.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        yield held
        inner = (held.__cause__, held.__context__, getattr(held, "reason", None), *held.args)
        waiting += [part for part in inner if isinstance(part, BaseException)]


def _detail(asked: _Asked) -> str:
    if asked.status is not None:
        return asked.reason
    if asked.error is not None:
        return f"{type(asked.error).__name__}: {asked.error}"[:300]
    return asked.said[-1][:300] if asked.said else ""


def _words(answer: Answer, timeout_s: float, *, named: bool) -> tuple[str, str]:
    url = answer.url
    if answer.answer == "http_error":
        status = answer.status or 0
        fix = _HTTP_FIXES.get(status, "look at the receiver's own log")
        return f"{url} answered the test span with HTTP {status} {answer.detail}".rstrip(), fix
    if answer.answer == "not_otlp":
        return f"{url} answered with a web page: it is no OTLP receiver", "name the receiver's own port, usually 4318"
    start = "start the receiver, or correct the address" if named else _JAEGER
    words = {
        "refused": (f"nothing listens at {url} (connection refused)", start),
        "unknown_host": (f"the host of {url} is not known", "correct the host's name, or look at DNS"),
        "tls": (f"{url} could not be trusted (TLS): {answer.detail}", "set OTEL_EXPORTER_OTLP_CERTIFICATE"),
        "timeout": (f"{url} took the test span and gave no answer in {timeout_s:g} s, or is not reached", start),
    }
    return words.get(answer.answer, (f"the test span could not be sent to {url}: {answer.detail}", start))
