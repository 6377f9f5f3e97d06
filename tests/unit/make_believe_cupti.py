"""A make-believe ``cupti.cupti``: buffers laid out as CUPTI's, that are overwritten once their records are gone."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

KERNEL, MEMCPY, RUNTIME = 10, 1, 5
MULTIPLE_SUBSCRIBERS = 39


def _dtype(itemsize: int, **fields: tuple[str, int]) -> np.dtype:
    """Return a dtype of *fields* (format, offset)."""
    held = {
        "names": list(fields),
        "formats": [f for f, _ in fields.values()],
        "offsets": [o for _, o in fields.values()],
    }
    return np.dtype({**held, "itemsize": itemsize})


# As of cupti-python 13.0.1.
KERNEL10 = _dtype(
    216,
    kind=("<i4", 0),
    start=("<u8", 16),
    end=("<u8", 24),
    device_id=("<u4", 40),
    context_id=("<u4", 44),
    stream_id=("<u4", 48),
    correlation_id=("<u4", 92),
    name=("<i8", 104),
    graph_node_id=("<u8", 144),
    graph_id=("<u4", 156),
)
MEMCPY6 = _dtype(
    96,
    kind=("<i4", 0),
    bytes=("<u8", 8),
    start=("<u8", 16),
    end=("<u8", 24),
    device_id=("<u4", 32),
    context_id=("<u4", 36),
    stream_id=("<u4", 40),
    correlation_id=("<u4", 44),
    graph_node_id=("<u8", 64),
    graph_id=("<u4", 72),
)
API = _dtype(
    40,
    kind=("<i4", 0),
    cbid=("<u4", 4),
    start=("<u8", 8),
    end=("<u8", 16),
    thread_id=("<u4", 28),
    correlation_id=("<u4", 32),
)
DTYPES = {KERNEL: KERNEL10, MEMCPY: MEMCPY6, RUNTIME: API}


class CuptiError(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class KernelActivity:
    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class MemcpyActivity(KernelActivity):
    pass


class ApiActivity(KernelActivity):
    pass


CLASSES = {KERNEL: KernelActivity, MEMCPY: MemcpyActivity, RUNTIME: ApiActivity}


class Buffer:
    """Records in a buffer, as bytes; *skip* kinds are in it and cupti-python makes no object of them."""

    def __init__(self, *records: tuple[int, dict[str, Any]], skip: tuple[int, ...] = (), grown: int = 0) -> None:
        self._names: list[Any] = []
        sizes = [DTYPES[kind].itemsize + grown for kind, _ in records]
        self.memory = np.zeros(sum(sizes), dtype=np.uint8)
        self.activities: list[Any] = []
        at = 0
        for (kind, values), size in zip(records, sizes, strict=True):
            dtype = DTYPES[kind]
            row = self.memory[at : at + dtype.itemsize].view(dtype)
            row["kind"] = kind
            for name, value in values.items():
                row[name] = self._pointer(value) if isinstance(value, str) else value
            if kind not in skip:
                self.activities.append(CLASSES[kind](self.memory.ctypes.data + at))
            at += size

    def _pointer(self, text: str) -> int:
        held = ctypes.create_string_buffer(text.encode())
        self._names.append(held)
        return ctypes.addressof(held)

    def free(self) -> None:
        """Overwrite everything, as memory that somebody else has taken."""
        self.memory[:] = 0xEE
        for name in self._names:
            ctypes.memset(name, ord("?"), len(name.value))


def kernel(start: int, end: int, name: str = "k", **values: Any) -> tuple[int, dict[str, Any]]:
    return KERNEL, {"start": start, "end": end, "name": name, **values}


class FakeCupti:
    """What the session calls, noting the order of the calls; ``refuse`` names calls that raise."""

    SUBSCRIBER_PARAMS_SIZE = 32
    activity_kernel9_dtype = np.dtype([("kind", "<i4")])
    activity_kernel10_dtype = KERNEL10
    activity_memcpy6_dtype = MEMCPY6
    activity_memcpy_pto_p4_dtype = np.dtype([("kind", "<i4")])
    activity_api_dtype = API

    def __init__(self) -> None:
        self.ActivityKind = SimpleNamespace(CONCURRENT_KERNEL=KERNEL, MEMCPY=MEMCPY, RUNTIME=RUNTIME)
        self.calls: list[str] = []
        self.refuse: dict[str, Exception] = {}
        self.dropped = 0
        self.other = ""
        self.clock: Callable[[], int] = time.time_ns
        self.pending: list[Buffer] = []
        self.CallbackDomain = SimpleNamespace(RESOURCE=3)
        self.CallbackIdResource = SimpleNamespace(MODULE_LOADED=6)
        self.holders: list[str] = []
        self._callback: Any = None
        self._enabled: set[tuple[int, int]] = set()
        self.buffer_bytes = 0

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.refuse:
            raise self.refuse[name]

    def SubscriberParams(self) -> Any:  # noqa: N802 - as NVIDIA has it
        self._params = SimpleNamespace(ptr=1234, struct_size=0, subscriber_name=None, old_subscriber_name=self.other)
        return self._params

    def subscribe(self, callback: Any, userdata: Any) -> int:
        raise AssertionError("the newer call is there")

    def subscribe_v2(self, callback: Any, userdata: Any, params: int) -> int:
        self._called("subscribe")
        if self.holders:
            self._params.old_subscriber_name = self.holders[0]
            raise CuptiError(MULTIPLE_SUBSCRIBERS, "one is enough")
        self.holders.append(self._params.subscriber_name)
        self._callback, self._enabled = callback, set()
        return 77

    def unsubscribe(self, subscriber: int) -> None:
        assert subscriber == 77
        self.holders.clear()
        self._callback = None
        self._called("unsubscribe")

    def enable_callback(self, enable: int, subscriber: int, domain: int, number: int) -> None:
        assert (enable, subscriber) == (1, 77)
        self._called("enable_callback")
        self._enabled.add((domain, number))

    def load_module(self) -> None:
        """Do what a first launch does: who is told of modules is told of one, on this thread."""
        if (3, 6) in self._enabled and self._callback is not None:
            self._callback(None, 3, 6, object())

    def get_timestamp(self) -> int:
        return self.clock()

    def activity_register_callbacks(self, requested: Any, completed: Any) -> None:
        self._called("register")
        self.buffer_bytes, most = requested()
        assert most == 0
        self._completed = completed

    def activity_enable(self, kind: int) -> None:
        self._called(f"enable {kind}")

    def activity_disable(self, kind: int) -> None:
        self._called(f"disable {kind}")

    def activity_flush_all(self, flag: int) -> None:
        self._called("flush")
        assert flag == 1
        while self.pending:
            self.deliver(self.pending.pop(0))

    def activity_get_num_dropped_records(self, context: int, stream: int, address: int) -> None:
        self._called("dropped")
        ctypes.c_size_t.from_address(address).value, self.dropped = self.dropped, 0

    def finalize(self) -> None:
        self._called("finalize")

    def deliver(self, buffer: Buffer) -> None:
        """Hand a buffer over, and take it back."""
        activities = buffer.activities
        self._completed(activities)
        activities.clear()
        buffer.free()
