"""Kernel records by NVIDIA's own ``cupti-python``: when each kernel began and ended, on the realtime axis.

An independent reference for what marks say, and not for every call: with records on, an eager loop of 108 kernels was
12 % slower on an H200, and the same as a CUDA graph 17 %.

CUPTI's times are Unix time on Linux: ``cuptiGetTimestamp`` lay between two reads of the host's realtime clock 200
times out of 200 on an H200. Every session asks that again before it begins.

Names of ``cupti.cupti`` used, as of cupti-python 13.0.1 (public; they follow CUPTI's C interface): ``subscribe_v2``,
``unsubscribe``, ``SubscriberParams``, ``activity_register_callbacks``, ``activity_enable``, ``activity_disable``,
``activity_flush_all``, ``activity_get_num_dropped_records``, ``get_timestamp``, ``finalize``, ``ActivityKind``, the
``activity_*_dtype`` and the records' ``ptr``. torch 2.14 has a monitor of its own in ``torch.profiler._cupti``:
private, and for libcupti 13.3 and later, so nothing is built on it; while it runs, it holds CUPTI like any other
profiler.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Self

from gpu_timed.clocks.cupti_records import KINDS, Chunk, Kind, Layout, Records, checked, copied, layouts
from gpu_timed.errors import ConfigurationError, GpuTimedError, missing_extra

BUFFER_BYTES: Final = 1 << 20
"""Size of a buffer: about 5,000 kernels. cupti-python makes an object of every record in it, at some 10 µs each and
all at once, so that a larger one would keep the interpreter for longer."""
KEEP: Final = 1_000_000
"""Records that a session keeps unless told otherwise: about 100 MB."""
_NAME: Final = "gpu_timed"
_MULTIPLE_SUBSCRIBERS: Final = 39
"""``CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED``."""
_FORCED: Final = 1
"""``CUPTI_ACTIVITY_FLAG_FLUSH_FORCED``: also buffers that are not full."""
_BRACKETS: Final = 50
_FIX: Final = (
    "CUPTI serves one at a time in a process. Run without Nsight or another profiler around it; where torch.profiler "
    "was used before in this process, set TEARDOWN_CUPTI=1 before that, or use a process of its own"
)


class RecordsUnavailable(GpuTimedError):  # noqa: N818 - reads as what was found
    """Kernel records cannot be had here; the message says why, and what to change if anything helps."""


class KernelRecords:
    """One session of records, from :meth:`start` to :meth:`stop`, or for the length of a ``with`` block.

    Only one can be in a process, and none beside another profiler. The device's work must have ended before records
    are taken: what still runs has no end yet, and is counted as unfinished.

    Args:
        kinds: What to write down.
        keep: How many records to keep at most; more are counted.
        buffer_bytes: Size of the buffers that CUPTI writes into.

    Raises:
        ConfigurationError: There is no such kind, or a number cannot be used.
    """

    def __init__(
        self, *, kinds: Sequence[Kind] = ("kernel",), keep: int = KEEP, buffer_bytes: int = BUFFER_BYTES
    ) -> None:
        unknown = [kind for kind in kinds if kind not in KINDS]
        if unknown or not kinds:
            raise ConfigurationError(f"kinds must be some of {', '.join(KINDS)}, not {unknown or list(kinds)}.")
        if keep < 1 or buffer_bytes < 4096:  # noqa: PLR2004 - some ten records
            raise ConfigurationError("keep must be 1 or more, and buffer_bytes 4096 or more.")
        self._kinds = tuple(dict.fromkeys(kinds))
        self._keep = keep
        self._buffer_bytes = buffer_bytes
        self._cupti: Any = None
        self._layouts: dict[int, Layout] = {}
        self._undo: list[tuple[str, Callable[[], Any]]] = []
        self._lock = threading.RLock()
        self._chunks: list[Chunk] = []
        self._kept = self._over = 0
        self._faults: list[str] = []
        self._dropped: int | None = None
        self._began_ns = 0
        #: What the ``with`` block found, once it has ended.
        self.found: Records | None = None

    # -- a session --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Attach CUPTI, and begin.

        Raises:
            MissingExtraError: cupti-python is not installed.
            RecordsUnavailable: It does not work here, or somebody else has CUPTI.
        """
        if self._undo:
            raise RecordsUnavailable("this session has begun already: stop() it first")
        self._cupti = cupti = load()
        try:
            self._layouts = layouts(cupti, self._kinds)
        except LookupError as error:
            raise RecordsUnavailable(f"this version of cupti-python is not understood: {error}") from error
        self._forget()
        self._began_ns = time.time_ns()
        try:
            self._attach(cupti)
        except RecordsUnavailable:
            self._detach()
            raise
        except Exception as error:
            self._detach()
            raise RecordsUnavailable(f"CUPTI refused: {type(error).__name__}: {error}") from error

    def take(self) -> Records:
        """Return what there is since the last time, and go on. Wait for the device before.

        Raises:
            RecordsUnavailable: The session has not begun.
        """
        if not self._undo:
            raise RecordsUnavailable("this session has not begun, or has ended: start() it first")
        self._safely("flush", lambda: self._cupti.activity_flush_all(_FORCED))
        return self._found()

    def stop(self) -> Records:
        """End the session, detach CUPTI, and return what there is since the last time. Wait for the device before.

        Never raises: what went wrong is among the faults. A session that has not begun has found nothing.
        """
        if not self._undo:
            return Records(executions=())
        self._detach()
        return self._found()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.found = self.stop()

    # -- inside -----------------------------------------------------------------------------------------

    def _attach(self, cupti: Any) -> None:
        """Take CUPTI, and enable what is to be written; what must be undone is noted step by step."""
        # Without this, a second user of the activity API takes the first one's buffers, and neither notices.
        subscriber = subscribe(cupti, _nothing, _NAME)
        self._undo.append(("finalise", cupti.finalize))
        self._undo.append(("unsubscribe", lambda: cupti.unsubscribe(subscriber)))
        error_ns = clock_error_ns(cupti.get_timestamp)
        if error_ns:
            raise RecordsUnavailable(
                f"CUPTI's clock is not the host's realtime clock here: it is off by {error_ns:+,} ns"
            )
        cupti.activity_register_callbacks(self._requested, self._completed)
        atexit.register(self._at_exit)
        self._undo.append(("forget the end of the process", lambda: atexit.unregister(self._at_exit)))
        # Flushed last of all, when nothing is written any more; and the device's buffers are still CUPTI's then.
        self._undo.append(("flush", lambda: cupti.activity_flush_all(_FORCED)))
        for number in self._layouts:
            cupti.activity_enable(number)
            self._undo.append(("disable", functools.partial(cupti.activity_disable, number)))

    def _detach(self) -> None:
        """Undo what :meth:`_attach` did, the other way round: disable, flush, unsubscribe, finalise."""
        if any(name == "flush" for name, _ in self._undo):
            # Once before disabling: that waits for nothing, and what lies in the device's buffers is handed over.
            self._safely("flush", lambda: self._cupti.activity_flush_all(_FORCED))
        while self._undo:
            name, step = self._undo.pop()
            if name == "unsubscribe":
                self._dropped = self._count_dropped()
            self._safely(name, step)

    def _safely(self, name: str, step: Callable[[], Any]) -> None:
        try:
            step()
        except Exception as error:  # noqa: BLE001 - the other steps must be done all the same
            self._fault(f"{name}: {type(error).__name__}: {error}")

    def _count_dropped(self) -> int:
        """Return how many records CUPTI had no room for since it was last asked."""
        count = ctypes.c_size_t()
        self._safely(
            "count what was dropped",
            lambda: self._cupti.activity_get_num_dropped_records(0, 0, ctypes.addressof(count)),
        )
        return count.value

    def _found(self) -> Records:
        dropped = self._dropped if self._dropped is not None else self._count_dropped()
        with self._lock:
            chunks, over, faults = self._chunks, self._over, self._faults
            self._forget()
        return checked(
            chunks, began_ns=self._began_ns, ended_ns=time.time_ns(), dropped=dropped, over=over, faults=faults
        )

    def _forget(self) -> None:
        self._chunks, self._faults, self._kept, self._over, self._dropped = [], [], 0, 0, None

    def _fault(self, text: str) -> None:
        with self._lock:
            self._faults.append(text)

    def _at_exit(self) -> None:
        """Detach before the interpreter ends: CUPTI's threads must not call into it then."""
        self._detach()

    # -- called by CUPTI, on threads of its own: an exception here would have nowhere to go -------------

    def _requested(self) -> tuple[int, int]:
        """Return the size of the next buffer, and no limit of records in it."""
        return self._buffer_bytes, 0

    def _completed(self, activities: Sequence[Any]) -> None:
        """Copy what is in a buffer: the records' objects hold it, and it is gone when they are."""
        try:
            if self._kept >= self._keep:
                with self._lock:
                    self._over += len(activities)
                return
            chunks = copied(activities, self._layouts, self._buffer_bytes)
            with self._lock:
                for chunk in chunks:
                    room = max(0, self._keep - self._kept)
                    size = len(chunk.table)
                    self._over += max(0, size - room)
                    self._kept += min(size, room)
                    self._chunks.append(Chunk(chunk.kind, chunk.table[:room], chunk.names[:room]))
        except Exception as error:  # noqa: BLE001
            with contextlib.suppress(Exception):
                self._fault(f"{type(error).__name__}: {error}")


