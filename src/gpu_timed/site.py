"""The site: one decorated callable or one span name, and all that is known before any call."""

from __future__ import annotations

import inspect
import itertools
import types
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final, Literal

from gpu_timed.errors import ConfigurationError
from gpu_timed.mode_values import Mode, ModeSource, mode_of
from gpu_timed.ports import Lasting, Launch
from gpu_timed.settings import LatePolicy, SyncPolicy, check_late, check_sync
from gpu_timed.values import AttributeValue, clean_all
from gpu_timed.work import COUNT, Work, check_work

CODE_FUNCTION_NAME: Final = "code.function.name"
CODE_FILE_PATH: Final = "code.file.path"
CODE_LINE_NUMBER: Final = "code.line.number"

QUIET_CALLS: Final = 32
"""Latest calls by which the usual one is known."""
MOST_INPUTS: Final = 256
"""Inputs remembered while a library tunes itself for each shape."""
MOST_LASTING: Final = 16
"""Events that hold for later calls."""
MOST_SIGNATURES: Final = 64
"""Signatures of a site that are counted; of others the work is not known."""
BEYOND: Final = "beyond"
"""Key under which the calls with other signatures are counted."""

AttributeSource = Mapping[str, Any] | Callable[..., Mapping[str, Any]]
WorkSource = Work | Callable[..., Work | None] | Literal["count"]


class Site:
    """What a call needs and no call changes, but for the count of calls.

    Args:
        name: Name of its spans: from code, never from data.
        sync: Sync policy, or None for the process's.
        late: Which span may be late, or None for the process's.
        every: Record one call in this many; every call is counted.
        mode: Mode to launch in, a function of the call's arguments that says it, or None to leave calls as they are.
        attributes: Attributes of every span, or a function of the call's arguments that returns them.
        code: ``code.*`` attributes of the function.
        launch: Which runtime its work goes to, where that is known beforehand.
        work: What every call has to do, a function of the call's arguments that says it, or ``"count"``.

    Raises:
        ConfigurationError: An option cannot be used.
    """

    __slots__ = (
        "__weakref__",
        "attributes",
        "calls",
        "counted",
        "every",
        "inputs",
        "inputs_dropped",
        "lasting",
        "lasting_dropped",
        "late",
        "launch",
        "launchers",
        "mode",
        "mode_source",
        "moded",
        "name",
        "quiet_ns",
        "sync",
        "variable_attributes",
        "work",
        "work_source",
    )

    def __init__(
        self,
        name: str,
        *,
        sync: SyncPolicy | None = None,
        late: LatePolicy | None = None,
        every: int = 1,
        mode: ModeSource | None = None,
        attributes: AttributeSource | None = None,
        code: Mapping[str, AttributeValue] | None = None,
        launch: Launch | None = None,
        work: WorkSource | None = None,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"a span's name must be a text with something in it, not {name!r}.")
        if sync is not None:
            check_sync(sync)
        if late is not None:
            check_late(late)
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ConfigurationError(
                f"every must be a whole number from 1 up, not {every!r}: every=10 records one call in ten."
            )
        if attributes is not None and not callable(attributes) and not isinstance(attributes, Mapping):
            raise ConfigurationError(
                f"attributes must be a mapping or a function of the call's arguments, not {type(attributes).__name__}."
            )
        if work is not None:
            check_work(work)
        self.name = name
        self.sync: SyncPolicy | None = sync
        self.late: LatePolicy | None = late
        self.every = every
        #: How its calls are to be launched, if that is always the same.
        self.mode: Mode | None = None if mode is None or _is_function(mode) else mode_of(mode)
        #: Else a function of a call's arguments that says it.
        self.mode_source: Any = mode if mode is not None and self.mode is None else None
        #: Whether it has a mode of its own. Read by every call.
        self.moded = mode is not None
        #: What launches its calls in a mode, by function and mode: see :mod:`gpu_timed.modes`.
        self.launchers: dict[Any, Any] = {}
        self.launch = launch
        self.variable_attributes = attributes if callable(attributes) else None
        fixed = clean_all(attributes) if isinstance(attributes, Mapping) else {}
        self.attributes: dict[str, AttributeValue] = {**(code or {}), **fixed}
        #: What every call has to do, if that is always the same.
        self.work = work if isinstance(work, Work) else None
        #: Else what says it for each call: a function of its arguments, or ``"count"``.
        self.work_source: Any = None if isinstance(work, Work) else work
        #: What torch counted, by input signature; None where it is not asked to, or its calls are suspended.
        self.counted: dict[Any, Any] | None = {} if work == COUNT else None
        self.calls = itertools.count()
        #: Host nanoseconds of its latest calls that no full launch queue held up.
        self.quiet_ns: deque[int] = deque(maxlen=QUIET_CALLS)
        #: What happened in one of its calls and holds for later ones, with the index of that call. The latest only.
        self.lasting: deque[tuple[int, Lasting]] = deque(maxlen=MOST_LASTING)
        self.lasting_dropped = 0
        #: Inputs it was called with while a library tuned itself for each shape, oldest first; the values mean nothing.
        self.inputs: dict[Hashable, None] = {}
        self.inputs_dropped = 0

    def is_new(self, signature: Hashable) -> bool:
        """Return whether *signature* was not among its inputs so far, of which the latest 256 are remembered."""
        inputs = self.inputs
        if signature in inputs:
            return False
        if len(inputs) >= MOST_INPUTS:
            self.inputs_dropped += 1
            inputs.pop(next(iter(inputs), None), None)
        inputs[signature] = None
        return True

    @property
    def called(self) -> int:
        """How often it was called in this process, recorded or not."""
        return calls_in(self.calls)

    def __reduce__(self) -> Any:
        """Pickle the options; a copy in another process counts its own calls."""
        options = {
            "sync": self.sync,
            "late": self.late,
            "every": self.every,
            "mode": self.mode or self.mode_source,
            "attributes": self.variable_attributes,
            "code": self.attributes,
            "launch": self.launch,
            "work": self.work or self.work_source,
        }
        return _restore, (self.name, options)


def _is_function(mode: Any) -> bool:
    return callable(mode) and not isinstance(mode, type)


def calls_in(counter: itertools.count[int]) -> int:
    """Return what *counter* would give next, without taking it: its text is the only way to see that."""
    return int(repr(counter)[len("count(") : -1])


def _restore(name: str, options: dict[str, Any]) -> Site:
    return Site(name, **options)


def code_attributes(function: Any) -> dict[str, AttributeValue]:
    """Return OpenTelemetry's ``code.*`` attributes of a Python *function*, as far as it has them."""
    found: dict[str, AttributeValue] = {}
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if qualname:
        found[CODE_FUNCTION_NAME] = f"{module}.{qualname}" if module else qualname
    try:
        inner = inspect.unwrap(function)  # past decorators that kept its name and not its place
    except ValueError:  # a circle of __wrapped__
        inner = function
    code = getattr(inner, "__code__", None)
    if code is not None:
        found[CODE_FILE_PATH] = code.co_filename
        found[CODE_LINE_NUMBER] = code.co_firstlineno
    return found


def frame_attributes(frame: types.FrameType) -> dict[str, AttributeValue]:
    """Return the ``code.*`` attributes of the code that runs in *frame*, where it stands now."""
    module = frame.f_globals.get("__name__", "")
    code = frame.f_code
    return {
        CODE_FUNCTION_NAME: f"{module}.{code.co_qualname}" if module else code.co_qualname,
        CODE_FILE_PATH: code.co_filename,
        CODE_LINE_NUMBER: frame.f_lineno,
    }
