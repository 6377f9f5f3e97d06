"""The two ways to open a span: the decorator :func:`gpu_timed`, and the ``with`` block :func:`gpu_span`."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TypeVar, cast, overload

from gpu_timed import current
from gpu_timed.callables import functions, kinds, tracing
from gpu_timed.errors import ConfigurationError, NotCallableError, missing_extra
from gpu_timed.mode_values import Eager, Mode, ModeSource, mode_of
from gpu_timed.modes.choice import UseMode
from gpu_timed.settings import LatePolicy, SyncPolicy
from gpu_timed.site import AttributeSource, Site, WorkSource, code_attributes, frame_attributes
from gpu_timed.span import Span
from gpu_timed.unrecorded import Unrecorded
from gpu_timed.work import COUNT, Work

F = TypeVar("F", bound=Callable[..., Any])


@overload
def gpu_timed(
    function: F,
    /,
    *,
    name: str | None = None,
    sync: SyncPolicy | None = None,
    late: LatePolicy | None = None,
    every: int = 1,
    mode: ModeSource | None = None,
    attributes: AttributeSource | None = None,
    work: WorkSource | None = None,
) -> F: ...
@overload
def gpu_timed(
    *,
    name: str | None = None,
    sync: SyncPolicy | None = None,
    late: LatePolicy | None = None,
    every: int = 1,
    mode: ModeSource | None = None,
    attributes: AttributeSource | None = None,
    work: WorkSource | None = None,
) -> Callable[[F], F]: ...
def gpu_timed(
    function: Any = None,
    /,
    *,
    name: str | None = None,
    sync: SyncPolicy | None = None,
    late: LatePolicy | None = None,
    every: int = 1,
    mode: ModeSource | None = None,
    attributes: AttributeSource | None = None,
    work: WorkSource | None = None,
) -> Any:
    """Make every call of a function a span that says what the device did.

    Use it bare (``@gpu_timed``) or with options. What comes back has the same signature, kind and
    documentation; ``__wrapped__`` is the original. Nothing is imported, started or initialised before the
    first call. With ``GPU_TIMED_DISABLED=1`` and no mode the function itself comes back.

    Args:
        function: What to time: a function, coroutine function, generator or async generator function,
            ``staticmethod``, ``classmethod``, or a callable object.
        name: Name of the spans; the qualified name of the function if left out.
        sync: ``boundary`` waits for the span's own end mark before returning, ``deferred`` never waits,
            ``device`` waits for the whole device. Left out: the process's setting, else ``boundary``, and
            ``deferred`` for what runs on an event loop.
        late: With ``deferred``: ``host`` ends the host span once the device is done, ``device_only`` ends
            it as the call returns (at the price of an SDK span on the calling thread).
        every: Record one call in this many. All are counted.
        mode: How to launch the work: ``eager``, ``cuda_graph``, ``compile``, ``reduce-overhead``, ``max-autotune``,
            ``max-autotune-no-cudagraphs``; a :class:`~gpu_timed.mode_values.CudaGraph` or
            :class:`~gpu_timed.mode_values.Compile` with options; or a function of the call's arguments that returns
            one of these, or None. None leaves the call as it is. :func:`use_mode` and ``GPU_TIMED_MODE`` go before
            it. Neither sampling nor disabling changes the mode. What cannot run so runs eagerly, and its spans say
            why; with ``strict=True`` in the mode the call raises :class:`~gpu_timed.errors.ModeError`.
        attributes: Attributes of every span, or a function of the call's arguments that returns them.
        work: What a call has to do, so that its spans say how fast that was: a :class:`~gpu_timed.work.Work`; a
            function of the call's arguments that returns one, or None where it is not known; or ``"count"``: torch's
            FLOP counter runs during the first recorded call of each input signature (64 at the most), and what it
            counted stands for the later ones. That call is slower, and says ``flops_counted``; the other calls pay
            a few microseconds for their signature. What cannot be counted is Missing: compiled code, captures,
            coroutines and generators.

    Raises:
        ConfigurationError: An option, or a ``GPU_TIMED_*`` variable, cannot be used.
        MissingExtraError: ``work="count"``, or a mode of torch's, without torch.
        NotCallableError: What was decorated cannot be called.
    """
    if function is None:
        return lambda target: _decorate(
            target, name=name, sync=sync, late=late, every=every, mode=mode, attributes=attributes, work=work
        )
    return _decorate(
        function, name=name, sync=sync, late=late, every=every, mode=mode, attributes=attributes, work=work
    )


def _decorate(
    target: Any, *, name: str | None, mode: ModeSource | None, sync: SyncPolicy | None, **options: Any
) -> Any:
    """Decorate *target*; the options as in :func:`gpu_timed`."""
    if isinstance(target, staticmethod | classmethod):
        inner = _decorate(target.__func__, name=name, mode=mode, sync=sync, **options)
        return type(target)(inner)
    kinds.refuse(target)
    held = current.settings()
    if options.get("work") == COUNT and "torch" not in sys.modules and importlib.util.find_spec("torch") is None:
        raise missing_extra("work='count'", "torch", "torch")
    if sync == "device" and kinds.suspends(target):
        raise ConfigurationError(
            "sync='device' would block the event loop of a coroutine: use 'boundary' or 'deferred'."
        )
    if mode is not None:
        _check_mode(target, mode)
    site = current.new_site(
        kinds.name_of(target) if name is None else name,
        sync=sync,
        mode=mode,
        code=code_attributes(target),
        launch=kinds.launch_of(target),
        **options,
    )
    if held.disabled and mode is None and not current.modes.names(site.name):
        return target
    return kinds.wrap(target, site, current.door)


def _check_mode(target: Any, mode: ModeSource) -> None:
    """Raise where *target* could never run in *mode*."""
    found = None if callable(mode) else mode_of(mode)
    if isinstance(found, Eager):
        return
    if kinds.suspends(target) or inspect.isgeneratorfunction(target):
        shown = "a function" if found is None else repr(found.name)
        raise ConfigurationError(
            f"mode={shown} cannot be honoured: {functions.SUSPENDED}. Decorate the function that it calls."
        )
    if found is not None and "torch" not in sys.modules and importlib.util.find_spec("torch") is None:
        raise missing_extra(f"mode={found.name!r}", "torch", "torch")


def use_mode(mode: str | Mode, *, match: str = "*") -> UseMode:
    """Run calls of matching sites in another mode, inside a ``with`` block, or each call of what it decorates.

    In this context only.

    ``with use_mode("reduce-overhead", match="decode*"): …`` Another thread, or a task that is running already, is not
    affected; a task or thread that copies the context is. The innermost block that matches goes before all others,
    before ``GPU_TIMED_MODE`` and before ``mode=`` at the decorator. It reaches what is decorated; with
    ``GPU_TIMED_DISABLED=1`` that is only what has a mode of its own (``mode="eager"`` will do).

    Args:
        mode: As in :func:`gpu_timed`, but for a function.
        match: Names of the spans, with ``*``, ``?`` and ``[…]`` as in file names.

    Raises:
        ConfigurationError: A value cannot be used, or what is decorated is a class or a generator.
        NotCallableError: What is decorated cannot be called.
    """
    made = UseMode(current.modes, mode, match)
    if current.settings().disabled:
        current.ledger().fault(
            "use_mode_disabled", "GPU_TIMED_DISABLED is set: use_mode() reaches only what has a mode= of its own"
        )
    return made


def gpu_span(
    name: str,
    *,
    sync: SyncPolicy | None = None,
    late: LatePolicy | None = None,
    every: int = 1,
    attributes: Mapping[str, Any] | None = None,
    work: Work | None = None,
) -> _Block:
    """Make a block of code a span, in a ``with`` or an ``async with``.

    ``with gpu_span("prefill") as span: …`` needs nothing else.
    ``span.wait(timeout_s)`` gives the record once the block has ended, ``span.record`` is it, or None while
    the device is not done. Around an ``await`` use ``async with``; if other spans put work on the same
    stream meanwhile, the span says ``interleaved``.

    Args:
        name: Name of the span: from code, never from data.
        sync: As in :func:`gpu_timed`; ``async with`` defaults to ``deferred``.
        late: As in :func:`gpu_timed`.
        every: Record one execution in this many. All are counted.
        attributes: Attributes of this span.
        work: What this block has to do. Where that is known only inside it: ``span.set_work(Work(...))``.

    Raises:
        ConfigurationError: An option cannot be used.
    """
    if tracing.compiling():  # as decorated functions do: compile as if it were not there, and say so once
        current.traced(name)
        return cast("_Block", contextlib.nullcontext())
    if not isinstance(name, str):
        raise NotCallableError(
            f"gpu_span takes the name of a block, not {type(name).__name__}. To decorate, use @gpu_timed."
        )
    if attributes is not None and not isinstance(attributes, Mapping):
        raise ConfigurationError(f"attributes must be a mapping, not {type(attributes).__name__}.")
    if work is not None and not isinstance(work, Work):
        shown = repr(work) if isinstance(work, str) else type(work).__name__
        raise ConfigurationError(
            f"work of a block must be a Work, not {shown}: a block has no arguments. Give "
            "work=Work(flops=2 * M * N * K), or call span.set_work(Work(...)) inside it."
        )
    current.settings()
    caller = sys._getframe(1)  # noqa: SLF001 - which block of code this is
    options: dict[str, Any] = {"sync": sync, "late": late, "every": every}

    def make() -> Site:
        return current.new_site(name, code=frame_attributes(caller), **options)

    try:
        site = current.site((name, caller.f_code, *options.values()), make)
    except TypeError:  # an option that is not even hashable: let the site say which
        site = make()
    return _Block(site, attributes, work)


class _Block:
    """One ``with gpu_span(…)`` block."""

    __slots__ = ("_attributes", "_opened", "_site", "_work")

    def __init__(self, site: Site, attributes: Mapping[str, Any] | None, work: Work | None = None) -> None:
        self._site = site
        self._attributes = attributes
        self._work = work
        self._opened: list[Span | Unrecorded | None] = []  # one block object may be entered while it is open

    def __enter__(self) -> Span | Unrecorded:
        return self._enter(suspends=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        opened = self._opened[-1]
        try:
            if opened is not None:
                opened.owner.leave(opened, error)
        except BaseException:  # an interrupt on the way into it
            if opened is not None:
                opened.owner.mend(opened)
            raise
        finally:
            self._opened.pop()

    async def __aenter__(self) -> Span | Unrecorded:
        if self._site.sync == "device":
            raise ConfigurationError("sync='device' would block the event loop: use 'boundary' or 'deferred'.")
        return self._enter(suspends=True)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        opened = self._opened[-1]
        try:
            if opened is not None:
                await functions.close(opened, error)
        except BaseException:
            if opened is not None:
                opened.owner.mend(opened)
            raise
        finally:
            self._opened.remove(opened)

    def wait(self, timeout_s: float | None = None) -> Any:
        """Refuse: the span is what the block gives."""
        raise ConfigurationError(
            f"the numbers are the span's, not the block's: with gpu_span({self._site.name!r}) as span: … "
            f"then span.wait({timeout_s or ''})."
        )

    record = property(wait)

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise ConfigurationError(
            f"gpu_span is a block: with gpu_span({self._site.name!r}): … "
            f"To decorate a function write @gpu_timed(name={self._site.name!r})."
        )

    def _enter(self, *, suspends: bool) -> Span | Unrecorded:
        opened = current.enter(self._site, suspends=suspends, extra=self._attributes)
        try:
            if self._work is not None and isinstance(opened, Span):
                opened.work = self._work
            self._opened.append(opened)
            return opened if opened is not None else Unrecorded(current, self._site)
        except BaseException:  # an interrupt of the user's: what was not entered is not left
            if opened is not None:
                opened.owner.mend(opened)
            raise