def load(wanted: str = "Recording kernels") -> Any:
    """Return the module ``cupti.cupti``, which is *wanted* for something that a message names.

    Raises:
        MissingExtraError: cupti-python, or NumPy that it needs, is not installed.
        RecordsUnavailable: It cannot be loaded here.
    """
    if importlib.util.find_spec("cupti") is None or importlib.util.find_spec("numpy") is None:
        raise missing_extra(wanted, "cupti-python", "cupti")
    _preload()
    try:
        cupti = importlib.import_module("cupti.cupti")
    except Exception as error:
        raise RecordsUnavailable(f"cupti-python cannot be loaded: {type(error).__name__}: {error}") from error
    lacking = [name for name in ("subscribe", "activity_register_callbacks", "finalize") if not hasattr(cupti, name)]
    if lacking:
        raise RecordsUnavailable(f"this cupti-python has no {', '.join(lacking)}: 13.0 or later is needed")
    return cupti


def usable() -> str:
    """Return why kernel records cannot be had here, as far as that is known before a session; else nothing."""
    try:
        load()
    except GpuTimedError as error:
        return " ".join(str(error).split())
    return ""


def clock_error_ns(timestamp_ns: Callable[[], int], now_ns: Callable[[], int] = time.time_ns) -> int:
    """Return by how much CUPTI's clock misses the host's realtime clock, in nanoseconds; 0 where it does not.

    One reading of *timestamp_ns* lies between two of *now_ns*; the narrowest of some is taken.
    """
    best: tuple[int, int] | None = None
    for _ in range(_BRACKETS):
        before, stamp, after = now_ns(), timestamp_ns(), now_ns()
        error = min(0, stamp - before) or max(0, stamp - after)
        if after >= before and (best is None or after - before < best[0]):  # a step back of the clock is no bracket
            best = after - before, error
    return best[1] if best is not None else 0


