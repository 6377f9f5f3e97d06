"""Keeping the parent across threads, processes and requests: :func:`carry`, :func:`inject`, :func:`extracted`.

A pool's thread knows nothing of who submitted its work: a span there is the root of a trace of its own. A *forked*
worker process is worse off: it keeps the context of whichever request forked it, for all requests after that. What
is carried here replaces it: the trace (and, within a process, every other context variable), but not torch's
current stream, which is a thread's own.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Generic, ParamSpec, TypeVar, cast

from gpu_timed import current
from gpu_timed.context import wire
from gpu_timed.errors import ConfigurationError, NotCallableError

P = ParamSpec("P")
R = TypeVar("R")
_FAULT: Final = "propagation"


def carry(function: Callable[P, R]) -> Callable[P, R]:
    """Return *function*, to be run in the context in which this was called, wherever that is.

    ``pool.submit(carry(f), x)`` makes the spans of ``f`` children of the span that is current here. What comes
    back is of the same kind (function, coroutine function, generator function, async generator function), and can
    be called several times and from several threads at once: each call has a copy of the context, so that what one
    sets no other sees. A plain function can also be sent to another process (``ProcessPoolExecutor``): the trace
    goes along, the other context variables, which are this process's own, do not.

    Args:
        function: What to run later. It must be picklable to be sent to another process, as ever.

    Raises:
        NotCallableError: *function* cannot be called.
    """
    if not callable(function):
        raise NotCallableError(
            f"carry() takes the function itself, not {type(function).__name__}: pool.submit(carry(f), x)."
        )
    context = contextvars.copy_context()
    make: Any = None
    if _is(inspect.isasyncgenfunction, function):
        make = _async_generator
    elif _is(inspect.iscoroutinefunction, function):
        make = _coroutine
    elif _is(inspect.isgeneratorfunction, function):
        make = _generator
    if make is None:
        return _Carried(function, context)
    return cast("Callable[P, R]", functools.update_wrapper(make(function, context), function))


class ContextExecutor(ThreadPoolExecutor):
    """A ``ThreadPoolExecutor`` that carries everything it is given: ``submit`` and ``map`` keep the parent.

    As the default executor of an event loop, ``loop.set_default_executor(ContextExecutor())``, it makes every
    ``run_in_executor(None, …)`` keep it.
    """

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Submit ``carry(fn)``."""
        return super().submit(carry(fn), *args, **kwargs)


def inject() -> dict[str, str]:
    """Return the current trace as headers for another process: HTTP, gRPC metadata, a message on a queue.

    They are written by OpenTelemetry's global propagator: W3C ``traceparent``, ``tracestate`` and ``baggage``, unless
    ``OTEL_PROPAGATORS`` says otherwise. Outside of any trace there are none, nor where a propagator raises, which is
    counted.
    """
    try:
        return wire.inject()
    except Exception as error:  # noqa: BLE001 - a propagator of the application's: the request goes out without
        current.ledger().fault(_FAULT, error)
        return {}


@contextlib.contextmanager
def extracted(carrier: Mapping[str, str] | Iterable[tuple[Any, Any]]) -> Iterator[None]:
    """Run a block as a part of the trace that came with a request.

    ``with extracted(request.headers): …`` is all that a server or a consumer needs. The context in the block is
    what arrived and nothing else: without a (readable) ``traceparent`` its spans are roots, whatever was current
    before. So they are where a propagator raises, which is counted.

    Args:
        carrier: Headers, as a mapping or as pairs, their names in any case; text or bytes.

    Raises:
        ConfigurationError: *carrier* is neither.
    """
    try:
        items: Any = getattr(carrier, "items", None)  # http.client's and email's messages are no Mappings
        pairs: Iterable[Any] = carrier if items is None else items()
        headers = wire.carrier(pairs)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"extracted() takes headers, as a mapping or as pairs, not {type(carrier).__name__} ({error})."
        ) from None
    token = _attach(headers)
    try:
        yield
    finally:
        _detach(token)


