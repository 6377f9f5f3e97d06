"""The modes as values: how a call can be asked to launch its work. Which of them ran is on the record.

A text is shorthand for a value with its defaults: ``"cuda_graph"`` for ``CudaGraph()``, ``"reduce-overhead"`` for
``Compile("reduce-overhead")``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Final, Literal, NamedTuple, TypeAlias, cast, get_args

from gpu_timed.errors import ConfigurationError, unknown_value

ModeName: TypeAlias = Literal[
    "eager", "cuda_graph", "compile", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
]
CompileMode: TypeAlias = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
Outputs: TypeAlias = Literal["clone", "alias"]
Inputs: TypeAlias = Literal["copy", "static"]

MODES: Final[frozenset[str]] = frozenset(get_args(ModeName))
_COMPILE_MODES: Final = frozenset(get_args(CompileMode))
_WITH_GRAPHS: Final = frozenset({"reduce-overhead", "max-autotune"})
_MOST: Final = 10_000
_GIB: Final = 1 << 30


def _word(what: str, value: object, known: Any) -> None:
    if not isinstance(value, str) or value not in known:
        raise unknown_value(what, value, known)


def _flags(held: Any, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(held, name), bool):
            raise ConfigurationError(f"{name} must be True or False, not {getattr(held, name)!r}.")


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Eager:
    """Each call as the function is written."""

    name: ClassVar[str] = "eager"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Compile:
    """Through ``torch.compile``, once for each site.

    Args:
        mode: As ``torch.compile`` takes it. ``reduce-overhead`` and ``max-autotune`` use CUDA Graphs as well.
        fullgraph: Refuse code that needs more than one graph, instead of running it in pieces.
        dynamic: As ``torch.compile`` takes it.
        outputs: ``clone`` hands out copies that the next replay of torch's CUDA Graphs cannot overwrite; ``alias``
            hands out torch's own, which are valid until the next call. Without CUDA Graphs nothing is copied.
        backend: As ``torch.compile`` takes it.
        strict: Raise :class:`~gpu_timed.errors.ModeError` where it cannot be compiled, instead of running as it is.

    Raises:
        ConfigurationError: A value cannot be used.
    """

    mode: CompileMode = "default"
    fullgraph: bool = False
    dynamic: bool | None = None
    outputs: Outputs = "clone"
    backend: str | Callable[..., Any] = "inductor"
    strict: bool = False

    def __post_init__(self) -> None:
        _word("mode of torch.compile", self.mode, _COMPILE_MODES)
        _word("way to hand out outputs", self.outputs, get_args(Outputs))
        _flags(self, "fullgraph", "strict")
        if self.dynamic is not None:
            _flags(self, "dynamic")
        if not callable(self.backend) and (not isinstance(self.backend, str) or not self.backend):
            raise ConfigurationError(f"backend must be a name or a function, not {self.backend!r}.")
        if self.backend != "inductor" and self.mode != "default":
            raise ConfigurationError(f"mode {self.mode!r} is Inductor's: leave out backend=, or mode=.")

    @property
    def name(self) -> str:
        """What it is called on a record."""
        return "compile" if self.mode == "default" else self.mode

    @property
    def uses_graphs(self) -> bool:
        """Whether torch captures what it compiled into CUDA Graphs, where it can."""
        return self.mode in _WITH_GRAPHS


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class CudaGraph:
    """One CUDA Graph for each input signature: captured after a warm-up, replayed from then on.

    A signature is shapes, dtypes, devices and strides of the tensors, the other arguments, and the state of grad
    mode, inference mode and autocast.

    What the function reads on the host is compared at each replay, and what changed has it captured anew. Not noticed
    is what changes later in iterators, generators and other objects of C, in random numbers of the host, context
    variables, thread's locals, files and the environment, in settings of torch and other libraries, in arrays of the
    host of more than 64 KiB, and under names made at run time.

    Args:
        warmup: Calls of a signature that run eagerly, watched, before one is captured, at least 1.
        max_graphs: Graphs of a site that are kept, at least 1; beyond it the one that was replayed longest ago goes.
        inputs: ``copy`` copies the arguments into the graph's own; ``static`` replays on the tensors of the capture
            as they are: the signature then holds their addresses, and nothing is copied.
        outputs: ``clone`` hands out copies; ``alias`` the graph's own, which the next replay overwrites.
        audit_every: Compare one replay in this many with an eager run; None for the first of each signature only.
        strict: Raise :class:`~gpu_timed.errors.ModeError` where it cannot be captured, instead of running eagerly.
        reset: Called before the capture, which runs the host's part once more: puts host state of the function back to
            what it was before the call. Without it, a function that changes host state is not captured.
        mutates: Called with the call's arguments; returns the tensors that the function changes by kernels that are
            no operations of torch (Triton, Numba, CuPy), which cannot be seen otherwise.
        max_state_bytes: What may be set aside to undo changes of state; a call that changes more is not captured, nor
            one that changes more than a quarter of what the device has left.
        collectives: Capture calls that exchange data with other ranks: all ranks make the same calls, with the same
            host state. One that replays while another does not is undefined (NCCL: captured by all or by none).

    Raises:
        ConfigurationError: A value cannot be used.
    """

    warmup: int = 3
    max_graphs: int = 16
    inputs: Inputs = "copy"
    outputs: Outputs = "clone"
    audit_every: int | None = None
    strict: bool = False
    reset: Callable[[], object] | None = None
    mutates: Callable[..., Any] | None = None
    max_state_bytes: int = _GIB
    collectives: bool = False
    name: ClassVar[str] = "cuda_graph"

    def __post_init__(self) -> None:
        for name, least in (("warmup", 1), ("max_graphs", 1), ("audit_every", 1), ("max_state_bytes", 0)):
            value = getattr(self, name)
            if value is None and name == "audit_every":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigurationError(f"{name} must be a whole number from {least} up, not {value!r}.")
        if self.max_graphs > _MOST:
            raise ConfigurationError(f"max_graphs must be at most {_MOST:,}, not {self.max_graphs!r}.")
        _word("way to take inputs", self.inputs, get_args(Inputs))
        _word("way to hand out outputs", self.outputs, get_args(Outputs))
        _flags(self, "strict", "collectives")
        for name, kind in (
            ("reset", "without arguments"),
            ("mutates", "of the call's arguments, that returns the tensors"),
        ):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise ConfigurationError(f"{name} must be a function {kind}, not {getattr(self, name)!r}.")


Mode: TypeAlias = Eager | Compile | CudaGraph
ModeSource: TypeAlias = str | Mode | Callable[..., str | Mode | None]
"""A mode, its name, or a function of the call's arguments that returns one of them, or None: leave it as it is."""

