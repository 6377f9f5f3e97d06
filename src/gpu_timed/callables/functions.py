"""Plain functions, coroutine functions, generators and async generators.

Each becomes a closure of its own kind with its *own code object*. A shared code object would make
Dynamo, which caches compiled code by code object, give up after eight decorated functions; and wrapt's
proxy costs several times as much per call as a closure.

Inside a compiled region a wrapper is looked through: Dynamo traces it, finds that it is being compiled,
reports its name once, and goes on with the function itself. Private name used, versions seen 2.6 to 2.13:
``_dynamo_marked_constant``, which is all that ``torch.compiler.assume_constant_result`` sets.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from typing import Any, Final, cast

from gpu_timed.callables.tracing import questions
from gpu_timed.ports import Door, ModeSwitch
from gpu_timed.site import Site

_OWN: Final = "_gpu_timed_"
SUSPENDED: Final = "a call that is suspended now and then is launched as it is written: give its plain part a mode"
LAUNCH: Final = "the launch of a kernel is one launch in any mode: give the function around it a mode"
_DYNAMO: Final = ("_torchdynamo", "get_compiler_config")


def wrap(function: Callable[..., Any], site: Site, door: Door) -> Callable[..., Any]:
    """Return a function of the same kind and signature as *function*, each call of which is a span.

    *function* may be any callable; what is made of an object that is no function takes after its ``__call__``.
    """
    make = template_for(function)
    template = make(function, site, door)
    name = getattr(function, "__name__", None) or type(function).__name__
    code = template.__code__
    code = code.replace(
        co_name=name,
        co_qualname=getattr(function, "__qualname__", None) or name,
        # TorchScript compiles the source of the function inside, and looks its names up in *our* closure and
        # globals: no name of ours may be one of the user's, and theirs must be found.
        co_freevars=tuple(f"{_OWN}{free}" for free in code.co_freevars),
    )
    is_function = isinstance(function, types.FunctionType)
    scope = function.__globals__ if is_function and make is _plain else template.__globals__
    own = types.FunctionType(code, scope, name, None, template.__closure__)
    functools.update_wrapper(own, function, updated=())
    if is_function:
        # What Dynamo keeps on a compiled function says how to get around it (pytorch#172732): not for a wrapper.
        own.__dict__.update({key: value for key, value in vars(function).items() if not key.startswith(_DYNAMO)})
    own.__dict__["__wrapped__"] = function
    return own


def is_timed(function: Any) -> bool:
    """Return whether *function* is one that :func:`wrap` made."""
    free: tuple[str, ...] = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return any(name.startswith(_OWN) for name in free)


def template_for(target: Callable[..., Any]) -> Callable[..., types.FunctionType]:
    """Return what makes the wrapper for *target*, by what a call of it gives."""
    if _is(inspect.isasyncgenfunction, target):
        return _async_generator
    if _is(inspect.iscoroutinefunction, target):
        return _coroutine
    if _is(inspect.isgeneratorfunction, target):
        code = getattr(target, "__code__", None)
        old_style = code is not None and code.co_flags & inspect.CO_ITERABLE_COROUTINE
        return _generator_coroutine if old_style else _generator
    return _plain


def suspends(target: Callable[..., Any]) -> bool:
    """Return whether a call of *target* runs on an event loop."""
    return template_for(target) in (_coroutine, _async_generator, _generator_coroutine)


def _is(question: Callable[[Any], bool], target: Any) -> bool:
    """Ask *question* of a function, method or partial, and of the ``__call__`` of any other object."""
    return question(target) or (not isinstance(target, type) and question(getattr(target, "__call__", None)))  # noqa: B004


def _plain(function: Callable[..., Any], site: Site, door: Door) -> types.FunctionType:
    # Everything it needs is in its closure: its globals are to be those of *function*.
    name, enter, traced, modes = site.name, door.enter, door.traced, door.modes
    compiles, by_dynamo, is_traced_here = questions()

    def call(*args: Any, **kwargs: Any) -> Any:
        if compiles() and (by_dynamo() or is_traced_here()):  # see tracing.compiling()
            traced(name)
            return function(*args, **kwargs)
        opened = enter(site, args, kwargs)
        if opened is None:
            return (
                modes.run(site, function, None, args, kwargs)
                if site.moded or modes.in_force
                else function(*args, **kwargs)
            )
        try:
            try:
                if site.moded or modes.in_force:
                    result = modes.run(site, function, opened, args, kwargs)
                else:
                    result = function(*args, **kwargs)
            except BaseException as error:
                opened.owner.leave(opened, error)
                raise
            opened.owner.leave(opened, None, result)
        except BaseException:  # the user's own; or an interrupt on the way into leave()
            opened.owner.mend(opened)
            raise
        return result

    return cast("types.FunctionType", call)


def _generator(function: Callable[..., Any], site: Site, door: Door) -> types.FunctionType:
    def call(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        inner = function(*args, **kwargs)
        opened = _enter(door, site, args, kwargs, suspends=False)
        if opened is None:
            return (yield from inner)
        try:
            try:
                result = yield from _steps(inner, opened)
            except BaseException as error:
                opened.owner.leave(opened, error)
                raise
            opened.owner.leave(opened, None, result)
        except BaseException:
            opened.owner.mend(opened)
            raise
        return result

    return cast("types.FunctionType", call)


def _generator_coroutine(function: Callable[..., Any], site: Site, door: Door) -> types.FunctionType:
    """Wrap what ``types.coroutine`` made: a generator function whose result can be awaited."""

    def call(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        inner = function(*args, **kwargs)
        opened = _enter(door, site, args, kwargs, suspends=True)
        if opened is None:
            return (yield from inner)
        try:
            try:
                result = yield from _steps(inner, opened)
            except BaseException as error:
                yield from close(opened, error).__await__()
                raise
            yield from close(opened, None, result).__await__()
        except BaseException:
            opened.owner.mend(opened)
            raise
        return result

    return cast("types.FunctionType", types.coroutine(call))


def _coroutine(function: Callable[..., Any], site: Site, door: Door) -> types.FunctionType:
    async def call(*args: Any, **kwargs: Any) -> Any:
        inner = function(*args, **kwargs)
        opened = _enter(door, site, args, kwargs, suspends=True)
        if opened is None:
            return await inner
        try:
            try:
                result = await _Stepped(inner, opened)
            except BaseException as error:
                await close(opened, error)
                raise
            await close(opened, None, result)
        except BaseException:
            opened.owner.mend(opened)
            raise
        return result

    return cast("types.FunctionType", call)


def _async_generator(function: Callable[..., Any], site: Site, door: Door) -> types.FunctionType:
    async def call(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        inner = function(*args, **kwargs)
        # A step is taken out of the list as it is awaited: a local name would keep what is thrown in alive.
        steps: list[Awaitable[Any]] = [inner.asend(None)]
        opened = _enter(door, site, args, kwargs, suspends=True)
        try:
            try:
                while True:
                    item = await _one_step(steps.pop(), opened)
                    if opened is not None:
                        opened.owner.suspend(opened)
                    try:
                        sent = yield item
                    except GeneratorExit:
                        if opened is not None:
                            opened.owner.resume(opened)
                        await _one_step(inner.aclose(), opened)
                        raise
                    except BaseException as error:  # noqa: BLE001 - whatever the consumer throws goes inside
                        steps.append(inner.athrow(error))
                    else:
                        steps.append(inner.asend(sent))
                        del sent
                    if opened is not None:
                        opened.owner.resume(opened)
            except StopAsyncIteration:
                if opened is not None:
                    await close(opened, None)
            except BaseException as error:
                if opened is not None:
                    await close(opened, error)
                raise
        except BaseException:
            if opened is not None:
                opened.owner.mend(opened)
            raise

    return cast("types.FunctionType", call)


def decline(modes: ModeSwitch, site: Site, opened: Any, why: str) -> None:
    """Tell *opened* that the call runs as it is; where that is not to be, close it and raise."""
    try:
        modes.decline(site, opened, why)
    except BaseException as error:
        if opened is not None and opened.owner.close(opened, error):
            opened.owner.submit(opened)
        raise


def _enter(door: Door, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any], *, suspends: bool) -> Any:
    opened = door.enter(site, args, kwargs, suspends=suspends)
    if site.moded or door.modes.in_force:
        decline(door.modes, site, opened, SUSPENDED)
    return opened


async def close(opened: Any, error: BaseException | None, result: Any = None) -> None:
    """End the span; after a normal end or an error, wait as its policy says; never while being torn down."""
    owner = opened.owner
    try:
        if not owner.close(opened, error, result):
            return
        if error is None or isinstance(error, Exception):
            await owner.settle(opened)
        else:
            owner.submit(opened)
    except BaseException:  # an interrupt, or this task was cancelled
        owner.mend(opened)
        raise


def _one_step(step: Awaitable[Any], opened: Any) -> Awaitable[Any]:
    return step if opened is None else _Stepped(step.__await__(), opened)


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
    try:
        while True:
            try:
                if thrown is None:
                    passed = inner.send(value)
                else:
                    error, thrown = thrown, None
                    try:
                        passed = inner.throw(error)
                    finally:
                        del error
            except StopIteration as stop:
                return stop.value
            owner.suspend(opened)
            try:
                value = yield passed
            except BaseException as caught:  # noqa: BLE001 - whatever is thrown in goes inside
                thrown, value = caught, None
            owner.resume(opened)
    finally:
        # An exception that leaves here holds this frame by its traceback: what holds the exception must
        # not stay in the frame, or the user's tensors would live until the next garbage collection.
        del inner
