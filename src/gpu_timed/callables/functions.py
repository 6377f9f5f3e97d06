"""Plain functions, coroutine functions, generators and async generators.

Each becomes a closure of its own kind with its *own code object*. A shared code object would make
Dynamo, which caches compiled code by code object, give up after eight decorated functions; and wrapt's
proxy costs several times as much per call as a closure.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from typing import Any, Protocol, cast

from gpu_timed.site import Site


class Enter(Protocol):
    """Opens a span for one call, or returns None if there is nothing to close afterwards."""

    def __call__(self, site: Site, arguments: Any = ..., named: Any = ..., *, suspends: bool = ...) -> Any:
        """See :meth:`gpu_timed.tracer.Tracer.enter`."""
        ...


def wrap(function: Callable[..., Any], site: Site, enter: Enter) -> Callable[..., Any]:
    """Return a function of the same kind and signature as *function*, each call of which is a span."""
    if inspect.isasyncgenfunction(function):
        template = _async_generator(function, site, enter)
    elif inspect.iscoroutinefunction(function):
        template = _coroutine(function, site, enter)
    elif inspect.isgeneratorfunction(function):
        template = _generator(function, site, enter)
    else:
        template = _plain(function, site, enter)
    return _own_code(template, function)


def suspends(function: Callable[..., Any]) -> bool:
    """Return whether a call of *function* runs on an event loop."""
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def _own_code(template: types.FunctionType, function: Callable[..., Any]) -> Callable[..., Any]:
    """Give *template* a code object of its own, named after *function*, and make it look like *function*."""
    name = getattr(function, "__name__", template.__name__)
    code = template.__code__.replace(co_name=name, co_qualname=getattr(function, "__qualname__", name))
    own = types.FunctionType(code, template.__globals__, name, None, template.__closure__)
    return functools.update_wrapper(own, function)


def _plain(function: Callable[..., Any], site: Site, enter: Enter) -> types.FunctionType:
    def call(*args: Any, **kwargs: Any) -> Any:
        opened = enter(site, args, kwargs)
        if opened is None:
            return function(*args, **kwargs)
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            opened.owner.leave(opened, error)
            raise
        opened.owner.leave(opened, None, result)
        return result

    return cast("types.FunctionType", call)


def _generator(function: Callable[..., Any], site: Site, enter: Enter) -> types.FunctionType:
    def call(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        inner = function(*args, **kwargs)
        opened = enter(site, args, kwargs)
        if opened is None:
            return (yield from inner)
        try:
            result = yield from _steps(inner, opened)
        except BaseException as error:
            opened.owner.leave(opened, error)
            raise
        opened.owner.leave(opened, None, result)
        return result

    return cast("types.FunctionType", call)


def _coroutine(function: Callable[..., Any], site: Site, enter: Enter) -> types.FunctionType:
    async def call(*args: Any, **kwargs: Any) -> Any:
        inner = function(*args, **kwargs)
        opened = enter(site, args, kwargs, suspends=True)
        if opened is None:
            return await inner
        try:
            result = await _Stepped(inner, opened)
        except BaseException as error:
            await close(opened, error)
            raise
        await close(opened, None, result)
        return result

    return cast("types.FunctionType", call)


def _async_generator(function: Callable[..., Any], site: Site, enter: Enter) -> types.FunctionType:
    async def call(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        inner = function(*args, **kwargs)
        opened = enter(site, args, kwargs, suspends=True)
        step: Awaitable[Any] = inner.asend(None)
        try:
            while True:
                item = await (step if opened is None else _Stepped(step.__await__(), opened))
                if opened is not None:
                    opened.owner.suspend(opened)
                try:
                    sent = yield item
                except BaseException as error:
                    step = inner.aclose() if isinstance(error, GeneratorExit) else inner.athrow(error)
                    if opened is not None:
                        opened.owner.resume(opened)
                    if isinstance(error, GeneratorExit):
                        await (step if opened is None else _Stepped(step.__await__(), opened))
                        raise
                else:
                    step = inner.asend(sent)
                    if opened is not None:
                        opened.owner.resume(opened)
        except StopAsyncIteration:
            if opened is not None:
                await close(opened, None)
        except BaseException as error:
            if opened is not None:
                await close(opened, error)
            raise

    return cast("types.FunctionType", call)


async def close(opened: Any, error: BaseException | None, result: Any = None) -> None:
    """End the span; after a normal end or an error, wait as its policy says; never while being torn down."""
    owner = opened.owner
    if not owner.close(opened, error, result):
        return
    if error is None or isinstance(error, Exception):
        await owner.settle(opened)
    else:
        owner.submit(opened)


class _Stepped:
    """Awaits something, with the span's segment open only while it runs."""

    __slots__ = ("_inner", "_opened")

    def __init__(self, inner: Any, opened: Any) -> None:
        self._inner = inner
        self._opened = opened

    def __await__(self) -> Generator[Any, Any, Any]:
        return _steps(self._inner, self._opened)


def _steps(inner: Any, opened: Any) -> Generator[Any, Any, Any]:
    """Run *inner* to its end, passing everything through, suspending the span whenever it is suspended.

    The span's segment is open when this begins and when it ends, in whichever way.
    """
    owner = opened.owner
    value: Any = None
    thrown: BaseException | None = None
    while True:
        try:
            if thrown is None:
                passed = inner.send(value)
            else:
                error, thrown = thrown, None
                passed = inner.throw(error)
                del error
        except StopIteration as stop:
            return stop.value
        owner.suspend(opened)
        try:
            value = yield passed
        except BaseException as caught:  # noqa: BLE001 - whatever is thrown in goes inside
            thrown, value = caught, None
        owner.resume(opened)