EAGER: Final = Eager()
_BY_NAME: Final[dict[str, Mode]] = {
    "eager": EAGER,
    "cuda_graph": CudaGraph(),
    "compile": Compile(),
    "reduce-overhead": Compile("reduce-overhead"),
    "max-autotune": Compile("max-autotune"),
    "max-autotune-no-cudagraphs": Compile("max-autotune-no-cudagraphs"),
}


class Ran(NamedTuple):
    """How a call was launched."""

    mode: str
    """What ran; empty where the mode was refused, and the call with it, or compiling it raised."""
    requested: str
    """What was asked for."""
    reason: str = ""
    """Why they differ, or what else is to be known."""
    graph_memory_bytes: int | None = None
    """What the CUDA Graphs of the site hold of the device's memory, as of its last capture; None where it has none."""


class Rule(NamedTuple):
    """Which sites are to run in which mode."""

    match: str
    """Glob over names of spans."""
    mode: Mode


def mode_of(value: object) -> Mode:
    """Return the mode that *value*, a mode or its name, stands for: the same object for what is equal.

    Raises:
        ConfigurationError: It is neither.
    """
    if isinstance(value, str):
        found = _BY_NAME.get(value)
        if found is not None:
            return cast("Mode", _the_same(found))
    elif isinstance(value, Eager | Compile | CudaGraph):
        try:
            return cast("Mode", _the_same(value))
        except TypeError:
            raise ConfigurationError(f"what a mode holds must be hashable: {value!r}.") from None
    elif isinstance(value, type) and value in (Eager, Compile, CudaGraph):
        raise ConfigurationError(f"a mode is a value, and {value.__name__} its class: write {value.__name__}().")
    raise unknown_value("mode", value, MODES)


_known: Final[weakref.WeakKeyDictionary[Any, weakref.ref[Any]]] = weakref.WeakKeyDictionary()


def _the_same(value: Hashable) -> Any:
    """Return the first value that was equal to *value*: modes are told apart by identity, which is fast.

    It is known as long as it is used somewhere: what it holds, as the model of a ``reset=model.reset``, goes with it.
    """
    found = _known.setdefault(value, weakref.ref(value))()
    if found is None:  # it went just now
        _known[value] = weakref.ref(value)
    return value if found is None else found


def parse_rules(text: str) -> tuple[Rule, ...]:
    """Read ``decode*=cuda_graph,prefill=compile``; a mode alone is for every site. The first that matches holds.

    A name of a span that holds what separates here (``,``, ``;``, ``=``, ``:`` or a blank) is written with a ``?`` in
    its place.

    Raises:
        ConfigurationError: A part cannot be read; the message names it.
    """
    return tuple(_rule(part) for part in filter(None, (piece.strip() for piece in text.split(","))))


def _rule(part: str) -> Rule:
    match, equals, name = (piece.strip() for piece in part.partition("="))
    if not equals:
        match, name = "", match
    if any(mark in name for mark in "()[]") or "(" in match or ")" in match or ("[" in match and "]" not in match):
        raise ConfigurationError(f"mode {part!r}: a mode with options is given in code, here only its name.")
    if ";" in part or "=" in name or len(match.split()) > 1:
        raise ConfigurationError(
            f"mode {part!r}: separate with commas, as in decode*=cuda_graph,prefill=compile. "
            "In a name, write ? for a blank, = or ;."
        )
    if ":" in part:
        before, _, last = (match or name).rpartition(":")
        span, mode = (last, name) if equals else (before.rpartition(":")[2], last)
        mends = f"write {f'{span}={mode}'!r}" if span and mode in MODES else "write it like decode*=cuda_graph"
        raise ConfigurationError(f"mode {part!r}: modes go by the name of the span: {mends}.")
    if equals and not match:
        raise ConfigurationError(f"mode {part!r} names no span: write it like decode*=cuda_graph, or {name} alone.")
    return Rule(match or "*", mode_of(name))


def unmatched(rules: Iterable[Rule], names: Iterable[str]) -> tuple[str, ...]:
    """Return the patterns of *rules* that match none of *names*, those of the spans; nothing where there are none."""
    known = list(names)
    return tuple(
        dict.fromkeys(rule.match for rule in rules if known and not any(matches(rule.match, name) for name in known))
    )


@functools.lru_cache(maxsize=4096)
def matches(pattern: str, name: str) -> bool:
    """Return whether the glob *pattern* is for spans called *name*; upper and lower case differ."""
    return fnmatchcase(name, pattern)
