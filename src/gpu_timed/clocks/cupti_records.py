"""What CUPTI's activity records say: copied out of its buffers, and checked before anybody believes them.

Records are read through NumPy's view of the buffer they lie in: reading one through the attributes of its Python
object takes 14 µs (measured with cupti-python 13.0.1), and a record has a dozen. CUPTI's layouts only grow at
their ends; the newest one that cupti-python knows is taken, by the name of its dtype.

NumPy comes with cupti-python and is imported only where there is something to read.
"""

from __future__ import annotations

import ctypes
import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import numpy as np

    Table: TypeAlias = np.ndarray[Any, np.dtype[Any]]

Kind: TypeAlias = Literal["kernel", "memcpy", "memset", "runtime", "driver", "module", "external_correlation"]
"""What CUPTI can write down: what ran on a device (the first three), calls of the two APIs, modules, and the
ids that an application pushed."""

EXECUTIONS: Final[tuple[Kind, ...]] = ("kernel", "memcpy", "memset")
"""Kinds that ran on a device, with a start and an end."""
KINDS: Final[Mapping[Kind, tuple[str, str]]] = {
    "kernel": ("CONCURRENT_KERNEL", "activity_kernel"),
    "memcpy": ("MEMCPY", "activity_memcpy"),
    "memset": ("MEMSET", "activity_memset"),
    "runtime": ("RUNTIME", "activity_api"),
    "driver": ("DRIVER", "activity_api"),
    "module": ("MODULE", "activity_module"),
    "external_correlation": ("EXTERNAL_CORRELATION", "activity_external_correlation"),
}
"""Of each kind: its member of ``cupti.ActivityKind``, and how the dtype of its records is called but for a number."""
_KIND_BYTES: Final = 4
"""Every record begins with its kind, 32 bits wide."""
_LEEWAY_NS: Final = 1_000_000_000
"""How far outside its session a record may lie before it cannot be of it: the host's realtime clock may be slewed."""
_FIELDS: Final = ("start", "end", "device_id", "context_id", "stream_id", "correlation_id", "graph_id", "graph_node_id")


class Execution(NamedTuple):
    """One kernel, copy or memset as the device ran it."""

    start_ns: int
    """Unix time."""
    end_ns: int
    kind: Kind
    name: str
    """Of a kernel, as the compiler has it (mangled); else the kind."""
    device: int
    """Index as CUPTI counts: among the devices that this process sees."""
    context: int
    """CUPTI's own number of the context."""
    stream: int
    """CUPTI's own number of the stream within its context: not the raw handle. The default stream has one too."""
    correlation: int
    """One number for one launch: all kernels of a graph's replay have the same."""
    graph: int
    """CUPTI's number of the graph that launched it; 0 of what no graph launched."""
    graph_node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """What a session found, and what it missed. What cannot be right is counted and left out."""

    executions: tuple[Execution, ...]
    """In the order in which they began."""
    others: Mapping[Kind, Table] = field(default_factory=dict)
    """Records of the other kinds, as structured arrays with cupti-python's fields. Pointers in them are dead."""
    dropped: int = 0
    """Records that CUPTI had no room for, by its own count."""
    over: int = 0
    """Records that were not kept, since there were more than was asked to keep."""
    unfinished: int = 0
    """Executions without a start or an end: CUPTI writes 0 for what it could not collect."""
    misplaced: int = 0
    """Executions outside the session in time: another tool's clock, or another session's leftovers."""
    faults: int = 0
    """Buffers that could not be read."""
    fault: str = ""
    """What was wrong with the first of those."""

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return not (self.dropped or self.over or self.unfinished or self.misplaced or self.faults)

    @property
    def note(self) -> str:
        """What is missing, in words; empty of complete records."""
        said = (
            (self.dropped, "dropped by CUPTI for want of room"),
            (self.over, "more than were kept"),
            (self.unfinished, "without a start or an end"),
            (self.misplaced, "outside the time of the session"),
            (self.faults, f"buffers could not be read ({self.fault})"),
        )
        return "; ".join(f"{count} {words}" for count, words in said if count)


class Chunk(NamedTuple):
    """Records of one kind out of one buffer, copied."""

    kind: Kind
    table: Table
    names: tuple[str, ...] = ()
    """Of kernels: their names, one for each row."""


class Layout(NamedTuple):
    """How the records of one kind lie in a buffer."""

    kind: Kind
    number: int
    """As ``cupti.ActivityKind`` counts."""
    dtype: Any


def layouts(cupti: Any, kinds: Iterable[Kind]) -> dict[int, Layout]:
    """Return the newest layout of each kind that this *cupti* knows, by CUPTI's number of the kind.

    Raises:
        LookupError: It knows none of a kind, or one without the fields that are needed.
    """
    found = {}
    for kind in kinds:
        member, stem = KINDS[kind]
        pattern = re.compile(rf"{stem}(\d*)_dtype")
        versions = {int(match[1] or 0): name for name in dir(cupti) if (match := pattern.fullmatch(name))}
        number = getattr(cupti.ActivityKind, member, None)
        if not versions or number is None:
            raise LookupError(f"it has no records of the kind {kind!r}")
        dtype = getattr(cupti, versions[max(versions)])
        needed = ("kind", *(_FIELDS if kind in EXECUTIONS else ()), *(("name",) if kind == "kernel" else ()))
        missing = [name for name in needed if name not in dtype.names]
        if missing:
            raise LookupError(f"its records of the kind {kind!r} have no {', '.join(missing)}")
        found[int(number)] = Layout(kind, int(number), dtype)
    return found