def subscribe(cupti: Any, callback: Callable[..., None], name: str) -> int:
    """Become CUPTI's one subscriber, with nothing enabled yet; returns its handle. Others are told *name*.

    Raises:
        RecordsUnavailable: Somebody else is.
    """
    params = None
    if hasattr(cupti, "subscribe_v2") and hasattr(cupti, "SubscriberParams"):
        params = cupti.SubscriberParams()
        params.struct_size = cupti.SUBSCRIBER_PARAMS_SIZE
        params.subscriber_name = name
    try:
        handle = cupti.subscribe(callback, None) if params is None else cupti.subscribe_v2(callback, None, params.ptr)
    except Exception as error:
        if getattr(error, "status", None) != _MULTIPLE_SUBSCRIBERS:
            raise
        other = getattr(params, "old_subscriber_name", None)
        named = f" ({other})" if other else ""
        raise RecordsUnavailable(f"another profiler{named} has CUPTI in this process. {_FIX}.") from error
    return int(handle)


def _nothing(*_: object) -> None:
    """Stand for a callback that is never enabled."""


def _preload() -> None:
    """Load the libcupti that lies beside torch, where the loader would not look for it."""
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        major = importlib.metadata.version("cupti-python").partition(".")[0]
        spec = importlib.util.find_spec("nvidia")
        for root in (spec.submodule_search_locations or ()) if spec is not None else ():
            for folder in (f"cu{major}/lib", "cuda_cupti/lib"):
                library = Path(root) / folder / f"libcupti.so.{major}"
                if library.exists():
                    with contextlib.suppress(OSError):  # cupti-python says what is wrong with it
                        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
                    return