class _Carried(Generic[P, R]):
    """A plain callable and the context to run it in. Pickled, it is the callable and the trace."""

    def __init__(self, function: Callable[P, R], context: contextvars.Context) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._context = context

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        # A copy, since a context can be entered once at a time.
        return self._context.copy().run(self._function, *args, **kwargs)

    def __reduce__(self) -> Any:
        return _arrived, (self._function, self._context.copy().run(inject))


def _arrived(function: Callable[..., Any], headers: Mapping[str, str]) -> _Carried[..., Any]:
    context = contextvars.Context()  # not what this process happened to be forked in
    context.run(_attach, wire.carrier(headers.items()))
    return _Carried(function, context)


def _attach(headers: Mapping[str, str]) -> Any:
    """Make what *headers* say the current context; returns what :func:`_detach` needs. Never raises."""
    found: Any = None
    try:
        found = wire.extract(headers)
    except Exception as error:  # noqa: BLE001 - a propagator of the application's: a trace of its own, then
        current.ledger().fault(_FAULT, error)
    try:
        return wire.attach(found)
    except Exception as error:  # noqa: BLE001
        current.ledger().fault(_FAULT, error)
        return None


def _detach(token: Any) -> None:
    try:
        if token is not None:
            wire.detach(token)
    except Exception as error:  # noqa: BLE001
        current.ledger().fault(_FAULT, error)


def _is(question: Callable[[Any], bool], target: Any) -> bool:
    """Ask *question* of a function, method or partial, and of the ``__call__`` of any other object."""
    return question(target) or (not isinstance(target, type) and question(getattr(target, "__call__", None)))  # noqa: B004


def _coroutine(function: Callable[..., Any], context: contextvars.Context) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        return await _Stepped(function(*args, **kwargs).__await__(), context.copy())

    return call


def _generator(function: Callable[..., Any], context: contextvars.Context) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        return (yield from _steps(function(*args, **kwargs), context.copy()))

    return call


def _async_generator(function: Callable[..., Any], context: contextvars.Context) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        own = context.copy()
        inner = function(*args, **kwargs)
        # A step is taken out of the list as it is awaited: a local name would keep what is thrown in alive.
        steps: list[Any] = [inner.asend(None)]
        while True:
            try:
                item = await _Stepped(steps.pop(), own)
            except StopAsyncIteration:
                return
            try:
                sent = yield item
            except GeneratorExit:
                await _Stepped(inner.aclose(), own)
                raise
            except BaseException as error:  # noqa: BLE001 - whatever the consumer throws goes inside
                steps.append(inner.athrow(error))
            else:
                steps.append(inner.asend(sent))
                del sent

    return call


class _Stepped:
    """Awaits something, each step of it in a context of its own."""

    __slots__ = ("_inner", "_own")

    def __init__(self, inner: Any, own: contextvars.Context) -> None:
        self._inner = inner
        self._own = own

    def __await__(self) -> Generator[Any, Any, Any]:
        return _steps(self._inner, self._own)


def _steps(inner: Any, own: contextvars.Context) -> Generator[Any, Any, Any]:
    """Run *inner* to its end, each step in *own*, passing everything through."""
    value: Any = None
    thrown: BaseException | None = None
    try:
        while True:
            try:
                if thrown is None:
                    passed = own.run(inner.send, value)
                else:
                    error, thrown = thrown, None
                    try:
                        passed = own.run(inner.throw, error)
                    finally:
                        del error
            except StopIteration as stop:
                return stop.value
            try:
                value = yield passed
            except BaseException as caught:  # noqa: BLE001 - whatever is thrown in goes inside, an end too
                thrown, value = caught, None
    finally:
        # What leaves here by an exception holds this frame by its traceback: it must not hold the user's objects.
        del inner