def copied(activities: Sequence[Any], known: Mapping[int, Layout], buffer_bytes: int) -> list[Chunk]:
    """Copy the records of one buffer out of it.

    Args:
        activities: What cupti-python hands over for one completed buffer, in the order of the buffer.
        known: As :func:`layouts` gives them.
        buffer_bytes: How large the buffer is.

    Raises:
        ValueError: They do not lie in one buffer.
    """
    np = importlib.import_module("numpy")
    if not len(activities):
        return []
    first, last = activities[0].ptr, activities[-1].ptr
    if not 0 <= last - first < buffer_bytes:
        raise ValueError("records that are not of one buffer")
    # Up to the kind of the last record, which says how long that one is.
    head = _bytes_at(np, first, last - first + _KIND_BYTES)
    offsets = _offsets(np, activities, head, last - first)
    numbers = _rows(np, head, offsets, np.dtype(np.int32))
    end = known.get(int(numbers[-1]))
    memory = _bytes_at(np, first, last - first + (end.dtype.itemsize if end else _KIND_BYTES))
    chunks = []
    for number, layout in known.items():
        mine = offsets[numbers == number]
        if not mine.size:
            continue
        table = _rows(np, memory, mine, layout.dtype)
        names = _texts(np, table["name"]) if layout.kind == "kernel" else ()
        if layout.kind in EXECUTIONS:
            table = _compact(np, table)
        chunks.append(Chunk(layout.kind, table, names))
    return chunks


def checked(
    chunks: Iterable[Chunk],
    *,
    began_ns: int,
    ended_ns: int,
    dropped: int = 0,
    over: int = 0,
    faults: Sequence[str] = (),
) -> Records:
    """Return what *chunks* hold together, without what cannot be right.

    Args:
        chunks: As :func:`copied` gives them.
        began_ns: Unix time before which nothing can have begun.
        ended_ns: Unix time after which nothing can have ended.
        dropped: As in :class:`Records`, and the next too.
        over: As in :class:`Records`.
        faults: One text for each buffer that could not be read.
    """
    np = importlib.import_module("numpy")
    found: list[Execution] = []
    others: dict[Kind, list[Table]] = {}
    unfinished = misplaced = 0
    for chunk in chunks:
        if chunk.kind not in EXECUTIONS:
            others.setdefault(chunk.kind, []).append(chunk.table)
            continue
        names: Sequence[str] = chunk.names or (chunk.kind,) * len(chunk.table)
        for row, name in zip(chunk.table.tolist(), names, strict=True):
            start, end = row[0], row[1]
            if not start or end < start:
                unfinished += 1
            elif start < began_ns - _LEEWAY_NS or end > ended_ns + _LEEWAY_NS:
                misplaced += 1
            else:
                found.append(Execution(start, end, chunk.kind, name, *row[2:]))
    found.sort()
    return Records(
        executions=tuple(found),
        others={kind: np.concatenate(tables) for kind, tables in others.items()},
        dropped=dropped,
        over=over,
        unfinished=unfinished,
        misplaced=misplaced,
        faults=len(faults),
        fault=faults[0] if faults else "",
    )


def _offsets(np: Any, activities: Sequence[Any], head: Table, last: int) -> Table:
    """Return where each record begins, in bytes from the first.

    Records of one kind are equally long, and their kinds say whether that guess is right; asking each record's
    object takes 1.4 µs.
    """
    first, count = activities[0].ptr, len(activities)
    stride, rest = divmod(last, count - 1) if count > 1 else (0, 0)
    if not rest and stride >= _KIND_BYTES:
        guess = np.arange(count) * stride
        numbers = _rows(np, head, guess, np.dtype(np.int32))
        regular = len(set(map(type, activities))) == 1 and (numbers == numbers[0]).all()
        if regular and all(activities[at].ptr - first == guess[at] for at in (1, count // 2)):
            return guess  # type: ignore[no-any-return]
    return np.array([activity.ptr - first for activity in activities])  # type: ignore[no-any-return]


def _bytes_at(np: Any, address: int, count: int) -> Table:
    """Return a view of memory that is CUPTI's: it is gone once the records are."""
    return np.frombuffer((ctypes.c_ubyte * count).from_address(address), dtype=np.uint8)  # type: ignore[no-any-return]


def _rows(np: Any, memory: Table, offsets: Table, dtype: Any) -> Table:
    """Copy one row of *dtype* from each of *offsets*."""
    taken = memory[offsets[:, None] + np.arange(dtype.itemsize)]
    return np.ascontiguousarray(taken).view(dtype)[:, 0]  # type: ignore[no-any-return]


def _compact(np: Any, table: Table) -> Table:
    """Return the columns that :class:`Execution` has, in its order."""
    compact = np.empty(len(table), dtype=[(name, table.dtype[name]) for name in _FIELDS])
    for name in _FIELDS:
        compact[name] = table[name]
    return compact  # type: ignore[no-any-return]


def _texts(np: Any, pointers: Table) -> tuple[str, ...]:
    """Return the texts that *pointers* point to: valid as long as the records are, so read at once."""
    distinct, which = np.unique(pointers, return_inverse=True)
    texts = [ctypes.string_at(int(pointer)).decode("utf-8", "replace") if pointer else "" for pointer in distinct]
    return tuple(texts[index] for index in which.tolist())
